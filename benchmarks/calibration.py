"""What does the exact largest distance of all pairs cost? Beside torch.cdist over the same pairs.

Prints ratios, each the median over rounds in which both sides ran in turn. With --data-dir also the whole of CIFAR-10,
once, beside the promise: at most 3 minutes and 2 GiB on 2 cores.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import torch
from timing import Row, at_shape, compare, interleave, log, report, warn_if_busy
from torch import Tensor

import nidiff
from nidiff.covariance.covariance import Covariance
from nidiff.data.load import load_dataset
from nidiff.design.distance import max_whitened_distance

SHAPE = (3, 32, 32)
BLOCK = 1024
MINUTES, GIBIBYTES = 3, 2


def photographs(count: int) -> Tensor:
    """Fields with the spectrum of photographs and of various contrast: most pairs are far from the largest distance."""
    generator = torch.Generator().manual_seed(0)
    images = nidiff.power_law(SHAPE[1:], 3.0).sample((count, *SHAPE), generator)
    return images * torch.randn(count, 1, 1, 1, generator=generator).mul(0.3).exp()


def noise(count: int) -> Tensor:
    """All pairs are about equally far apart, so that none can be left out: the worst case."""
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(0))


def largest_by_cdist(images: Tensor, covariance: Covariance) -> float:
    """What one would write: whiten, and the distances of all pairs in blocks."""
    blocks = covariance.inv_sqrt(images).flatten(1).split(BLOCK)
    return max(torch.cdist(a, b).max().item() for i, a in enumerate(blocks) for b in blocks[i:])


def against_cdist(images: Tensor, rounds: int) -> list[Row]:
    covariance = nidiff.gaussian_free_field(SHAPE[1:])
    ours, theirs = max_whitened_distance(images, covariance).distance, largest_by_cdist(images, covariance)
    assert abs(ours - theirs) < 1e-3 * ours, "both find the same distance"
    times = interleave(
        {
            "torch.cdist": lambda: largest_by_cdist(images, covariance),
            "max_whitened_distance": lambda: max_whitened_distance(images, covariance),
        },
        rounds,
    )
    return [compare(times, "max_whitened_distance", "torch.cdist")]


def whole(data_dir: Path) -> list[Row]:
    """CIFAR-10 once for each Σ: the share of the time and the memory that were promised."""
    images = load_dataset("cifar10", data_dir=data_dir).values
    assert isinstance(images, Tensor)
    rows = []
    for name, covariance in (
        ("Identity", nidiff.Identity(SHAPE[1:])),
        ("free field", nidiff.gaussian_free_field(SHAPE[1:])),
    ):
        start = time.perf_counter()
        found = max_whitened_distance(images, covariance)
        seconds = time.perf_counter() - start
        share = seconds / (60 * MINUTES)
        note = f"sigma_max {found.distance:.4f} on [-1, 1]"
        rows.append(Row(f"{name}: time", f"{MINUTES} minutes", share, share, share, 1.0, 1e3 * seconds, note))
    unit = 1 if sys.platform == "darwin" else 1024
    share = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / (GIBIBYTES * 2**30)
    rows.append(Row("peak memory of the process", f"{GIBIBYTES} GiB", share, share, share, 1.0))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=4096, help="number of images beside torch.cdist")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    warn_if_busy()
    sections: dict[str, list[Row]] = {}
    if options.data_dir:  # first: the peak memory is that of the process so far
        log("CIFAR-10")
        sections["all of CIFAR-10, once"] = whole(options.data_dir)
    for name, make in (("like photographs", photographs), ("white noise", noise)):
        log(name)
        images = make(options.images)
        sections[f"{name}, {at_shape(images.shape)}"] = against_cdist(images, options.rounds)
    report(sections, as_json=options.json)


if __name__ == "__main__":
    main()
