"""The pieces of a page that is one file: its frame and style, tables, and pictures as data URIs."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

QUALITIES = (85, 70, 50, 30, 15)  # of JPEG, until a picture is small enough


def page(title: str, body: str, footer: str) -> str:
    """A whole page of HTML from a body of HTML; whatever is in it, a browser fetches nothing.

    It is written in ASCII, so that it reads the same whatever the locale and whatever is in the name of a folder.
    """
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{CSS}</style>
</head>
<body>
<main>
{body}
</main>
<footer><p>{escape(footer)}</p></footer>
</body>
</html>
"""
    return text.encode("ascii", "xmlcharrefreplace").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "", named: bool = True) -> str:
    """A table of cells that are HTML already; with ``named``, the first cell of a row is its head."""
    lines = []
    for first, *rest in rows:
        start = f'<th scope="row">{first}</th>' if named else f"<td>{first}</td>"
        lines.append(f"<tr>{start}{''.join(f'<td>{cell}</td>' for cell in rest)}</tr>")
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    top = f"<thead><tr>{columns}</tr></thead>\n" if head else ""
    body = "\n".join(lines)
    return f'<div class="scroll"><table class="{kind}">\n{top}<tbody>\n{body}\n</tbody></table></div>\n'


def figure(source: str, alt: str, caption: str = "", kind: str = "") -> str:
    """A picture with its caption; the texts are not HTML yet."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}"><div class="scroll">{image(source, alt)}</div>{words}</figure>\n'


def image(source: str, alt: str, kind: str = "") -> str:
    return f'<img class="{kind}" src="{source}" alt="{escape(alt)}">'


def plot(drawn: "Figure") -> str:
    """A plot as a data URI."""
    out = io.BytesIO()
    drawn.savefig(out, format="png")
    return _data_uri("png", out.getvalue())


def picture(shown: "Image", side: int, limit: int) -> str:
    """A picture as a data URI: PNG if that has at most ``limit`` bytes, else JPEG of at most ``side`` pixels."""
    shown = shown.convert("L" if shown.mode in ("1", "L") else "RGB")
    content, kind = _encoded(shown, "PNG"), "png"
    if len(content) > limit:
        shown.thumbnail((side, side))
        kind = "jpeg"
        for quality in QUALITIES:
            content = _encoded(shown, "JPEG", quality=quality)
            if len(content) <= limit:
                break
    return _data_uri(kind, content)


def _encoded(shown: "Image", kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    shown.save(out, kind, **options)
    return out.getvalue()


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


CSS = """\
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5b626b; --paper: #fff; --line: #d9dde2; --wash: #f4f5f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --soft: #9aa2ab; --paper: #16181b; --line: #363b42; --wash: #1f2226 }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5; font-family: system-ui, sans-serif }
main, footer { max-width: 62rem; margin: 0 auto; padding: 1rem }
h1, h2, h3 { line-height: 1.2; overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 .75rem; padding-top: 1rem; border-top: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem }
p { overflow-wrap: anywhere }
.missing, figcaption, footer, summary { color: var(--soft); font-size: .9rem }
.missing { background: var(--wash); padding: .5rem .75rem; border-radius: .4rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; margin: .5rem 0 }
th, td { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line) }
tbody th { font-weight: normal; color: var(--soft) }
td { overflow-wrap: anywhere }
.numbers th, .numbers td { white-space: nowrap; font-variant-numeric: tabular-nums }
.numbers th:nth-child(n+3), .numbers td:nth-child(n+3) { text-align: right; padding: .25rem 0 .25rem 1rem }
.tiles th, .tiles td { white-space: nowrap; text-align: center; vertical-align: middle; border: 0; padding: .25rem }
.tiles th:first-child { text-align: left; position: sticky; left: 0; background: var(--paper) }
code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { background: var(--wash); padding: .75rem; border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere }
figure { margin: .5rem 0 }
img { max-width: 100%; vertical-align: middle }
.wide .scroll { background: #fff; border-radius: .4rem }
.wide img { width: 100%; min-width: 40rem; max-width: none; display: block }
.grids { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem }
.grids figure { margin: 0 }
.grids img { width: 100% }
.tile { width: 6rem; image-rendering: pixelated }
@media (max-width: 40rem) {
  .grids { grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)) }
  .tile { width: 4.5rem }
}
@media print {
  :root { --ink: #000; --soft: #444; --paper: #fff; --line: #bbb; --wash: #f4f5f7 }
  main, footer { max-width: none; padding: 0 }
  figure, tr, pre { break-inside: avoid }
  h2, h3 { break-after: avoid }
  .wide img { min-width: 0 }
  .tile { width: 4.5rem }
  details::details-content { content-visibility: visible; display: block; height: auto }
}
"""
