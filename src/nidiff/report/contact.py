"""A contact sheet: pictures beside one another, each with its name. It needs no matplotlib."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from nidiff import style
from nidiff.errors import FileError, InputError, first_line
from nidiff.files import as_path, replacing, writing

SIDE, GAP, LINE, LETTERS = 260, 14, 22, 18  # pixels
WIDEST, NARROWEST = round(style.WIDTH * style.DPI), 64  # of a sheet, of a square


def save_contact_sheet(pictures: Mapping[str, Path], out: Path, columns: int | None = None) -> None:
    """Write the pictures, each as large as it fits into a square, with their names above them, as a PNG."""
    save_sheet([(name, _opened(file)) for name, file in pictures.items()], out, columns)


def save_sheet(
    pictures: Sequence[tuple[str, Image.Image]], out: Path, columns: int | None = None, side: int = SIDE
) -> None:
    """The same of pictures that are in memory, in squares of ``side`` pixels, or of fewer where that would be too wide.

    A name that is longer than its square goes over several lines.
    """
    out = as_path("out", out)
    if out.suffix.lower() != ".png" or out.is_dir():
        raise InputError(f"out={str(out)!r} must be a file that ends in .png.")
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    side = max(NARROWEST, min(side, (WIDEST - GAP) // columns - GAP))
    font = ImageFont.load_default(LETTERS)
    names = [_lines(name, font, side) for name, _ in pictures]
    above = LINE * max(map(len, names)) + 4
    width, height = side + GAP, side + above + GAP
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), style.look().paper)
    draw = ImageDraw.Draw(sheet)
    for index, (lines, (_, picture)) in enumerate(zip(names, pictures, strict=True)):
        left, top = GAP + index % columns * width, GAP + index // columns * height
        for line, words in enumerate(reversed(lines), start=1):  # the last is next to the picture
            draw.text((left, top + above - 4 - line * LINE), words, fill=style.ink(), font=font)
        sheet.paste(_fitted(picture, side), (left, top + above))
    with writing("out", out), replacing(out) as stream:
        sheet.save(stream, format="png", optimize=True)


def _lines(name: str, font: Any, width: int) -> list[str]:
    """Words in lines of at most so many pixels; what is left of a word that is longer is cut."""
    lines = [""]
    together = re.findall(r"\([^)]*\)|\S+", name)  # what is in brackets stays together where it fits
    for word in (word for part in together for word in ([part] if font.getlength(part) <= width else part.split())):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and font.getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [_cut(line, font, width) for line in lines]


def _cut(line: str, font: Any, width: int) -> str:
    if font.getlength(line) > width:
        while line and font.getlength(f"{line}…") > width:
            line = line[:-1]
        line += "…"
    return line


def _opened(file: Path) -> Image.Image:
    try:
        with Image.open(file, formats=["PNG"]) as found:
            return found.convert("RGB")
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        raise FileError(f"{str(file)!r} cannot be read ({first_line(error)}): restore it.") from error


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    size = [max(1, round(scale * length)) for length in picture.size]
    return picture.resize((size[0], size[1]), Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)
