"""Titled grids of images side by side."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure
from torch import Tensor

from nidiff.data.pictures import grid_pixels
from nidiff.report.noise import save_figure


def save_panels(path: Path, panels: Mapping[str, Tensor], side: int = 8) -> None:
    """A row of titled grids of side × side images each, from [N, C, H, W] in [-1, 1]."""
    figure = Figure(figsize=(3.2 * len(panels), 3.5), dpi=120, layout="constrained")
    for axes, (title, images) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        pixels = grid_pixels(images[: side * side], side).numpy()
        axes.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
        axes.set_title(title)
        axes.axis("off")
    save_figure(figure, path)
