"""A contact sheet: pictures beside one another, each with its name. It needs no matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from nidiff import style
from nidiff.errors import FileError, InputError, first_line
from nidiff.files import as_path, replacing, writing

SIDE, GAP, LINE, LETTERS, WIDEST_LETTER = 260, 14, 22, 18, 10  # pixels
WIDEST, NARROWEST = round(style.WIDTH * style.DPI), 64  # of a sheet, of a square


def save_contact_sheet(pictures: Mapping[str, Path], out: Path, columns: int | None = None) -> None:
    """Write the pictures, each as large as it fits into a square, with their names above them, as a PNG."""
    save_sheet([(name, _read_png(file)) for name, file in pictures.items()], out, columns)


def save_sheet(
    pictures: Sequence[tuple[str, Image.Image]], out: Path, columns: int | None = None, side: int = SIDE
) -> None:
    """The same of pictures that are in memory, in squares of ``side`` pixels, or of fewer where that would be too wide.

    A name that is longer than its square goes over several lines.
    """
    out = as_path("out", out)
    if out.suffix.lower() != ".png" or out.is_dir():
        raise InputError("out", str(out), "is not a file that ends in .png", "give another name")
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    side = max(NARROWEST, min(side, (WIDEST - GAP) // columns - GAP))
    font = ImageFont.load_default(LETTERS)
    names = [wrap(name, side // WIDEST_LETTER, max_lines=3, placeholder="…") or [""] for name, _ in pictures]
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


def _read_png(file: Path) -> Image.Image:
    try:
        with Image.open(file, formats=["PNG"]) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises nearly anything when a file is broken
        raise FileError(None, None, f"{str(file)!r} cannot be read ({first_line(error)})", "restore it") from error


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    size = [max(1, round(scale * length)) for length in picture.size]
    return picture.resize((size[0], size[1]), Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)
