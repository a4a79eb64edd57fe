"""The pieces of a page that is one file: its frame and style, tables, and pictures as data URIs."""

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
from PIL.Image import Image

from nidiff import style

FRAME = Path(__file__).with_name("page.html")


def page(title: str, body: str, footer: str) -> str:
    """A whole page of HTML from a body of HTML; whatever is in it, a browser fetches nothing.

    It is written in ASCII, so that it reads the same whatever the locale and whatever is in the name of a folder.
    """
    style = FRAME.with_suffix(".css").read_text(encoding="utf-8")
    text = FRAME.read_text(encoding="utf-8").format(title=escape(title), style=style, body=body, footer=escape(footer))
    return text.encode("ascii", "xmlcharrefreplace").decode()


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """A table of cells that are HTML already; the first cell of a row is its head."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    top = f"<thead><tr>{columns}</tr></thead>\n" if head else ""
    body = "\n".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    return f'<div class="scroll"><table class="{kind}">\n{top}<tbody>\n{body}\n</tbody></table></div>\n'


def figure(source: str, alt: str, caption: str = "", kind: str = "") -> str:
    """A picture with its caption; the texts are not HTML yet."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{kind}"><div class="scroll">{image(source, alt)}</div>{words}</figure>\n'


def image(source: str, alt: str, kind: str = "") -> str:
    return f'<img class="{kind}" src="{source}" alt="{escape(alt)}">'


@style.drawn
def plot(drawn: Figure, alt: str, caption: str = "", kind: str = "wide") -> str:
    return figure(data_uri(drawn.savefig, "png"), alt, caption, kind)


def picture(shown: Image, side: int, limit: int) -> str:
    """A picture as a data URI: PNG if that has at most ``limit`` letters, else JPEG of at most ``side`` pixels."""
    shown = shown.convert("L" if shown.mode in ("1", "L") else "RGB")
    source = data_uri(shown.save, "png")
    if len(source) <= limit:
        return source
    shown.thumbnail((side, side))
    return data_uri(shown.save, "jpeg", quality=60)


def data_uri(save: Callable[..., object], kind: str, **options: int) -> str:
    out = io.BytesIO()
    save(out, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"
