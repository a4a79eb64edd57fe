"""The picture of ``nidiff demo``: real digits, and for each model its noise beside its samples."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.randomness import generators_from_seeds
from nidiff.report.grid import grid_pixels

SIDE = 8  # images along a side


def save_demo(path: Path, real: Tensor, models: Mapping[str, tuple[Tensor, Covariance]]) -> None:
    """A row of grids: the real images; then each model's noise N(0, Σ) and its samples [N, C, H, W]."""
    count, shape = SIDE * SIDE, real.shape[1:]
    panels = {"real": real[:count]}
    for title, (images, covariance) in models.items():
        noise = covariance.sample((count, *shape), generators_from_seeds(range(count)))
        panels[f"{title}: noise"] = noise / 3
        panels[f"{title}: samples"] = images[:count]
    figure = Figure(figsize=(3.2 * len(panels), 3.6), dpi=120, layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, len(panels)))
    for axis, (title, images) in zip(axes, panels.items(), strict=True):
        pixels = grid_pixels(images, SIDE).numpy()
        axis.imshow(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels, cmap="gray", vmin=0, vmax=255)
        axis.set_title(title)
        axis.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
