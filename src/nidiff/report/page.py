"""The pieces of a page that is one file: its frame and style, tables, and pictures as data URIs."""

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from PIL.Image import Image

STYLE = Path(__file__).with_name("page.css")
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
{STYLE.read_text()}</style>
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


def plot(drawn: Figure) -> str:
    """A plot as a data URI."""
    out = io.BytesIO()
    drawn.savefig(out, format="png")
    return _data_uri("png", out.getvalue())


def picture(shown: Image, side: int, limit: int) -> str:
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


def _encoded(shown: Image, kind: str, **options: int) -> bytes:
    out = io.BytesIO()
    shown.save(out, kind, **options)
    return out.getvalue()


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
