"""The measurements of docs/rock.md: python benchmarks/stories/rock.py berea.nc runs

``berea.nc`` is what examples/rock.py wrote, and ``runs`` has the trainings matern-0, white-0, matern-1, … as far as
they are there. Every measurement is stored in benchmarks/results/rock.json; what is there is not measured again.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray
from results import Results, ended, markdown, mean_and_spread
from scipy.ndimage import label
from scipy.special import ndtri
from torch import Tensor

import nidiff

NOISES, SEEDS, SIZE, BORDER = ("matern", "white"), range(3), 32, 144
SAMPLERS = ("dpmpp_2m:spacing=logsnr", "angle_2m:spacing=trailing", "ancestral:variance=gaussian")
STEPS, LAGS = (20,), 16
SLAB = slice(12, 20)  # the planes that are missing
COLUMNS = ("porosity", "two-point", "surface", "chord", "connected")


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Blocks [N, 1, z, y, x] to train on, and held-out ones."""
    with xarray.open_dataset(path) as table:
        blocks, held_out = torch.from_numpy(table.pore.values)[:, None], table.start.values >= BORDER
    return blocks[~held_out], blocks[held_out]


# What is measured of pores [N, z, y, x], true or false --------------------------------------------------------------


def two_point(pores: Tensor, lags: int = LAGS) -> Tensor:
    """S2(r): how probably both ends of a segment of r voxels lie in pores, r = 0 … lags, the mean over the axes."""
    x = pores.float()
    pairs = [
        [(x.narrow(a, 0, n - r) * x.narrow(a, r, n - r)).mean() for a, n in enumerate(x.shape[1:], 1)]
        for r in range(lags + 1)
    ]
    return torch.tensor(pairs).mean(1)


def surface(pores: Tensor) -> float:
    """Faces between pore and grain per voxel."""
    sizes = list(enumerate(pores.shape[1:], 1))
    differ = [pores.narrow(axis, 1, n - 1) != pores.narrow(axis, 0, n - 1) for axis, n in sizes]
    return sum(faces.double().mean().item() for faces in differ)


def chords(pores: Tensor) -> np.ndarray:
    """The shares of the lengths 1, 2, … of segments along the axes that lie in a pore and end at grains."""
    counts = np.zeros(pores.shape[-1] + 1)
    for axis in (1, 2, 3):
        lines = pores.movedim(axis, -1).reshape(-1, pores.shape[axis]).numpy().astype(np.int8)
        begins, ends = (np.nonzero(np.diff(lines, axis=1) == step) for step in (1, -1))
        places = [where[0] * lines.shape[1] + where[1] for where in (begins, ends)]
        last = np.searchsorted(places[0], places[1]) - 1  # the beginning before every end
        same = (last >= 0) & (begins[0][last.clip(0)] == ends[0])
        counts += np.bincount(ends[1][same] - begins[1][last[same]], minlength=len(counts))
    return counts / max(1, counts.sum())


def connected(pores: Tensor) -> float:
    """The share of the pore space that belongs to the largest connected pore of its block."""
    largest, total = 0, 0
    for block in pores.numpy():
        sizes = np.bincount(label(block)[0].ravel())[1:]
        largest, total = largest + sizes.max(initial=0), total + sizes.sum()
    return largest / total


def describe(pores: Tensor) -> dict[str, object]:
    lengths = chords(pores)
    return {
        "porosity": pores.double().mean((1, 2, 3)).tolist(),
        "s2": two_point(pores).tolist(),
        "surface": surface(pores),
        "chords": lengths.tolist(),
        "connected": connected(pores),
    }


def errors(found: dict, real: dict) -> dict[str, float]:
    """Against the held-out blocks: porosity is the root mean square difference from the block that gave the condition,
    two-point the root mean square difference of S2(r)/S2(0) over r, surface and chord are relative, chord is of the
    mean chord, and connected is a difference."""
    s2, real_s2 = (np.array(one["s2"]) / one["s2"][0] for one in (found, real))
    mean_chord = [float(np.dot(np.arange(len(one["chords"])), one["chords"])) for one in (found, real)]
    return {
        "porosity": float(np.sqrt(np.mean(np.subtract(found["porosity"], real["porosity"]) ** 2))),
        "two-point": float(np.sqrt(np.mean((s2 - real_s2)[1:] ** 2))),
        "surface": found["surface"] / real["surface"] - 1,
        "chord": mean_chord[0] / mean_chord[1] - 1,
        "connected": found["connected"] - real["connected"],
    }


# The baselines of the field -----------------------------------------------------------------------------------------


