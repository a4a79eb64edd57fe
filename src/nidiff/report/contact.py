"""A contact sheet: pictures beside one another, each with its name. It needs no matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from nidiff import style
from nidiff.errors import FileError, InputError, first_line
from nidiff.files import as_path, replacing, writing

SIDE, GAP, LINE, LETTERS, SMALLEST = 260, 16, 26, 16, 11  # pixels


def save_contact_sheet(pictures: Mapping[str, Path], out: Path, columns: int | None = None) -> None:
    """Write the pictures, each as large as it fits into a square, with their names above them, as a PNG."""
    save_sheet([(name, _opened(file)) for name, file in pictures.items()], out, columns)


def save_sheet(
    pictures: Sequence[tuple[str, Image.Image]], out: Path, columns: int | None = None, side: int = SIDE
) -> None:
    """The same of pictures that are in memory, in squares of ``side`` pixels."""
    out = as_path("out", out)
    if out.suffix.lower() != ".png" or out.is_dir():
        raise InputError(f"out={str(out)!r} must be a file that ends in .png.")
    columns = columns or math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    letters = min(LETTERS, max(SMALLEST, side // 10))
    width, height = side + GAP, side + LINE + GAP
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), style.look().paper)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(letters)
    for index, (name, picture) in enumerate(pictures):
        left, top = GAP + index % columns * width, GAP + index // columns * height
        draw.text((left, top), name, fill=style.ink(), font=font)
        sheet.paste(_fitted(picture, side), (left, top + LINE))
    with writing("out", out), replacing(out) as stream:
        sheet.save(stream, format="png", optimize=True)


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
