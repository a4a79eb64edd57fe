"""How often the truth lies in the intervals of `nidiff.sample(start=y, level=…)`: the figures of docs/restore.md.

Held-out items x0 of a model's data become y = x0 + noise · Σ^½ eps. Of each y, 19 samples are drawn. If x0 and they are
draws of one posterior, x0 lies between the k-th sample from below and the k-th from above with probability 1 − k/10,
whatever the posterior: 90 % for k = 1, 50 % for k = 5. Measured for pixels and for the coefficients of the cosine
transform; ± is the standard error over items. Pixels that every sample has alike to a hundredth are left out.
"""

import argparse
import math
import time

import torch

import nidiff

SAMPLES, SAME = 19, 0.01


def coverage(x0: torch.Tensor, draws: torch.Tensor, k: int) -> tuple[float, float]:
    """The share of the numbers of x0 [N, D] between order statistics of the draws [N, 19, D], and its error."""
    rising = draws.sort(1).values
    inside = ((x0 >= rising[:, k - 1]) & (x0 <= rising[:, -k])).double()
    open_ = (rising[:, -1] - rising[:, 0] > SAME).double()
    share = (inside * open_).sum() / open_.sum()
    residual = ((inside - share) * open_).sum(1)
    return share.item(), (residual.square().sum().sqrt() / open_.sum()).item()


def cosines(x: torch.Tensor) -> torch.Tensor:
    """[N, D] of the cosine transform of images [N, 1, H, W]."""
    for axis in (-1, -2):
        n = x.shape[axis]
        angle = math.pi / n * torch.outer(torch.arange(n) + 0.5, torch.arange(n).double()).to(x)
        x = (x.movedim(axis, -1) @ angle.cos()).movedim(-1, axis)
    return x.flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="digits")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--steps", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--sampler", default="ancestral")
    chosen = parser.parse_args()

    denoiser = nidiff.load_model(chosen.model)
    data = nidiff.load_dataset(chosen.data, split="test")
    count = min(chosen.items, len(data))
    x0 = data.batch(torch.linspace(0, len(data) - 1, count).round().long())
    print("| noise | steps | 50 % of pixels | 90 % of pixels | 50 % of cosines | 90 % of cosines | seconds |")
    print("|---|---|---|---|---|---|---|")
    for noise in chosen.noise:
        y = x0 + noise * denoiser.process.noise(tuple(x0.shape), torch.Generator().manual_seed(0))
        shown, level = y.repeat_interleave(SAMPLES, 0), denoiser.process.schedule.level_with_noise(noise)
        for num_steps in chosen.steps:
            begun = time.perf_counter()
            options = {"sampler": chosen.sampler, "num_steps": num_steps, "generator": range(len(shown))}
            found = nidiff.sample(denoiser, tuple(shown.shape), start=shown, level=level, **options)
            seconds = time.perf_counter() - begun
            cells = []
            for view in (lambda x: x.flatten(1), cosines):
                draws = view(found).reshape(count, SAMPLES, -1)
                cells += ["{:.1%} ± {:.1%}".format(*coverage(view(x0), draws, k)) for k in (5, 1)]
            print(f"| {noise:g} | {num_steps} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