def truncated_gaussian(s2: Tensor, porosities: Tensor, generator: torch.Generator) -> Tensor:
    """Blocks of a Gaussian field, thresholded at the porosity of each, whose pores have the covariance of the data:
    P(both in a pore) = φ² + ∫₀^ρ exp(−t²/(1+s)) / (2π √(1−s²)) ds, solved for ρ at every distance."""
    phi = s2[0].item()
    t = float(ndtri(phi))
    angles = torch.linspace(0, math.pi / 2, 4001, dtype=torch.float64)[:-1]  # s = sin(angle)
    steps = torch.exp(-(t**2) / (1 + angles.sin())) / (2 * math.pi) * angles[1]
    rho = torch.from_numpy(np.interp(s2.double().numpy() - phi**2, steps.cumsum(0).numpy(), angles.sin().numpy()))
    rho = torch.cat([rho[:1] * 0 + 1, rho[1:].clamp(min=0)])
    box = 2 * SIZE
    along = torch.minimum(torch.arange(box), box - torch.arange(box)).double()
    r = sum(a**2 for a in torch.meshgrid(along, along, along, indexing="ij")).sqrt()
    covariance = torch.from_numpy(np.interp(r.numpy(), np.arange(len(rho)), rho.numpy(), right=0.0))
    power = torch.fft.fftn(covariance).real.clamp(min=0)
    fields = []
    for _ in porosities:
        white = torch.randn(box, box, box, generator=generator, dtype=torch.float64)
        fields.append(torch.fft.ifftn(torch.fft.fftn(white) * power.sqrt()).real[:SIZE, :SIZE, :SIZE])
    return cut_at(torch.stack(fields), porosities)


def cut_at(fields: Tensor, porosities: Tensor) -> Tensor:
    """The highest values of each field, a share of it that is its porosity."""
    levels = [x.flatten().quantile(1 - p) for x, p in zip(fields, porosities.tolist(), strict=True)]
    return fields > torch.stack(levels).view(-1, 1, 1, 1)


def overlapping_spheres(radius: float, porosities: Tensor, generator: torch.Generator) -> Tensor:
    """Grains are spheres of one radius at independent places, as many as leave the porosity of each block."""
    margin, blocks = math.ceil(radius), []
    axis = torch.arange(SIZE).double()
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    for porosity in porosities.tolist():
        mean = -math.log(porosity) * (SIZE + 2 * margin) ** 3 / (4 / 3 * math.pi * radius**3)
        count = int(torch.poisson(torch.tensor(mean), generator=generator))
        centres = torch.rand(count, 3, generator=generator, dtype=torch.float64) * (SIZE + 2 * margin) - margin
        near = torch.full((len(grid),), math.inf, dtype=torch.float64)
        for part in centres.split(200):
            near = torch.minimum(near, torch.cdist(grid, part).min(1).values)
        blocks.append((near > radius).view(SIZE, SIZE, SIZE))
    return torch.stack(blocks)


def radius_of(s2: Tensor) -> float:
    """The radius of spheres whose S2(r)/S2(0) = φ^(3r/4R − r³/16R³) is nearest to that of the data."""
    r = torch.arange(len(s2)).double()
    phi, wanted = s2[0].item(), s2.double() / s2[0]

    def misfit(radius: float) -> float:
        u = (r / (2 * radius)).clamp(max=1)
        return float((phi ** (1.5 * u - 0.5 * u**3) - wanted).square().sum())

    return min(np.arange(1.0, 12.0, 0.1).tolist(), key=misfit)


# Samples ------------------------------------------------------------------------------------------------------------


