"""Titled grids of images side by side."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from torch import Tensor

from nidiff import style
from nidiff.data.pictures import grid_pixels
from nidiff.report.noise import save_figure

LETTERS, LINE = 12, 0.17  # of a title: letters per inch, inches per line


@style.drawn
def save_panels(path: Path, panels: Mapping[str, Tensor], side: int = 8) -> None:
    """A row of titled grids of side × side images each, from [N, C, H, W] in [-1, 1]."""
    width = min(3.2, max(1.6, style.WIDTH / len(panels)))
    titles = [fill(title, int(LETTERS * width)) for title in panels]
    grids = [grid_pixels(images[: side * side], side).numpy() for images in panels.values()]
    tallest = max(pixels.shape[0] / pixels.shape[1] for pixels in grids)
    height = width * tallest + LINE * (1 + max(title.count("\n") for title in titles)) + 0.05
    figure = Figure(figsize=(width * len(panels), height), layout="constrained")
    for axes, title, pixels in zip(figure.subplots(1, len(panels), squeeze=False)[0], titles, grids, strict=True):
        axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap=style.GREY, vmin=0, vmax=255)
        axes.set_title(title)
        axes.axis("off")
        axes.set_anchor("S")
    save_figure(figure, path)
