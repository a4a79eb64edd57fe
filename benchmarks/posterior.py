"""How near do samples come to the exact posterior, if the data are a Gaussian field and the network is exact?

Nothing is drawn: every step of a sampler is then affine, and the mean and the covariance of what it makes are computed.
Data are a Matérn field on a small grid, Σ is a free field of other edges, so that neither commutes with a mask, a
pooling or a blur of its own. Printed, as Markdown, are the errors of the mean, as a share of what the observation moves
it by, and of the covariance, as a share of its norm; both against the number of steps.
"""

import argparse
import sys
import time

import torch

import nidiff
from nidiff import operators as op
from nidiff.testing.problems import normal, output_law, uniform_in_logsnr

SIDE = 6
METHODS = (
    ("gaussian", {"tolerance": 1e-10}),
    ("mmps", {}),
    ("mmps", {"iterations": 60, "tolerance": 1e-10}),
    ("gradient", {"tolerance": 1e-10}),
    ("gradient", {"r": 0.0}),
    ("replacement", {}),
)
SAMPLERS = ("ancestral", "heun")


def problem() -> tuple[nidiff.Covariance, nidiff.GaussianModel]:
    """Σ, and the law of the data."""
    noise = nidiff.gaussian_free_field((SIDE, SIDE), gamma=1.0)
    data = nidiff.matern((SIDE, SIDE), 1.5, 1.5)
    return noise, nidiff.GaussianModel(0.5 * normal(1, SIDE, SIDE, seed=7), data)


def operators() -> dict[str, nidiff.operators.Operator]:
    seen = torch.rand(SIDE, SIDE, generator=torch.Generator("cpu").manual_seed(3)) < 0.3
    return {"mask": op.mask(seen), "pool": op.pool(2), "blur": op.blur(0.8)}


def exact(gaussian: nidiff.GaussianModel, observation: nidiff.Observation) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance of x0 given y, by dense matrices."""
    size = SIDE * SIDE
    unit = torch.eye(size, dtype=torch.float64).reshape(size, 1, SIDE, SIDE)
    matrix = observation.operator(unit).flatten(1).T
    seen = matrix.abs().sum(1) > 0
    matrix, prior, mean = matrix[seen], gaussian.covariance.dense(), gaussian.mean.flatten()
    noise = float(observation.noise) ** 2 * torch.eye(len(matrix), dtype=torch.float64)
    gain = prior @ matrix.T @ torch.linalg.inv(matrix @ prior @ matrix.T + noise)
    return mean + gain @ (observation.y[0].flatten()[seen] - matrix @ mean), prior - gain @ matrix @ prior


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[30, 120])
    parser.add_argument("--noise", type=float, default=0.1, help="standard deviation of the observation's noise")
    chosen = parser.parse_args()
    noise, gaussian = problem()
    truth = gaussian.sample((1, 1, SIDE, SIDE), torch.Generator("cpu").manual_seed(11), dtype=torch.float64)
    rows = [(name, options, sampler, False) for name, options in METHODS for sampler in SAMPLERS]
    rows += [("replacement", {}, "repaint", False), ("gaussian", {"tolerance": 1e-10}, "ancestral", True)]
    for seen, operator in operators().items():
        print(f"\n{seen}, observation noise {chosen.noise}: errors of mean / covariance\n")
        print("| method | sampler | " + " | ".join(f"{count} steps" for count in chosen.steps) + " |")
        print("|---|---|" + "---|" * len(chosen.steps))
        y = operator(truth)
        y = y + chosen.noise * normal(*y.shape, seed=5)
        for name, options, sampler, white in rows:
            if name == "replacement" and seen != "mask":
                continue
            begin = time.monotonic()
            observation = nidiff.Observation(y, operator, chosen.noise)
            mean, covariance = exact(gaussian, observation)
            if name == "replacement":
                observation = nidiff.Observation(y, operator)
            cells = []
            for count in chosen.steps:
                process = nidiff.Process(uniform_in_logsnr(count, "variance"), noise)
                denoiser = nidiff.posterior(gaussian.denoiser(process), observation, name, **options)
                found, spread = output_law(denoiser, sampler, white=white)
                moved = (mean - gaussian.mean.flatten()).norm()
                errors = ((found - mean).norm() / moved, (spread - covariance).norm() / covariance.norm())
                cells.append(" / ".join(f"{each.item():.2g}" for each in errors))
            told = "".join(f", {key}={value:g}" for key, value in options.items() if key != "tolerance")
            label = name + told + (", white noise injected" if white else "")
            print(f"| {label} | {sampler} | " + " | ".join(cells) + " |", flush=True)
            print(f"{label} {sampler}: {time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