class Rock:
    """A trained model, and its scalings."""

    def __init__(self, path: Path, run: Path) -> None:
        self.denoiser = nidiff.load_model(run)
        data = nidiff.load_dataset(path, variables=["pore"], condition="porosity", held_out=f"start={BORDER}:")
        self.scaling = data.scaling

    def given(self, porosities: Tensor, denoiser: nidiff.Denoiser | None = None) -> nidiff.Denoiser:
        scaling = self.denoiser.conditions["parameters"].scaling
        return (denoiser or self.denoiser).given(parameters=scaling.to_model(porosities[:, None].float()))

    def blocks(self, porosities: Tensor, sampler: str, steps: int) -> Tensor:
        parts = []
        for rows in torch.arange(len(porosities)).split(16):
            shape = (len(rows), 1, SIZE, SIZE, SIZE)
            bound = self.given(porosities[rows])
            parts.append(nidiff.sample(bound, shape, sampler=sampler, num_steps=steps, generator=rows.tolist()))
        return self.scaling.to_data(torch.cat(parts))[:, 0]

    def filled(self, blocks: Tensor, known: Tensor, network: bool, steps: int = 10) -> dict[str, float]:
        """Of one sample of each of the blocks [N, 1, z, y, x], of which the planes of `SLAB` are missing; without the
        network by the data's Gaussian alone."""
        y = self.scaling.to_model(blocks)
        y[:, :, SLAB] = math.nan
        alone = self.denoiser.gaussian.denoiser(self.denoiser.process)
        denoiser = self.given(blocks.mean((1, 2, 3, 4))) if network else alone
        bound = nidiff.posterior(denoiser, nidiff.Observation.missing(y, noise=0.05), tolerance=1e-3)
        sampler = "ancestral:variance=gaussian"
        x = nidiff.sample(bound, y.shape, sampler=sampler, num_steps=steps, generator=range(len(y)))
        return seams(self.scaling.to_data(x)[:, 0] > 0.5, known)

    def asked(self, porosities: Sequence[float], sampler: str, steps: int, count: int = 8) -> dict[str, float]:
        """The mean porosity of samples of which a porosity was asked."""
        x = self.blocks(torch.tensor(porosities).repeat_interleave(count), sampler, steps) > 0.5
        means = x.double().mean((1, 2, 3)).view(-1, count).mean(1).tolist()
        return {f"{p:g}": mean for p, mean in zip(porosities, means, strict=True)}

    def larger(self, size: int, porosity: float, count: int, steps: int = 20) -> Tensor:
        """Periodic blocks of size³ voxels, with the same noise of neighbours on more points."""
        old = self.denoiser
        net = nidiff.FieldUNet(**{**old.net.config, "sample_size": (size,) * 3, "boundary": "periodic"})
        net.load_state_dict(old.net.state_dict())
        shape, coloured = (size,) * 3, old.process.covariance.origin.name == "matern"
        noise = nidiff.matern(shape, length_scale=3, smoothness=0.5) if coloured else nidiff.Identity(shape)
        process = nidiff.Process(old.process.schedule, noise)
        denoiser = nidiff.Denoiser(net.eval(), process, old.target_name, conditions=old.conditions)
        bound = self.given(torch.full((count,), porosity), denoiser)
        x = nidiff.sample(bound, (count, 1, *shape), sampler=SAMPLERS[0], num_steps=steps, generator=range(count))
        return self.scaling.to_data(x)[:, 0]


def seams(found: Tensor, truth: Tensor) -> dict[str, float]:
    """How a filled slab meets what is known: of the known pore voxels at its two borders, the share whose neighbour in
    the slab is a pore, too, and the share of the voxels in the slab that are the same as in the rock."""
    share = []
    for known, filled in ((SLAB.start - 1, SLAB.start), (SLAB.stop, SLAB.stop - 1)):
        share.append(found[:, filled][truth[:, known]].double().mean().item())
    same = (found[:, SLAB] == truth[:, SLAB]).double().mean().item()
    return {"across": sum(share) / 2, "same": same, "surface": surface(found[:, SLAB]), "connected": through(found)}


def through(pores: Tensor) -> float:
    """The share of the pore voxels of the first plane that are connected, inside of the block, with the last plane."""
    joined, total = 0, 0
    for block in pores.numpy():
        names = label(block)[0]
        last = np.unique(names[-1])
        joined += int((np.isin(names[0], last[last > 0])).sum())
        total += int((names[0] > 0).sum())
    return joined / total


# All of it ----------------------------------------------------------------------------------------------------------


def measure(path: Path, runs: Path, results: Results) -> None:
    train, test = load(path)
    real = test[:, 0] > 0.5
    porosities = test.mean((1, 2, 3, 4))
    known, s2 = real.double().mean((1, 2, 3)), two_point(train[:, 0] > 0.5, SIZE - 1)
    alike = torch.stack([(train.mean((1, 2, 3, 4)) - p).abs().argmin() for p in porosities])
    radius = radius_of(s2)
    baselines: dict[str, Callable[[], Tensor]] = {
        "held-out": lambda: real,
        "training": lambda: train[alike, 0] > 0.5,
        "truncated Gaussian": lambda: truncated_gaussian(s2, known, torch.Generator().manual_seed(0)),
        "overlapping spheres": lambda: overlapping_spheres(radius, known, torch.Generator().manual_seed(0)),
    }
    for name, make in baselines.items():
        results.measured(name, lambda make=make: describe(make()))
    results.measured("slab of the rock", lambda: seams(real[::16], real[::16]))
    shuffled = real[::16].clone()
    shuffled[:, SLAB] = real[::16].roll(1, 0)[:, SLAB]
    results.measured("slab of another block", lambda: seams(shuffled, real[::16]))
    for seed in SEEDS:
        for noise in NOISES:
            if ended(runs / f"{noise}-{seed}"):
                measure_run(path, runs, noise, seed, test, results)


