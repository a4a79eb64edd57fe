"""Every method of `nidiff.posterior` with trained networks: turbulence from few of its values.

    python benchmarks/posterior_turbulence.py                        # the model that ships
    python benchmarks/posterior_turbulence.py runs/turbulence-?      # trainings of your own

Held-out fields of 64 × 64 are seen at 3 % of their points, by 150 rays of a tomograph, as means over 4 × 4 points, or
by a tenth of their waves. 19 samples, 20 steps. Methods with a setting have the one of five that has the least CRPS on
another field, with five samples. Printed: the error of the mean of the samples over the size of the field, the CRPS,
how often 90 % intervals cover the truth, calls of the network per sample and step (and passes back through it), and
seconds for 19 samples.
"gaussian alone" is the data's Gaussian without a network, whose posterior is exact (kriging).
"""

import argparse
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from methods import rays
from stories.results import Results, markdown, mean_and_spread
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.inverse.scores import covered, crps
from nidiff.sampling.particles import sample_particles

SAMPLES, TRIED, STEPS, FIELDS, NOISE = 19, 5, 20, 2, 0.05
TASKS = ("points", "rays", "coarse", "waves")
SETTINGS = {
    "gaussian alone": ("gaussian",),
    "gaussian": ("gaussian", "gaussian:kappa=false"),
    "mmps": ("mmps:iterations=1", "mmps:iterations=3"),
    "tmpd": ("tmpd",),
    "pigdm": tuple(f"pigdm:scale={scale}" for scale in (0.1, 0.3, 1.0, 3.0, 10.0)),
    "dps": tuple(f"dps:scale={scale}" for scale in (0.01, 0.03, 0.1, 0.3, 1.0)),
    "diffpir": tuple(f"diffpir:weight={weight}" for weight in (0.3, 1.0, 3.0, 10.0, 30.0)),
    "particles": ("particles",),
}
SAMPLER = {"dps": "ancestral", "pigdm": "ancestral", "diffpir": "diffpir:zeta=0.3"}


def operator(task: str, field: int, shape: tuple[int, ...]) -> op.Operator:
    source = torch.Generator().manual_seed(field)
    if task == "points":
        return op.mask(torch.rand(shape, generator=source) < 0.03)
    if task == "rays":
        weights = rays(shape[-1], source)[:150]
        return op.linear(lambda x: x.flatten(1) @ weights.T.to(x))
    if task == "coarse":
        return op.pool(4)
    kept = torch.rand(shape, generator=source) < 0.1
    kept[:3, :3] = True
    return op.waves(kept)


class Counted(torch.nn.Module):
    """A network that counts the images it was called with, and those of which a gradient came back."""

    def __init__(self, net: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.calls, self.gradients = net, 0, 0

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        self.calls += len(x)
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self.count)
        return self.net(x, *arguments, **named)

    def count(self, gradient: Tensor) -> None:
        self.gradients += len(gradient)


def measure(
    model: nidiff.Denoiser, setting: str, task: str, x0: Tensor, field: int, samples: int = SAMPLES
) -> dict[str, float]:
    shape = tuple(x0.shape)
    a = operator(task, field, shape[1:])
    clean = a(x0[None])
    noise = NOISE * clean.std().item() if task == "rays" else NOISE
    y = clean + noise * torch.randn(clean.shape, generator=torch.Generator().manual_seed(field))
    observation, counted = nidiff.Observation(y, a, noise), Counted(model.net)
    denoiser = model.with_net(counted)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting == "particles":
            found = sample_particles(denoiser, observation, 64, num_steps=STEPS, spacing="logsnr", generator=field)
            x, extra = found.resampled(1)[0, :samples], {"effective": found.effective.mean().item() / 64}
        else:
            name = setting.partition(":")[0]
            sampler = SAMPLER.get(name, "ancestral:variance=gaussian")
            given = nidiff.posterior(denoiser, observation, setting)
            seeds, extra = range(1000 * field, 1000 * field + samples), {}
            try:
                arguments = {"sampler": sampler, "num_steps": STEPS, "spacing": "logsnr", "generator": seeds}
                x = nidiff.sample(given, (samples, *shape), **arguments)
            except nidiff.InputError:  # it diverged
                x = torch.full((samples, *shape), 1e6)
    seconds = time.perf_counter() - begin
    return {
        "error": ((x.mean(0) - x0).norm() / x0.norm()).item(),
        "CRPS": crps(x, x0).mean().item(),
        "coverage": covered(x, x0).float().mean().item(),
        "calls": counted.calls / samples / STEPS,
        "gradients": counted.gradients / samples / STEPS,
        "seconds": seconds,
        **extra,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["turbulence"], help="folders of models or runs")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results, data = Results("posterior_turbulence"), nidiff.load_dataset("turbulence", split="test")
    fields = data.batch(torch.linspace(0, len(data) - 1, FIELDS + 1).long()).float()
    models = {Path(name).name: nidiff.load_model(name) for name in arguments.models}
    rows = []
    for task in TASKS:
        for method, settings in SETTINGS.items():
            found: list[dict[str, float]] = []
            chosen = ""
            for name, model in models.items():
                denoiser = model.gaussian.denoiser(model.process) if method == "gaussian alone" else model

                def one(setting: str, field: int, name=name, denoiser=denoiser, method=method, task=task):
                    key = f"{name}, {task}, {method}, {setting}, field {field}"
                    samples = SAMPLES if field < FIELDS else TRIED
                    x0 = fields[field]
                    if arguments.table and key not in results.values:
                        return dict.fromkeys(("error", "CRPS", "coverage", "calls", "gradients", "seconds"), math.nan)
                    return results.measured(key, lambda: measure(denoiser, setting, task, x0, field, samples))

                if not chosen:  # by the first model, on the field that is not counted
                    chosen = min(settings, key=lambda each: one(each, FIELDS)["CRPS"]) if settings[1:] else settings[0]
                each = [one(chosen, field) for field in range(FIELDS)]
                found.append({key: fmean(row[key] for row in each) for key in each[0]})
            numbers = [mean_and_spread([row[key] for row in found]) for key in ("error", "CRPS", "coverage")]
            cost = [f"{fmean(row[key] for row in found):.3g}" for key in ("calls", "gradients", "seconds")]
            rows.append([task, method, chosen.partition(":")[2], *numbers, *cost])
            print(" | ".join(rows[-1]), flush=True)
    head = ["seen", "method", "setting", "error", "CRPS", "90 %", "calls", "gradients", "seconds"]
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
