"""The constants of the paper, each beside ours and the convention that gives it.

python benchmarks/paper_constants.py            # all but sigma_1, which needs the data
python benchmarks/paper_constants.py FOLDER     # FOLDER has the binary version of CIFAR-10; it is downloaded if not
"""

import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.aligned import aligned
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Fourier, Identity
from nidiff.covariance.fields import gaussian_free_field
from nidiff.data.load import load_dataset
from nidiff.design.distance import batch_whitened_distance, max_whitened_distance
from nidiff.design.scales import CLASSIC_RATIO, num_levels, overlap, overlap_ratio
from nidiff.progress import Progress, progress_bar
from nidiff.sampling.annealing import langevin_epsilon

SIGMA_N = {
    2: 0.39528470752104744,
    4: 0.17030533460540237,
    8: 0.053976619959778704,
    16: 0.015784561822114067,
    32: 0.004442407825782781,
    64: 0.0012219552979003889,
    128: 0.00033098344651100604,
}
LEVELS = {50.0: (232, 1.0375591319992028), 20.0: (207, 1.0375867506951884), 3.72: (161, 1.0376858468648256)}
SIGMA_MIN = 0.01
SHAPE, CHANNELS = (32, 32), 3  # CIFAR-10
DROPPED, KEPT = "zero mode dropped", "|k00| := 1"


class Constant(NamedTuple):
    name: str
    paper: float | None
    """None where the paper has no such number: ours stands beside one that it has."""
    ours: float
    convention: str


def paper_constants() -> list[Constant]:
    """All but the initial noise scales, which need the data."""
    return [*_normalisation(), *_levels(), *_langevin()]


def initial_scales(images: Tensor, progress: Progress | None = None) -> Iterator[Constant]:
    """sigma_1 of CIFAR-10 (uint8 [N, 3, 32, 32]), pixels in [0, 1]: 50 for SMLD, 20 for NI-SMLD (E29)."""
    for name, paper, covariance, sigma in (
        ("SMLD", 50.0, Identity(SHAPE), "Sigma = I"),
        ("NI-SMLD", 20.0, _without_mean(SHAPE), DROPPED),
        ("NI-SMLD", None, gaussian_free_field(SHAPE), KEPT),
    ):
        # The functions take uint8 as [-1, 1], which is twice as wide.
        for seed in range(3):
            largest = batch_whitened_distance(images, covariance, generator=torch.Generator().manual_seed(seed))
            convention = f"largest distance in mini-batches of 128, epoch of seed {seed}; {sigma}; pixels in [0, 1]"
            yield Constant(f"{name} sigma_1", paper, largest / 2, convention)
        farthest = max_whitened_distance(images, covariance, progress=progress)
        convention = f"largest distance of all pairs, images {farthest.pair}; {sigma}; pixels in [0, 1]"
        yield Constant(f"{name} sigma_1, exact", None, farthest.distance / 2, convention)


def _normalisation() -> Iterator[Constant]:
    """sigma_N² = Σ_{k≠0} |k|⁻² / N²: the noise drawn in the Fourier domain, the zero mode dropped (E1)."""
    convention = f"sqrt(sum over k != 0 of 1/|k|^2) / n^2: noise in the Fourier domain, {DROPPED}"
    for n, paper in SIGMA_N.items():
        spectrum = gaussian_free_field((n, n), zero_mode="zero", normalize=False).eigenvalues
        yield Constant(f"sigma_N, n = {n}", paper, spectrum.sum().sqrt().item() / n**2, convention)


def _levels() -> Iterator[Constant]:
    """The printed ratios come from L, and L from SMLD's ratio, rounded down; they do not solve the overlap (E30)."""
    dimension = CHANNELS * math.prod(SHAPE)
    exact = overlap_ratio(dimension)
    for sigma_max, (levels, paper) in LEVELS.items():
        name, span = f"sigma_1 = {sigma_max:g}", sigma_max / SIGMA_MIN
        ours = span ** (1 / (levels - 1))
        convention = f"(sigma_1 / sigma_L)^(1 / (L - 1)), L = {levels}; overlap {overlap(ours, dimension):.4f}, not 1/2"
        yield Constant(f"ratio, {name}", paper, ours, convention)
        rounded = math.floor(1 + math.log(span) / math.log(CLASSIC_RATIO) + 1e-9)
        yield Constant(f"L, {name}", levels, rounded, "1 + log(sigma_1 / sigma_L) / log 1.03756, rounded down")
        yield Constant(f"ratio, {name}, solved", None, exact, f"overlap 1/2 exactly, D = {dimension}")
        solved = num_levels(sigma_max, SIGMA_MIN, exact)
        yield Constant(f"L, {name}, solved", None, solved, "for that ratio, rounded up")


def _langevin() -> Iterator[Constant]:
    """ε is where the mean variance of a pixel is least; the printed update lacks Σ before the score (E23, E31)."""
    dropped, kept = gaussian_free_field(SHAPE, zero_mode="zero"), gaussian_free_field(SHAPE)
    printed = "as printed (no Sigma before the score)"
    for name, paper, covariance, sigma_max, steps, preconditioned, convention in (
        ("SMLD", 6.2e-6, Identity(SHAPE), 50.0, 5, True, "Sigma = I"),
        ("NI-SMLD", 3.1e-7, dropped, 20.0, 5, False, f"{printed}, {DROPPED}"),
        ("NI-SMLD", 3.1e-7, kept, 20.0, 5, False, f"{printed}, {KEPT}"),
        ("NI-SMLD", 2.0e-6, dropped, 20.0, 1, False, f"{printed}, {DROPPED}"),
        ("NI-SMLD", 2.0e-6, kept, 20.0, 1, False, f"{printed}, {KEPT}"),
        ("NI-SMLD", None, kept, 20.0, 5, True, "preconditioned"),
        ("NI-SMLD", None, kept, 20.0, 1, True, "preconditioned: sigma_L^2 (1 - 1/ratio^2)"),
    ):
        ours = langevin_epsilon(covariance, LEVELS[sigma_max][1], SIGMA_MIN, steps, preconditioned)
        yield Constant(f"{name} epsilon, T = {steps}", paper, ours, f"least mean variance; {convention}")


def _without_mean(shape: tuple[int, int]) -> Covariance:
    """Whitens as the pseudo-inverse of the free field without its zero mode: a mean of huge variance does not count."""
    spectrum = gaussian_free_field(shape, zero_mode="zero").eigenvalues.clone()
    spectrum[0, 0] = 1e12
    return Fourier(shape, spectrum, normalize=False)


def main() -> None:
    constants = paper_constants()
    if len(sys.argv) > 1:
        data = load_dataset("cifar10", data_dir=sys.argv[1], memory_limit=None)
        with progress_bar("distances", "pairs") as progress:
            constants += initial_scales(data.stored(torch.arange(len(data))), progress)
    rows = [("constant", "paper", "ours", "convention")]
    for name, paper, ours, convention in constants:
        rows.append((name, "-" if paper is None else f"{paper:.10g}", f"{ours:.10g}", convention))
    print(aligned(rows))


if __name__ == "__main__":
    main()
