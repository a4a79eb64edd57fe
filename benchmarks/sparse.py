"""Turbulence from 3 % of its pixels: how far the posterior mean is from the truth, and how often intervals cover it.

    for seed in 0 1 2; do for cov in white from_data:power=0.5; do
      nidiff train --preset turbulence-cpu --covariance $cov --steps 2500 --cooldown 1250 --seed $seed \\
        --out runs/turbulence-${cov%%:*}-$seed
    done; done
    python benchmarks/sparse.py runs/turbulence-white-? --coloured runs/turbulence-from_data-?

Each field is seen at random pixels of its own with a little noise, and 19 samples are drawn given these. Then the
truth lies between the least and the largest of them in 90 % of the pixels, and between the 5th and the 15th in 50 %, if
the samples are from the posterior. The last lines are the data's Gaussian alone, whose posterior is exact (kriging),
and --methods on the first coloured model.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from torch import Tensor

import nidiff
from nidiff.diffusion.denoiser import Denoiser

SAMPLES, ENDS = 19, {"50 %": (4, 14), "90 %": (0, 18)}
RESULTS = Path("benchmarks/results/sparse.json")


def reconstruct(denoiser: Denoiser, fields: Tensor, seen: Tensor, arguments: argparse.Namespace, **method) -> list:
    """One row of numbers per field: errors of the mean and of a sample over the size of the field, and coverages."""
    rows = []
    for number, (field, mask) in enumerate(zip(fields, seen, strict=True)):
        noise = torch.randn(field.shape, generator=torch.Generator().manual_seed(number))
        exact = method.get("method") == "replacement"
        y = field if exact else field + arguments.noise * noise
        observation = nidiff.Observation(y[None], nidiff.operators.mask(mask), noise=0.0 if exact else arguments.noise)
        drawn = nidiff.sample(
            nidiff.posterior(denoiser, observation, **method),
            (SAMPLES, *field.shape),
            sampler="repaint" if exact else arguments.sampler,
            num_steps=arguments.num_steps,
            generator=range(SAMPLES * number, SAMPLES * (number + 1)),
        )
        rest, ordered = ~mask, drawn.sort(0).values
        size = field[rest].norm()
        row = {"mean": (drawn.mean(0) - field)[rest].norm() / size, "sample": (drawn[0] - field)[rest].norm() / size}
        for name, (low, high) in ENDS.items():
            row[name] = ((ordered[low] <= field) & (field <= ordered[high]))[rest].float().mean()
        rows.append({name: value.item() for name, value in row.items()})
    return rows


def summary(rows: list) -> dict[str, float]:
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def line(name: str, found: list[dict[str, float]]) -> str:
    numbers = []
    for key in found[0]:
        values = [one[key] for one in found]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        numbers.append(f"{statistics.mean(values):.3f}{spread}")
    return f"| {name} | {' | '.join(numbers)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("white", nargs="+", help="runs with white noise, one per seed")
    parser.add_argument("--coloured", nargs="+", required=True, help="runs with coloured noise, one per seed")
    parser.add_argument("--fields", type=int, default=16, help="held-out fields")
    parser.add_argument("--share", type=float, default=0.03, help="of the pixels that are seen")
    parser.add_argument("--noise", type=float, default=0.01, help="of what is seen, in standard deviations of the data")
    parser.add_argument("--sampler", default="ancestral:variance=gaussian")
    parser.add_argument("--num-steps", type=int, default=20)
    parser.add_argument("--methods", nargs="*", default=[], help="others to try on four fields, such as jacobian")
    arguments = parser.parse_args()
    data = nidiff.load_dataset("turbulence", split="test")
    fields = data.batch(torch.linspace(0, len(data) - 1, arguments.fields).long())
    seen = torch.rand(fields.shape, generator=torch.Generator().manual_seed(0)) < arguments.share
    groups = {"white": arguments.white, "coloured": arguments.coloured}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in groups}
    print("| model | error of the mean | of a sample | in 50 % | in 90 % |\n| --- | --- | --- | --- | --- |")
    for name, runs in groups.items():
        for run in runs:
            found[name].append(summary(reconstruct(nidiff.load_model(run), fields, seen, arguments)))
        print(line(name, found[name]), flush=True)
    first = nidiff.load_model(arguments.coloured[0])
    gaussian = first.gaussian.denoiser(first.process)
    found["Gaussian alone"] = [summary(reconstruct(gaussian, fields, seen, arguments))]
    print(line("Gaussian alone", found["Gaussian alone"]), flush=True)
    for method in arguments.methods:
        found[method] = [summary(reconstruct(first, fields[:4], seen[:4], arguments, method=method))]
        print(line(f"coloured, {method}, 4 fields", found[method]), flush=True)
    settings = {key: value for key, value in vars(arguments).items() if key not in groups}
    RESULTS.write_text(json.dumps({"settings": settings, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
