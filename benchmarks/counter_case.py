"""Where do the angle samplers lose? A network trained with v on photographs of 16×16, and what changes the outcome.

Prints the Fréchet distance, the error of the spectrum, the standard deviation and the kurtosis of increments of samples
for DPM-Solver++(2M) and for variants of `angle_2m`: clipping, κ, C of the colours, the last step, the rows. And what
the distance says of real photographs whose fine modes are taken away (blur) or replaced by Gaussian ones of the same
spectrum: what the two solvers leave of modes that the network has not resolved.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from fields.metrics import kurtosis
from timing import log
from torch import Tensor
from trained import Bench

import nidiff
from nidiff.diffusion.gaussian import Kappa

FINE = 0.8


def with_gaussian(bench: Bench, denoiser: nidiff.Denoiser, channels: str) -> nidiff.Denoiser:
    """The denoiser with C fitted with other channels, and its κ."""
    fitted = nidiff.fit_gaussian(bench.data.train[:10_000], basis="reflecting", channels=channels)
    return nidiff.design.measure_kappa(denoiser.with_kappa(None).with_gaussian(fitted), bench.data.train)


def variants(bench: Bench, denoiser: nidiff.Denoiser) -> dict[str, tuple[nidiff.Denoiser, dict[str, Any]]]:
    """By their names: a denoiser, and how to sample it."""
    measured = nidiff.design.measure_kappa(denoiser, bench.data.train)
    assert measured.kappa is not None
    rows, values, trust = measured.kappa
    ones = torch.ones_like(values)
    dpmpp: dict[str, Any] = {"sampler": "dpmpp_2m", "spacing": "trailing"}
    turned: dict[str, Any] = {"sampler": "angle_2m", "spacing": "angle"}
    return {
        "dpmpp_2m": (denoiser, dpmpp),
        "dpmpp_2m, log-SNR rows": (denoiser, dpmpp | {"spacing": "logsnr"}),
        "dpmpp_2m, rows of equal angle": (denoiser, dpmpp | {"spacing": "angle"}),
        "dpmpp_2m, clip 1": (denoiser.clipped(1.0), dpmpp),
        "angle_2m, κ and β": (measured, turned),
        "angle_2m, nothing measured": (denoiser, turned),
        "angle_2m, κ, β = 1": (denoiser.with_kappa(Kappa(rows, values, ones)), turned),
        "angle_2m, κ = 0, β": (denoiser.with_kappa(Kappa(rows, 0 * values, trust)), turned),
        "angle_2m, κ = 1, β = 1": (denoiser.with_kappa(Kappa(rows, ones, ones)), turned),
        "angle_2m, clip 1": (measured.clipped(1.0), turned),
        "angle_2m, ends with x̂0": (measured, turned | {"finish": "denoise"}),
        "angle_2m, trailing rows": (measured, turned | {"spacing": "trailing"}),
        "angle_2m, trailing rows, ends with x̂0": (
            measured,
            turned | {"spacing": "trailing", "finish": "denoise"},
        ),
        "angle_2m, log-SNR rows": (measured, turned | {"spacing": "logsnr"}),
        "angle": (measured, turned | {"sampler": "angle"}),
        "angle_2m, C of each colour": (with_gaussian(bench, denoiser, "each"), turned),
        "angle_2m, C of all colours": (with_gaussian(bench, denoiser, "shared"), turned),
    }


def damaged(images: Tensor, bench: Bench, noise: bool, generator: torch.Generator) -> Tensor:
    """Photographs whose modes of small variance, a share `FINE` of all, are their means, or Gaussian."""
    covariance = bench.gaussian.covariance
    fine = covariance.eigenvalues < covariance.eigenvalues.quantile(FINE)
    drawn = bench.gaussian.sample(tuple(images.shape), generator) if noise else bench.gaussian.mean.to(images)
    return images - covariance.scaled(images - drawn, fine.double())


def row(bench: Bench, images: Tensor) -> dict[str, float]:
    found = bench.measure(images) | {"kurtosis": kurtosis(images.diff(dim=-1))}
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--cache", type=Path, default=Path("out/fields"), help="folder of the weights and results")
    parser.add_argument("--configuration", default="white, v")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-steps", nargs="+", type=int, default=[5, 10])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--variants", nargs="+", default=None, help="names of variants; default: all of them")
    options = parser.parse_args()
    bench = Bench("photographs", options.cache, options.data_dir)
    real, generator = bench.data.held_out[: options.samples], torch.Generator().manual_seed(0)
    rows = {"real, held out": row(bench, real)}
    for noise in (False, True):
        name = f"real, {FINE:.0%} of the modes {'Gaussian' if noise else 'taken away'}"
        rows[name] = row(bench, damaged(real, bench, noise, generator))
        log(f"{name}: {rows[name]}")
    denoiser = bench.denoiser(options.configuration, options.seed)
    shape = (options.samples, *bench.data.train.shape[1:])
    for name, (chosen, how) in variants(bench, denoiser).items():
        if options.variants is not None and name not in options.variants:
            continue
        for num_steps in options.num_steps:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                images = nidiff.sample(chosen, shape, num_steps=num_steps, generator=range(shape[0]), tile=256, **how)
            rows[f"{num_steps}: {name}"] = row(bench, images)
            log(f"{num_steps}: {name}: {rows[f'{num_steps}: {name}']}")
    print(json.dumps(rows, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
