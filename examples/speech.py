"""Recordings of the Free Spoken Digit Dataset as the folders of docs/speech.md.

git clone https://github.com/Jakobovski/free-spoken-digit-dataset
python examples/speech.py free-spoken-digit-dataset/recordings out/fsdd
"""

import sys
from pathlib import Path

import numpy as np
import soundfile

LOUDNESS = 0.08  # root mean square of every clip: the speakers' microphones differ by ten times
LENGTH, VOICES, NOISE = 4096, 8, 0.07


def main(recordings: Path, out: Path) -> None:
    """`out`/train/7_jackson/32.wav and so on, all of one loudness; takes 0 to 4, the official test set, in `out`/test.
    `out`/noisy has take 0 of every word in babble."""
    for path in sorted(recordings.glob("*_*_*.wav")):
        word, take = path.stem.rsplit("_", 1)
        sound, rate = soundfile.read(path)
        sound *= LOUDNESS / np.sqrt(np.mean(sound**2))
        write(out / ("test" if int(take) < 5 else "train") / word / f"{take}.wav", sound, rate)
    rng = np.random.default_rng(0)
    for path in sorted(out.glob("test/*/0.wav")):
        sound, rate = soundfile.read(path)
        write(out / "noisy" / f"{path.parent.name}.wav", middle(sound) + NOISE * babble(rng, out, path), rate)


def babble(rng: np.random.Generator, out: Path, path: Path) -> np.ndarray:
    """Training clips of speakers other than that of ``path``, again and again from somewhere, at the same time."""
    speaker = path.parent.name.split("_")[1]
    others = [other for other in sorted(out.glob("train/*/*.wav")) if other.parent.name.split("_")[1] != speaker]
    total = np.zeros(LENGTH)
    for number in rng.choice(len(others), VOICES, replace=False):
        sound, _ = soundfile.read(others[number])
        total += np.roll(np.resize(sound, LENGTH), rng.integers(LENGTH))
    return total / total.std()


def middle(sound: np.ndarray) -> np.ndarray:
    """As nidiff reads it with --size: the middle of a longer clip, and silence after a shorter one."""
    first = max(0, len(sound) - LENGTH) // 2
    sound = sound[first : first + LENGTH]
    return np.pad(sound, (0, LENGTH - len(sound)))


def write(file: Path, sound: np.ndarray, rate: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(file, sound.clip(-1, 1), rate)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
