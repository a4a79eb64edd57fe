"""Videos of turbulence as an array, for the story in docs/video.md: python examples/video.py

Each shows the vorticity of a decaying flow in the plane, 8 frames of 32 by 32 pixels: [N, T, H, W] in 1/s. Space is
periodic: what leaves at one side enters at the other.
"""

import sys
from pathlib import Path

import numpy as np

FRAMES, SIZE, INTERVAL = 8, 32, 0.25  # seconds between frames; the side of the square is 2π metres
KX, KY = np.meshgrid(np.fft.fftfreq(SIZE, 1 / SIZE), np.fft.rfftfreq(SIZE, 1 / SIZE), indexing="ij")
K2 = np.maximum(KX**2 + KY**2, 1)
KEPT = K2 < (SIZE / 3) ** 2  # the others are aliased by the product
VISCOSITY, CAMERA = 4e-6, 0.05  # the first is of K2 cubed and acts on the finest scales; the noise of a measurement


def slope(waves: np.ndarray) -> np.ndarray:
    """d/dt of the vorticity, -u · grad of it, without viscosity; all as Fourier coefficients."""
    along, across, x, y = (np.fft.irfft2(w * waves) for w in (1j * KY / K2, -1j * KX / K2, 1j * KX, 1j * KY))
    return -1.0 * KEPT * np.fft.rfft2(along * x + across * y)


def step(waves: np.ndarray, time: float) -> np.ndarray:
    """The midpoint rule, and the exact decay by viscosity."""
    half, whole = (np.exp(-VISCOSITY * K2**3 * part * time) for part in (0.5, 1))
    return whole * waves + time * half * slope(half * (waves + time / 2 * slope(waves)))


def videos(count: int, rng: np.random.Generator) -> np.ndarray:
    """[count, 8, 32, 32], float32."""
    start = np.fft.rfft2(rng.standard_normal((count, SIZE, SIZE))) * KEPT * np.sqrt(K2) / (1 + K2 / 4) ** 1.5
    start[:, 0, 0] = 0  # no vorticity on average
    waves, frames = start * (2.0 / np.fft.irfft2(start).std((1, 2), keepdims=True)), []
    for number in range(-12, FRAMES):  # it takes 3 seconds to form its vortices
        for _ in range(5):
            waves = step(waves, INTERVAL / 5)
        frames += [np.fft.irfft2(waves)] if number >= 0 else []
    return (np.stack(frames, 1) + CAMERA * rng.standard_normal((count, FRAMES, SIZE, SIZE))).astype(np.float32)


def main(file: Path = Path("out/turbulence.npy"), count: int = 2000, seed: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    np.save(file, np.concatenate([videos(min(100, count - done), rng) for done in range(0, count, 100)]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *map(int, sys.argv[2:]))
