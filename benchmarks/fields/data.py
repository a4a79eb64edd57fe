"""Data with known trouble: seeded generators of paths and turbulence, the digits, and small photographs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import nidiff
from nidiff.data.turbulence import turbulent_vorticity


class Data(NamedTuple):
    """Images or signals to train on [N, ..., *event], and others of the same law that no network has seen."""

    train: Tensor
    held_out: Tensor
    labels: Tensor | None = None


def double_well_paths(count: int, seed: int, length: int = 128, spacing: float = 0.1) -> Tensor:
    """Positions [count, length] of a particle in the double well V = q⁴/4 − q²/2, at ``spacing`` in time.

    dq = p dt, dp = (q − q³ − γ p) dt + √(2 γ T) dw with γ = 1, T = 0.3, by the leapfrog with exact friction (BAOAB),
    from a state of equilibrium. q has a continuous derivative, so the spectrum falls as k⁻⁴.
    """
    friction, temperature, substeps, burn_in = 1.0, 0.3, 4, 30.0
    step = spacing / substeps
    random = np.random.default_rng(seed)
    decay = math.exp(-friction * step)
    kick = math.sqrt(temperature * (1 - decay**2))
    q, p = random.choice([-1.0, 1.0], count), math.sqrt(temperature) * random.standard_normal(count)

    def advance(q: np.ndarray, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p = p + step / 2 * (q - q**3)
        q = q + step / 2 * p
        p = decay * p + kick * random.standard_normal(count)
        q = q + step / 2 * p
        return q, p + step / 2 * (q - q**3)

    for _ in range(round(burn_in / step)):
        q, p = advance(q, p)
    path = np.empty((length, count))
    for row in path:
        row[:] = q
        for _ in range(substeps):
            q, p = advance(q, p)
    return torch.from_numpy(path.T.copy())


def paths(cache: Path, data_dir: Path | None) -> Data:
    """20,000 paths [1, 128] and 4,000 more, of variance 1."""
    made = stored(cache / "paths.npz", lambda: double_well_paths(24_000, seed=0).float()).unsqueeze(1)
    return _standardised(made[:20_000], made[20_000:])


def turbulence(cache: Path, data_dir: Path | None) -> Data:
    """6,000 fields of 32×32 from 48 runs, and 2,000 from 16 others, of variance 1."""
    made = stored(cache / "turbulence.npz", lambda: turbulent_vorticity(64, 125, 0, size=32, every=1.0, spin_up=25.0))
    train, held_out = (part.transpose(0, 1).flatten(0, 1).unsqueeze(1) for part in (made[:48], made[48:]))
    return _standardised(train, held_out)


def digits(cache: Path, data_dir: Path | None) -> Data:
    """The digits in [−1, 1]: 1,498 to train, 299 held out."""
    train, test = nidiff.load_dataset("digits"), nidiff.load_dataset("digits", split="test")
    return Data(train.all(), test.all(), train.labels)


def photographs(cache: Path, data_dir: Path | None) -> Data:
    """CIFAR-10 in [−1, 1], its pixels averaged in squares of 2×2."""
    halves = (nidiff.load_dataset("cifar10", split=split, data_dir=data_dir) for split in ("train", "test"))
    train, test = (torch.nn.functional.avg_pool2d(images.all(), 2) for images in halves)
    return Data(train, test)


def stored(file: Path, make: Callable[[], Tensor]) -> Tensor:
    """The array in ``file``; it is made and written there if there is none."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, data=make().numpy())
    with np.load(file, allow_pickle=False) as found:
        return torch.from_numpy(found["data"])


def _standardised(train: Tensor, held_out: Tensor) -> Data:
    mean, std = train.mean(), train.std()
    return Data((train - mean) / std, (held_out - mean) / std)
