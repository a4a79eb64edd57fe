"""The picture of ``nidiff calibrate``: the distances between images, and which frequencies each level destroys."""

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from torch import Tensor

from nidiff import style
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.design.distance import as_pixels, random_subset, sampled_distances
from nidiff.design.scales import Calibration
from nidiff.report.spectrum import common_shells, draw_logsnr, expected_spectrum, mean_spectrum, wavenumber_label

NUM_IMAGES = 1024  # a random subset is enough for a picture


@style.drawn
def calibration_figure(
    images: Tensor, covariance: Covariance, calibration: Calibration, *, generator: torch.Generator | None = None
) -> Figure:
    """Left: the histogram of ‖Σ^-½(x_i − x_j)‖, with sigma_max. Right: the log-SNR of each |k| at each level.

    The log-SNR of a mode is log(power of the images / (sigma² · power of Σ)), averaged over the modes of one |k|. A
    dashed line is where white noise of the same sigma would have log-SNR 0.
    """
    distances = sampled_distances(images, covariance, num_images=NUM_IMAGES, generator=generator)
    subset = as_pixels(random_subset(images, NUM_IMAGES, generator)).double()
    figure = Figure(figsize=(style.WIDTH, 3.6), layout=ConstrainedLayoutEngine(w_pad=0.15))
    left, right = figure.subplots(1, 2)
    _draw_distances(left, distances, calibration)
    _draw_logsnr(right, subset - subset.mean(0), covariance, calibration)
    return figure


def _draw_distances(axes: Axes, distances: Tensor, calibration: Calibration) -> None:
    axes.hist(distances.cpu().numpy(), bins=80, color=style.SKY, density=True)
    axes.axvline(calibration.sigma_max, color=style.ink(), zorder=4)
    how = {"max": "largest of all pairs", "batch": "largest within a mini-batch", "quantile": "quantile"}
    words = f"sigma_max = {calibration.sigma_max:.2f} \n{how[calibration.distance]} "
    axes.margins(y=0.2)  # room for the label above the bars
    label = axes.text(calibration.sigma_max, 0.97, words, ha="right", va="top", fontsize=style.SMALL)
    label.set(transform=axes.get_xaxis_transform())
    axes.set_xlim(0, 1.03 * max(calibration.sigma_max, distances.max().item()))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("whitened distance ‖Σ$^{-1/2}$(x$_i$ − x$_j$)‖")
    axes.set_title(f"distances between images\n{len(distances):,} random pairs")


def _draw_logsnr(axes: Axes, images: Tensor, covariance: Covariance, calibration: Calibration) -> None:
    shells, logsnr = common_shells([covariance]), calibration.schedule().logsnr
    signal = mean_spectrum(images, shells)
    visible = signal > 0  # a |k| without signal has no log-SNR
    radii = shells.wavenumber[visible].tolist()
    coloured, white = (
        (signal / expected_spectrum(noise, shells))[visible].log() + logsnr[:, None]
        for noise in (covariance, Identity(covariance.event_shape))
    )
    mesh = draw_logsnr(axes, coloured, radii)
    if min(white.shape) > 1:
        ink, levels = style.LIGHT.ink, torch.linspace(0, 1, len(white)).tolist()
        axes.contour(levels, radii, white.T.numpy(), levels=[0.0], colors=ink, linestyles="dashed", linewidths=1.0)
        for label, dash in {"log-SNR 0": "solid", "the same for Σ = I": "dashed"}.items():
            axes.plot([], [], color=ink, linestyle=dash, label=label)
        axes.legend(loc="lower left", facecolor=style.LIGHT.paper, labelcolor=ink)
    axes.figure.colorbar(mesh, ax=axes, label="log-SNR (nats)")
    axes.set_xlabel(f"level, from sigma = {calibration.sigma_min:g} to {calibration.sigma_max:.3g}")
    axes.set_ylabel(wavenumber_label(shells.shape, shells.boundary))
    axes.set_title("log-SNR of each frequency at each level\nblue: images show, red: noise covers them")