def shown(path: Path, runs: Path, train: Tensor, test: Tensor, results: Results) -> dict[str, Any]:
    """Slices for the figure: of the rock, the models and the baselines, and of a larger block."""
    rows, s2 = torch.arange(10, 82, 24), two_point(train[:, 0] > 0.5, SIZE - 1)
    real, porosities = test[rows, 0] > 0.5, test[rows].mean((1, 2, 3, 4))
    known, generator = real.double().mean((1, 2, 3)), torch.Generator().manual_seed(0)
    ways = {"the rock": real}
    for noise in NOISES:
        rock = Rock(path, runs / f"{noise}-0")
        ways[f"network, {noise}"] = cut_at(rock.blocks(porosities, best(results, noise, STEPS[0]), STEPS[0]), known)
    ways["truncated Gaussian"] = truncated_gaussian(s2, known, generator)
    ways["overlapping spheres"] = overlapping_spheres(radius_of(s2), known, generator)
    larger = Rock(path, runs / f"{NOISES[0]}-0").larger(2 * SIZE, float(test.mean()), 1)
    slices = np.stack([pores[:, SIZE // 2].numpy() for pores in ways.values()])
    return {"ways": list(ways), "slices": slices, "larger": cut_at(larger, known.mean().view(1))[0, SIZE].numpy()}


def measure_run(path: Path, runs: Path, noise: str, seed: int, test: Tensor, results: Results) -> None:
    rock, porosities = Rock(path, runs / f"{noise}-{seed}"), test.mean((1, 2, 3, 4))
    known = (test[:, 0] > 0.5).double().mean((1, 2, 3))

    def measured(name: str, measure: Callable[[], dict]) -> None:
        results.measured(f"{noise}-{seed} {name}", measure)

    def samples(sampler: str, steps: int) -> dict:
        return describe(cut_at(rock.blocks(porosities, sampler, steps), known))

    for steps in STEPS:
        for sampler in SAMPLERS if seed == 0 else [best(results, noise, steps)]:
            measured(f"{sampler} {steps}", partial(samples, sampler, steps))
    borders = test[::16, 0] > 0.5
    for name, network in (("slab", True), ("slab by the Gaussian", False))[: 2 if seed == 0 else 1]:
        measured(name, partial(rock.filled, test[::16], borders, network))
    measured("larger", lambda: describe(cut_at(rock.larger(64, float(porosities.mean()), 3), known.mean().repeat(3))))
    measured("asked", lambda: rock.asked((0.1, 0.15, 0.2, 0.25, 0.3), best(results, noise, STEPS[0]), STEPS[0]))


def best(results: Results, noise: str, steps: int) -> str:
    """The sampler of seed 0 with the smallest sum of errors."""

    def total(sampler: str) -> float:
        found = results.values.get(f"{noise}-0 {sampler} {steps}")
        return math.inf if found is None else sum(map(abs, errors(found, results.values["held-out"]).values()))

    return min(SAMPLERS, key=total)


def tables(results: Results) -> str:
    """The tables of the page: means over trainings."""
    values, rows = results.values, []
    names = {name: [name] for name in ("training", "truncated Gaussian", "overlapping spheres")}
    for noise in NOISES:
        for steps in STEPS:
            sampler = best(results, noise, steps)
            names[f"{noise}, {steps} steps of {sampler}"] = [f"{noise}-{seed} {sampler} {steps}" for seed in SEEDS]
    for title, runs in names.items():
        found = [errors(values[run], values["held-out"]) for run in runs if run in values]
        if found:
            rows.append([title, *(mean_and_spread([one[key] for one in found]) for key in COLUMNS)])
    text = markdown(["", *COLUMNS], rows)
    keys = ("across", "same", "surface", "connected")
    names = {name: [f"slab of {name}"] for name in ("the rock", "another block")}
    for noise in NOISES:
        names |= {
            f"{noise}, {by}": [f"{noise}-{seed} {by}" for seed in SEEDS] for by in ("slab", "slab by the Gaussian")
        }
    slabs = []
    for title, runs in names.items():
        if found := [values[run] for run in runs if run in values]:
            slabs.append([title, *(mean_and_spread([one[key] for one in found]) for key in keys)])
    return text + "\n\n" + markdown(["", *keys], slabs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    stored = Results("rock")
    measure(Path(sys.argv[1]), Path(sys.argv[2]), stored)
    if all(ended(Path(sys.argv[2]) / f"{noise}-0") for noise in NOISES):
        numbers = shown(Path(sys.argv[1]), Path(sys.argv[2]), *load(Path(sys.argv[1])), stored)
        np.savez_compressed(Path(__file__).parents[2] / "docs/figures/rock.npz", **numbers)
    print(tables(stored))
