"""What guidance costs beside its two calls of the network: python benchmarks/guidance.py

A guided call of a denoiser and two plain calls are timed in turn, in one process, so that whatever else the computer
does meets both; the ratio of each pair is taken, and the median of these is printed with its quartiles. The second
column is the same with two plain calls in place of the guided one: how far the first can be trusted.
"""

import argparse
import time
from collections.abc import Callable

import torch

import nidiff
from nidiff.model.unet import FieldUNet

SIZES = {"digits": ((1, 8, 8), (32, 64), 64), "32×32": ((3, 32, 32), (32, 64, 128), 16)}  # shape, widths, batch


def conditional(shape: tuple[int, ...], widths: tuple[int, ...]) -> nidiff.Denoiser:
    """A denoiser that was never trained and knows ten classes; what it says does not change its time."""
    torch.manual_seed(0)
    channels, *event = shape
    net = FieldUNet(event, channels, channels, widths=widths, num_classes=10).eval()
    process = nidiff.Process(nidiff.schedules.ddpm_linear(1000), nidiff.gaussian_free_field(tuple(event)))
    conditions = {"class_labels": nidiff.Condition(10, (), -1, 0.1)}
    return nidiff.Denoiser(net, process, clip=1.0, conditions=conditions)


def ratios(first: Callable[[], object], second: Callable[[], object], pairs: int) -> torch.Tensor:
    """The time of ``first`` over that of ``second``, pair by pair, and each as often before the other as after it."""
    found = []
    for number in range(pairs + 2):
        times = {}
        for act in (first, second) if number % 2 else (second, first):
            begin = time.perf_counter()
            act()
            times[act] = time.perf_counter() - begin
        found.append(times[first] / times[second])
    return torch.tensor(found[2:], dtype=torch.float64)  # without those in which memory is asked for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100, help="pairs of each size")
    parser.add_argument("--scale", type=float, default=2.0, help="of the guidance")
    options = parser.parse_args()
    print(f"median [quartiles] over {options.pairs} pairs, {torch.get_num_threads()} thread(s)")
    for name, (shape, widths, batch) in SIZES.items():
        denoiser = conditional(shape, widths).given(class_labels=torch.arange(batch) % 10)
        guided, level = denoiser.guided(options.scale), denoiser.process.schedule.level(500)
        x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0))

        def twice(denoiser: nidiff.Denoiser = denoiser, x: torch.Tensor = x, level: nidiff.Level = level) -> None:
            denoiser(x, level)
            denoiser(x, level)

        def again(twice: Callable[[], None] = twice) -> None:
            twice()

        with torch.inference_mode():
            found = [ratios(one, twice, options.pairs) for one in (lambda g=guided, x=x, at=level: g(x, at), again)]  # type: ignore[misc]
        quartiles = [one.quantile(torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)).tolist() for one in found]
        words = [f"{middle:.3f} [{low:.3f}, {high:.3f}]" for middle, low, high in quartiles]
        print(f"{name}, {batch} images: guided / two calls {words[0]}; two calls / two calls {words[1]}")


if __name__ == "__main__":
    main()
