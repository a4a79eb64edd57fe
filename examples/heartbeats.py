"""Heartbeats as a folder of WAV files, for the story in docs/signals.md: python examples/heartbeats.py

Each is four seconds of an electrocardiogram, 256 samples per second: five waves per beat (as in McSharry et al., 2003),
a heart rate that follows the breath, the slow wander of an electrode, and a little white noise.
"""

import sys
import wave
from pathlib import Path

import numpy as np

RATE, LENGTH = 256, 1024
WAVES = {  # when, in beats from the R peak; how wide, in seconds; how high
    "P": (-0.21, 0.028, 0.09),
    "Q": (-0.045, 0.011, -0.08),
    "R": (0.0, 0.011, 0.60),
    "S": (0.045, 0.012, -0.15),
    "T": (0.33, 0.055, 0.17),
}


def heartbeat(rng: np.random.Generator) -> np.ndarray:
    """One recording [1024], between -1 and 1."""
    time = np.arange(LENGTH) / RATE
    breath = rng.uniform(0.2, 0.35) * time + rng.uniform()  # in cycles
    pace = rng.uniform(0.9, 1.7) * (1 + 0.06 * np.sin(2 * np.pi * breath))  # beats per second
    beats = rng.uniform() + np.cumsum(pace) / RATE
    signal = rng.uniform(0.02, 0.08) * np.sin(2 * np.pi * breath + rng.uniform(0, 6.28))
    signal += 0.002 * np.cumsum(rng.standard_normal(LENGTH)) - 0.05
    for when, wide, high in WAVES.values():
        late, wide, high = when * rng.normal(1, 0.08), wide * rng.normal(1, 0.1), high * rng.normal(1, 0.15)
        phase = (beats - late + 0.5) % 1 - 0.5
        signal += high * np.exp(-((phase / pace / wide) ** 2) / 2)
    return signal + 0.01 * rng.standard_normal(LENGTH)


def main(folder: Path = Path("out/heartbeats"), count: int = 3000, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index in range(count):
        with wave.open(str(folder / f"{index:05d}.wav"), "wb") as out:
            out.setparams((1, 2, RATE, 0, "NONE", ""))
            out.writeframes((32767 * heartbeat(rng).clip(-1, 1)).round().astype("<i2").tobytes())
    print(f"wrote {count} recordings to {folder}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]), *map(int, sys.argv[2:]))
