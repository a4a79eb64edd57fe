"""Titled grids of images side by side."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from torch import Tensor

from nidiff import style
from nidiff.data.pictures import grid_pixels
from nidiff.report.noise import save_figure

LETTERS = 12  # of a title, per inch


@style.drawn
def save_panels(path: Path, panels: Mapping[str, Tensor], side: int = 8) -> None:
    """A row of titled grids of side × side images each, from [N, C, H, W] in [-1, 1]."""
    width = min(3.2, max(1.6, style.WIDTH / len(panels)))
    figure = Figure(figsize=(width * len(panels), width + 0.4), layout="constrained")
    for axes, (title, images) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        pixels = grid_pixels(images[: side * side], side).numpy()
        axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap=style.GREY, vmin=0, vmax=255)
        axes.set_title(fill(title, int(LETTERS * width)))
        axes.axis("off")
    save_figure(figure, path)
