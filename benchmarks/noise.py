"""What does a draw of the Gaussian free field cost? Beside torch.randn, the paper's recipe, powerbox and GSTools.

Prints ratios, each the median over rounds in which both sides ran in turn. Times are printed to give the scale of
things; they are this machine's.
"""

import argparse
import importlib.util
import math
import statistics
from collections.abc import Callable

import torch
from timing import Row, at_shape, compare, interleave, log, parse, report, summary
from torch import Tensor

import nidiff
from nidiff.randomness import generators_from_seeds

SMALL, LARGE = (128, 3, 32, 32), (16, 3, 256, 256)
SIDES = (64, 128, 256, 512, 1024)
# GSTools sums its modes one by one, so all modes of 256² would take minutes per field. It gets these many per axis.
GSTOOLS_MODES = 32


def against_randn(shape: tuple[int, ...], bound: float, rounds: int) -> list[Row]:
    """Our draw, and the two parts no draw by FFT can do without."""
    field = nidiff.gaussian_free_field(shape[-2:])
    generator = torch.Generator().manual_seed(0)
    half = (*shape[:-1], shape[-1] // 2 + 1, 2)
    coefficients = torch.view_as_complex(torch.randn(half, generator=generator))
    times = interleave(
        {
            "torch.randn": lambda: torch.randn(shape, generator=generator),
            "sample": lambda: field.sample(shape, generator),
        },
        rounds,
    )
    # Apart from the pair above: what runs before a call leaves its mark on the memory that the call gets.
    parts = interleave(
        {
            "torch.randn": lambda: torch.randn(shape, generator=generator),
            "of it: normal numbers of half a spectrum": lambda: torch.randn(half, generator=generator),
            "of it: inverse transform": lambda: torch.fft.irfftn(coefficients, s=shape[-2:], dim=(-2, -1)),
        },
        rounds,
    )
    return [
        compare(times, "sample", "torch.randn", bound=bound),
        compare(times, "torch.randn", "sample", note="the share of the cost that white noise has, too"),
        *(compare(parts, name, "torch.randn") for name in list(parts)[1:]),
    ]


def against_peers(shape: tuple[int, ...], rounds: int) -> list[Row]:
    """How many times our draw each peer costs for the same number of fields."""
    field = nidiff.gaussian_free_field(shape[-2:])
    generator = torch.Generator().manual_seed(0)
    count = math.prod(shape[:-2])
    calls: dict[str, Callable[[], object]] = {"sample": lambda: field.sample(shape, generator)}
    calls["the paper's complex FFT recipe"] = paper_recipe(shape, generator)
    scale = {"the paper's complex FFT recipe": 1.0}
    note = {"the paper's complex FFT recipe": "the whole batch"}
    for name, make in {"powerbox": powerbox_draw, "GSTools": gstools_draw}.items():
        if importlib.util.find_spec(name.lower()) is None:
            log(f"{name} is not installed: left out (pip install {name.lower()})")
            continue
        calls[name] = make(shape[-1])
        scale[name] = float(count)
        note[name] = f"1 field timed per round, times {count}"
    if "GSTools" in note:
        note["GSTools"] += f"; {GSTOOLS_MODES}² modes of {shape[-1]}²"
    times = interleave(calls, rounds)
    return [compare(times, name, "sample", scale=scale[name], note=note[name]) for name in list(calls)[1:]]


def paper_recipe(shape: tuple[int, ...], generator: torch.Generator) -> Callable[[], Tensor]:
    """Complex noise of full size, to Fourier space, divided by |k|, back, real part, scaled to unit variance."""
    n = shape[-1]
    frequency = n * torch.fft.fftfreq(n, dtype=torch.float64)
    k = (frequency[:, None].square() + frequency[None, :].square()).sqrt()
    k[0, 0] = 1.0
    scale = 1.0 / k.pow(-2).mean().sqrt().item()
    k = k.float()

    def draw() -> Tensor:
        white = torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        return torch.fft.ifft2(torch.fft.fft2(white) / k).real * scale

    return draw


def powerbox_draw(n: int) -> Callable[[], object]:
    """One field of power |k|⁻² on an n × n grid, the box built beforehand as our covariance is."""
    import powerbox

    box = powerbox.PowerBox(N=n, dim=2, boxlength=float(n), pk=lambda k: k**-2.0, ensure_physical=False)
    return box.delta_x


def gstools_draw(n: int) -> Callable[[], object]:
    """One periodic field by its Fourier generator, the spectrum |k|⁻² given as a model."""
    import gstools
    import numpy as np

    lowest = 2 * np.pi / n

    class FreeField(gstools.CovModel):
        def cor(self, h):  # asked for by the base class; the Fourier generator reads the spectrum only
            return np.exp(-h)

        def spectral_density(self, k):
            return np.maximum(k, lowest) ** -2.0

    field = gstools.SRF(FreeField(dim=2), generator="Fourier", period=[n, n], mode_no=[GSTOOLS_MODES, GSTOOLS_MODES])
    axes = [np.arange(n, dtype=float)] * 2
    seeds = iter(range(1, 1_000_000))
    return lambda: field.structured(axes, seed=next(seeds))


def per_image(shape: tuple[int, ...], rounds: int) -> list[Row]:
    """A generator of its own for each image, so that an image does not depend on its batch."""
    field = nidiff.gaussian_free_field(shape[-2:])
    one, each = torch.Generator().manual_seed(0), generators_from_seeds(range(shape[0]))
    times = interleave(
        {
            "sample, one generator": lambda: field.sample(shape, one),
            "sample, one generator per image": lambda: field.sample(shape, each),
            "making the generators": lambda: generators_from_seeds(range(shape[0])),
        },
        rounds,
    )
    base = "sample, one generator"
    return [
        compare(times, "sample, one generator per image", base, bound=1.6),
        compare(times, "making the generators", base, note="once per sampling run"),
    ]


def scaling(rounds: int) -> list[Row]:
    """The slope of log time against log N, N numbers per draw, fitted in each round."""
    generator = torch.Generator().manual_seed(0)
    calls: dict[str, Callable[[], object]] = {}
    for n in SIDES:
        field, shape = nidiff.gaussian_free_field((n, n)), (4, 3, n, n)
        calls[f"sample {n}"] = lambda field=field, shape=shape: field.sample(shape, generator)
        calls[f"randn {n}"] = lambda shape=shape: torch.randn(shape, generator=generator)
    times = interleave(calls, rounds)
    size = [math.log(n * n) for n in SIDES]

    def slopes(kind: str) -> list[float]:
        rows = zip(*(times[f"{kind} {n}"] for n in SIDES), strict=True)
        return [statistics.linear_regression(size, [math.log(t) for t in row]).slope for row in rows]

    own, white = slopes("sample"), slopes("randn")
    relative = [a - b for a, b in zip(own, white, strict=True)]
    rows = [compare(times, f"sample {n}", f"randn {n}", note=f"4×3×{n}×{n}") for n in SIDES]
    return [
        *rows,
        summary("exponent p of sample's time ~ N^p", "(no peer)", own, bound=1.1),
        summary("exponent p of torch.randn's time ~ N^p", "(no peer)", white),
        summary("exponent p of (sample / torch.randn) ~ N^p", "(no peer)", relative),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = parse(parser, 80, "rounds of the quickest pairs; slower ones get a share", least=60)

    rounds = arguments.rounds
    sections: dict[str, list[Row]] = {}
    for shape, bound in ((SMALL, 1.7), (LARGE, 2.0)):
        log(f"{at_shape(shape)}: torch.randn, peers, generators per image")
        share = rounds if shape == SMALL else rounds // 2
        sections[f"A draw of the Gaussian free field, {at_shape(shape)}"] = against_randn(shape, bound, share)
        sections[f"Other ways to the same field, {at_shape(shape)}"] = against_peers(shape, share // 10)
        sections[f"Seeds per image, {at_shape(shape)}"] = per_image(shape, share)
    log(f"growth from {SIDES[0]}² to {SIDES[-1]}²")
    sections["Growth with the number of pixels"] = scaling(rounds // 5)
    report(sections, as_json=arguments.json)


if __name__ == "__main__":
    main()
