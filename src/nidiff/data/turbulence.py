"""Turbulence in two dimensions, computed when it is first asked for: fields with a steep spectrum."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nidiff.data.download import cache_folder
from nidiff.errors import FileError, one_of
from nidiff.files import read_npz, replacing, writing
from nidiff.randomness import random_index, white_noise

SIZE, MEMBERS, SNAPSHOTS, EVERY, COPIES = 64, {"train": 16, "test": 4}, 50, 0.5, 8
SEEDS = {"train": 0, "test": 1}
STEP, DRAG, FORCE, SPIN_UP = 0.01, 0.05, 40.0, 20.0  # twice the step is unstable
REPLACE = "delete it, and it is computed again"


def turbulent_vorticity(
    members: int,
    snapshots: int,
    seed: int,
    *,
    size: int = SIZE,
    every: float = EVERY,
    copies: int = 1,
    spin_up: float = SPIN_UP,
    progress: bool = False,
) -> Tensor:
    """Vorticity [members, snapshots · copies, size, size] of 2-D turbulence on a periodic square, forced at random.

    ∂ω/∂t + u·∇ω = f − μ ω − ν ∇⁴ω by a pseudo-spectral method with 3/2 · size points a side, which leaves the modes
    |k| < size/2 free of aliasing, and Heun steps with the dissipation as an exact factor. f is white in time and lives
    at 2 ≤ |k| ≤ 4. The members are independent. Each is seen ``every`` unit of time after the ``spin_up``, in
    ``copies``: turned, mirrored (ω changes sign) and shifted at random, which leaves the law as it is. White noise of
    1 % is added, as an instrument would: without it the mean and the modes at ±size/2 have no power at all.
    """
    points = size * 3 // 2
    frequency = torch.fft.fftfreq(points, 1 / points)
    kx, ky = frequency[: points // 2 + 1].abs()[None, :], frequency[:, None]
    squared = kx**2 + ky**2
    resolved = (kx.expand_as(squared) < size / 2) & (ky.abs().expand_as(squared) < size / 2) & (squared > 0)
    inverse = torch.where(resolved, 1 / squared.clamp(min=1), 0.0)
    damping = torch.exp(-STEP * (DRAG + 2.0 * (squared / (size / 2) ** 2) ** 2)) * resolved
    ring = ((squared >= 4) & (squared <= 16)).float()
    amplitude = FORCE * math.sqrt(STEP) * ring / ring.sum().sqrt() * points  # of the noise after a transform "ortho"
    generator = torch.Generator().manual_seed(seed)

    def inverse_transform(modes: Tensor) -> Tensor:
        return torch.fft.irfft2(modes, s=(points, points))

    def advection(omega: Tensor) -> Tensor:
        psi = omega * inverse
        field, u, v = (inverse_transform(each) for each in (omega, 1j * ky * psi, -1j * kx * psi))
        return -(1j * kx * torch.fft.rfft2(u * field) + 1j * ky * torch.fft.rfft2(v * field))

    def advance(omega: Tensor) -> Tensor:
        rate = advection(omega)
        guess = damping * (omega + STEP * rate)
        omega = damping * (omega + STEP / 2 * rate) + STEP / 2 * advection(guess)
        force = torch.fft.rfft2(white_noise((members, points, points), generator), norm="ortho")
        return (omega + amplitude * force) * resolved

    def pixels(omega: Tensor) -> Tensor:
        """The resolved modes on a grid of ``size`` points, each member under random symmetries."""
        half = size // 2
        modes = torch.cat([omega[:, :half, : half + 1], omega[:, -half:, : half + 1]], dim=1)
        fields = torch.fft.irfft2(modes, s=(size, size)) * (size / points) ** 2
        turned = fields.repeat_interleave(copies, 0)
        choices = random_index(size, 4 * len(turned), generator).reshape(-1, 4).tolist()
        for field, (turns, mirror, *shift) in zip(turned, choices, strict=True):
            changed = torch.rot90(field, turns % 4).roll(shift, (0, 1))
            field.copy_(-changed.flip(0) if mirror % 2 else changed.clone())
        turned += 0.01 * fields.std() * white_noise(turned.shape, generator)
        return turned.unflatten(0, (members, copies))

    before, between = round(spin_up / STEP), round(every / STEP)
    total = before + (snapshots - 1) * between
    omega = torch.fft.rfft2(white_noise((members, points, points), generator)) * (squared < 36) * resolved
    snapshots_seen = []
    for number in tqdm(range(total + 1), desc="turbulence", delay=1, leave=False, disable=None if progress else True):
        if number >= before and (number - before) % between == 0:
            snapshots_seen.append(pixels(omega))
        omega = advance(omega)
    return torch.cat(snapshots_seen, 1)


def load_turbulence(split: str, data_dir: Path | None = None, progress: bool = True) -> tuple[Tensor, None]:
    """float32 [N, 1, 64, 64]: vorticity of forced turbulence on a periodic square, N = 6,400 to train and 1,600 to test
    by other simulations (see `turbulent_vorticity`: 50 snapshots of each of 16 and 4, in eight copies).

    They are computed once, in about half a minute, and kept in ``data_dir`` or the cache folder. The seeds are fixed,
    but turbulence is chaotic: another processor rounds differently, and has other fields of the same law.
    """
    folder = cache_folder() if data_dir is None else Path(data_dir)
    file = folder / f"turbulence-{one_of('split', split, SEEDS)}.npz"
    if not file.is_file():
        with writing("data_dir", folder):
            folder.mkdir(parents=True, exist_ok=True)  # a place that cannot be is refused before they are computed
        options: Any = {"size": SIZE, "every": EVERY, "copies": COPIES, "spin_up": SPIN_UP, "progress": progress}
        made = turbulent_vorticity(MEMBERS[split], SNAPSHOTS, SEEDS[split], **options)
        with writing("data_dir", file), replacing(file) as out:
            np.savez(out, vorticity=made.flatten(0, 1).numpy())
    values = torch.from_numpy(read_npz(file, ["vorticity"], REPLACE)["vorticity"])
    if tuple(values.shape) != (MEMBERS[split] * SNAPSHOTS * COPIES, SIZE, SIZE) or values.dtype != torch.float32:
        raise FileError("data_dir", str(file), "is not the turbulence of this version", REPLACE)
    return values[:, None], None
