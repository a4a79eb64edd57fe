"""Data with known trouble: seeded generators of paths and turbulence, the digits, and small photographs."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import nidiff


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


def turbulent_vorticity(members: int, snapshots: int, seed: int, every: float = 1.0, size: int = 32) -> Tensor:
    """Vorticity [members, snapshots, size, size] of 2-D turbulence on a periodic square, forced at random.

    ∂ω/∂t + u·∇ω = f − μ ω − ν ∇⁴ω by a pseudo-spectral method with 3/2 · size points a side, which leaves the modes
    |k| ≤ size/2 free of aliasing, and Heun steps with the dissipation as an exact factor. f is white in time and lives
    at 2 ≤ |k| ≤ 4. The members are independent; each is seen ``every`` unit of time, turned, mirrored (ω changes sign)
    and shifted at random, which leaves the law as it is. White noise of 1 % is added, as an instrument would: without
    it the mean and the modes at ±size/2 have no power at all.
    """
    points, step, drag, spin_up = size * 3 // 2, 0.01, 0.05, 25.0
    frequency = torch.fft.fftfreq(points, 1 / points)
    kx, ky = frequency[: points // 2 + 1][None, :], frequency[:, None]
    kx = kx.abs()
    squared = kx**2 + ky**2
    kept = (kx.expand_as(squared) < size / 2) & (ky.abs().expand_as(squared) < size / 2) & (squared > 0)
    inverse = torch.where(kept, 1 / squared.clamp(min=1), 0.0)
    damping = torch.exp(-step * (drag + 2.0 * (squared / (size / 2) ** 2) ** 2)) * kept
    ring = ((squared >= 4) & (squared <= 16)).float()
    amplitude = 40.0 * math.sqrt(step) * ring / ring.sum().sqrt() * points  # of the noise after a transform "ortho"
    generator = torch.Generator().manual_seed(seed)

    def inverse_transform(modes: Tensor) -> Tensor:
        return torch.fft.irfft2(modes, s=(points, points))

    def advection(omega: Tensor) -> Tensor:
        psi = omega * inverse
        field, u, v = (inverse_transform(each) for each in (omega, 1j * ky * psi, -1j * kx * psi))
        return -(1j * kx * torch.fft.rfft2(u * field) + 1j * ky * torch.fft.rfft2(v * field))

    def advance(omega: Tensor) -> Tensor:
        rate = advection(omega)
        guess = damping * (omega + step * rate)
        omega = damping * (omega + step / 2 * rate) + step / 2 * advection(guess)
        force = torch.fft.rfft2(torch.randn(members, points, points, generator=generator), norm="ortho")
        return (omega + amplitude * force) * kept

    def pixels(omega: Tensor) -> Tensor:
        """The kept modes on a grid of ``size`` points, each member under a random symmetry."""
        half = size // 2
        modes = torch.cat([omega[:, :half, : half + 1], omega[:, -half:, : half + 1]], dim=1)
        fields = torch.fft.irfft2(modes, s=(size, size)) * (size / points) ** 2
        choices = torch.randint(0, size, (members, 4), generator=generator).tolist()
        for field, (turns, mirror, *shift) in zip(fields, choices, strict=True):
            changed = torch.rot90(field, turns % 4).roll(shift, (0, 1))
            field.copy_(-changed.flip(0) if mirror % 2 else changed.clone())
        return fields + 0.01 * fields.std() * torch.randn(fields.shape, generator=generator)

    omega = torch.fft.rfft2(torch.randn(members, points, points, generator=generator)) * (squared < 36) * kept
    for _ in range(round(spin_up / step)):
        omega = advance(omega)
    found = torch.empty(members, snapshots, size, size)
    for number in range(snapshots):
        found[:, number] = pixels(omega)
        for _ in range(round(every / step)):
            omega = advance(omega)
    return found


def paths(cache: Path, data_dir: Path | None) -> Data:
    """20,000 paths [1, 128] and 4,000 more, of variance 1."""
    made = stored(cache / "paths.npz", lambda: double_well_paths(24_000, seed=0).float()).unsqueeze(1)
    return _standardised(made[:20_000], made[20_000:])


def turbulence(cache: Path, data_dir: Path | None) -> Data:
    """6,000 fields of 32×32 from 48 runs, and 2,000 from 16 others, of variance 1."""
    made = stored(cache / "turbulence.npz", lambda: turbulent_vorticity(64, 125, seed=0))
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
