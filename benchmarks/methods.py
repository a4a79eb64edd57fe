"""The methods of `nidiff.posterior` with models that ship: ray integrals of turbulence, and inpainting of digits.

Prints, as means over test items: the RMS error of the mean of the samples and of a single one, their spread, and their
misfit to y over the noise of y, which should be 1. Every method has the same seeds.
"""

import argparse
import warnings
from statistics import fmean

import torch

import nidiff

RAYS, LENGTH = 300, 1.42  # how many lines, and half of their length, that of a diagonal


def rays(size: int, generator: torch.Generator) -> torch.Tensor:
    """The weights [RAYS, size²] of the pixels of a square from −1 to 1 in the integrals along random lines."""
    place = torch.linspace(-LENGTH, LENGTH, 4 * size)
    angle, offset = torch.rand(2, RAYS, 1, generator=generator)
    angle, offset = torch.pi * angle, 1.8 * offset - 0.9
    x, y = offset * angle.cos() - place * angle.sin(), offset * angle.sin() + place * angle.cos()
    row, column = (((part + 1) / 2 * size).floor().long() for part in (x, y))
    inside = (row >= 0) & (row < size) & (column >= 0) & (column < size)
    weights = torch.zeros(RAYS, size * size)
    pixel = (row * size + column).clamp(0, size * size - 1)
    return weights.scatter_add_(1, pixel, inside * LENGTH / (4 * size) * size)


def measure(
    task: str, method: str, denoiser: nidiff.Denoiser, x0: torch.Tensor, item: int, options: argparse.Namespace
):
    """The four numbers of one item."""
    generator, shape = torch.Generator().manual_seed(item), tuple(x0.shape[1:])
    if task == "rays":
        weights, noise = rays(shape[-1], generator), 0.1
        operator = nidiff.operators.linear(lambda x: x.flatten(1) @ weights.T.to(x))
    else:
        operator, noise = nidiff.operators.mask(torch.rand(shape[1:], generator=generator) < 0.3), 0.05
    clean = operator(x0)
    y = clean + noise * torch.randn(clean.shape, generator=generator)
    sampler = "ancestral:variance=gaussian"
    if method == "replacement":  # which is for exact observations
        y, sampler = clean, "repaint"
    observation = nidiff.Observation(y, operator, 0.0 if method == "replacement" else noise)
    given = nidiff.posterior(denoiser, observation, method)
    seeds = range(1000 * item, 1000 * item + options.samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that diverge
        x = nidiff.sample(given, (len(seeds), *shape), sampler=sampler, num_steps=options.steps, generator=seeds)
    errors = (x.mean(0) - x0[0], x - x0, x.std(0), (operator(x) - y) / noise)
    return [error.square().mean().sqrt().item() for error in errors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("rays", "inpainting"))
    parser.add_argument("methods", nargs="+", help="such as gaussian jacobian dps:scale=0.3")
    parser.add_argument("--items", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=4, help="of each item")
    options = parser.parse_args()
    name = {"rays": "turbulence", "inpainting": "digits"}[options.task]
    denoiser, data = nidiff.load_model(name), nidiff.load_dataset(name, split="test")
    for method in options.methods:
        found = [
            measure(options.task, method, denoiser, data.batch(torch.tensor([17 + 31 * item])), item, options)
            for item in range(options.items)
        ]
        numbers = [fmean(column) for column in zip(*found, strict=True)]
        print(f"{method:15} " + " ".join(f"{number:9.3g}" for number in numbers), flush=True)


if __name__ == "__main__":
    main()
