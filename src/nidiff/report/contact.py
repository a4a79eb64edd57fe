"""A contact sheet: pictures beside one another, each with its name. It needs no matplotlib."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from nidiff import style
from nidiff.data.pictures import grid_image
from nidiff.errors import InputError
from nidiff.files import as_path, replacing, writing

SIDE, GAP, LINE, LETTERS, WIDEST_LETTER = 260, 14, 22, 18, 10  # pixels
WIDEST, NARROWEST = round(style.WIDTH * style.DPI), 64  # of a sheet, of a square


def save_panels(out: Path, panels: Mapping[str, Tensor], side: int = 8) -> None:
    """A row of titled grids of side × side images each, from [N, C, H, W] in [-1, 1]."""
    grids = [(title, grid_image(images[: side * side], side)) for title, images in panels.items()]
    save_sheet([(title.replace("Σ", "Sigma"), grid) for title, grid in grids], out, len(grids))  # no Greek in the font


def save_sheet(
    pictures: Sequence[tuple[str, Image.Image]], out: Path, columns: int | None = None, side: int = SIDE
) -> None:
    """Write pictures with their names above them as a PNG, each as large as it fits into a square of ``side`` pixels,
    or of fewer where that would be too wide.

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


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    scale = side / max(picture.size)
    size = [max(1, round(scale * length)) for length in picture.size]
    return picture.resize((size[0], size[1]), Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.LANCZOS)
