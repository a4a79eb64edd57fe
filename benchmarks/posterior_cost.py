"""What a step given an observation costs: the method "gaussian" against a plain step of the same sampler.

Turbulence of 64 × 64 by the model that ships, 16 images at a time, one thread. A plain step and one given y are taken
in turn in one process, at five levels from noise to data; what is made once for every level is made before. Printed:
the median of the ratios for the means alone (`ancestral`), and with fresh noise that knows of y, which solves the
system twice (`ancestral:variance=gaussian`).
"""

import statistics
import time

import torch
from stories.results import Results, markdown
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.sampling.ancestral import ancestral
from nidiff.sampling.step import Chain

BATCH, REPEATS, ROWS = 16, 5, (900, 700, 500, 300, 100)
SHAPE = (64, 64)


def operators() -> dict[str, tuple[op.Operator, float]]:
    source = torch.Generator().manual_seed(0)
    masks = {share: torch.rand(SHAPE, generator=source) < share for share in (0.03, 0.2, 0.5)}
    return {
        **{f"{share:.0%} of the points": (op.mask(seen), 0.05) for share, seen in masks.items()},
        "means over 4 × 4": (op.pool(4), 0.05),
        "blur, edges of the data": (op.blur(2.0, "periodic"), 0.05),
        "blur, other edges": (op.blur(2.0), 0.05),
    }


def seconds(denoiser: nidiff.Denoiser, x: Tensor, row: int, variance: str) -> float:
    process = denoiser.process
    here, there = process.schedule.level(row), process.schedule.level(row - 50)
    chain = Chain(denoiser, lambda: process.noise(tuple(x.shape)), white=lambda shape: torch.randn(shape))
    begin = time.perf_counter()
    ancestral(chain, x, denoiser(x, here), here, there, variance=variance)
    return time.perf_counter() - begin


@torch.no_grad()
def ratio(model: nidiff.Denoiser, x0: Tensor, operator: op.Operator, noise: float, variance: str) -> dict[str, float]:
    y = operator(x0[:1])
    given = nidiff.posterior(model, nidiff.Observation(y + noise * torch.randn_like(y), operator, noise), "gaussian")
    ratios = []
    for row in ROWS:
        level = model.process.schedule.level(row)
        x = level.signal * x0 + level.sigma * model.process.noise(tuple(x0.shape), 0)
        seconds(given, x, row, variance)
        for _ in range(REPEATS):
            plain = seconds(model, x, row, variance)
            ratios.append(seconds(given, x, row, variance) / plain)
    return {"ratio": statistics.median(ratios)}


def main() -> None:
    torch.set_num_threads(1)
    model, results = nidiff.load_model("turbulence"), Results("posterior_cost")
    x0 = nidiff.load_dataset("turbulence", split="test").batch(torch.arange(BATCH)).float()
    rows = []
    for name, (operator, noise) in operators().items():
        cells = []
        for variance in ("posterior", "gaussian"):

            def found(operator=operator, noise=noise, variance=variance) -> dict[str, float]:
                return ratio(model, x0, operator, noise, variance)

            cells.append(f"{results.measured(f'{name}, {variance}', found)['ratio']:.2f}")
        rows.append([name, *cells])
    print(markdown(["seen", "ancestral", "ancestral:variance=gaussian"], rows))


if __name__ == "__main__":
    main()
