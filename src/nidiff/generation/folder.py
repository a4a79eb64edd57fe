"""A folder of samples, an image per seed:

job.json       what decides the pixels of a seed; the samples of another job are refused
parts/         finished batches, while the job runs
samples.npz    arr_0 [N, H, W, C], uint8 or floats in [-1, 1], and seeds [N]
png/           SEED.png; unless there are 1 or 3 channels, they are grey images side by side
grid.png       the first of them
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff import __version__
from nidiff.data.images import quantise
from nidiff.data.pictures import as_grey_or_rgb, save_grid, save_png
from nidiff.errors import InputError, one_of
from nidiff.files import ASIDE, locked, read_npz, replace_npz, replace_text, writing

if TYPE_CHECKING:
    from nidiff.generation.job import Job

FORMATS = {"npz": {"npz"}, "png": {"png"}, "both": {"npz", "png"}}
SHOWN = 64  # in grid.png
REMEDY = "delete it, so that its images are drawn again"


class SampleFolder:
    """Images by seed at ``path``; ``kind`` is a name in `FORMATS`. Several processes may `add` at once."""

    def __init__(self, path: Path, kind: str = "npz") -> None:
        self.path = path
        self.kinds = FORMATS[one_of("format", kind, FORMATS)]
        self.archive, self.parts, self.png = path / "samples.npz", path / "parts", path / "png"

    def check(self, job: "Job") -> None:
        """Refuse a folder that holds anything but samples of this job; nothing is written."""
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise InputError(
                    f"out={str(self.path)!r} cannot be made, since {str(place)!r} is a file: choose another."
                )
        if job.floats and "npz" not in self.kinds:
            raise InputError("floats cannot be kept as png: use the format npz or both.")
        try:
            found = json.loads((self.path / "job.json").read_text())["job"]
        except FileNotFoundError:
            if self.path.is_dir() and any(not path.name.startswith(ASIDE) for path in self.path.iterdir()):
                raise InputError(
                    f"out={str(self.path)!r} holds other files: choose an empty or new directory."
                ) from None
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"out={str(self.path)!r} has a damaged job.json: choose another directory.") from error
        if "steps" in found:  # what version 0.1 called it
            found["num_steps"] = found.pop("steps")
        differences = [f"{key}: {found.get(key)!r}, not {value!r}" for key, value in asdict(job).items()
                       if found.get(key) != value]  # fmt: skip
        if differences:
            raise InputError(
                f"out={str(self.path)!r} holds the samples of another job ({'; '.join(differences)}): "
                "choose another directory, or delete that one."
            )

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The ``seeds`` that are still to be drawn, rising."""
        if "npz" in self.kinds:
            have = {int(seed) for file in self._files() for seed in read_npz(file, ["seeds"], REMEDY)["seeds"]}
        else:
            have = {seed for seed in seeds if self._picture(seed).exists()}
        return sorted(set(seeds) - have)

    def begin(self, job: "Job") -> None:
        with self._writing():
            about = {"job": asdict(job), "nidiff": __version__}
            replace_text(self.path / "job.json", json.dumps(about, indent=2) + "\n")

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Keep images [N, C, H, W], uint8 or floats."""
        with self._writing():
            if "npz" in self.kinds:
                arrays = {"arr_0": images.movedim(1, -1).numpy(), "seeds": np.array(seeds, dtype=np.int64)}
                with locked(self.path):
                    replace_npz(self.parts / f"{seeds[0]}-{len(seeds)}.npz", arrays)
            else:
                for seed, image in zip(seeds, images, strict=True):
                    self._save_picture(seed, image)

    def finish(self, seeds: Sequence[int]) -> None:
        """Merge the parts, write the pictures of ``seeds``, and remove what is no longer needed."""
        with self._writing():
            first = list(seeds[:SHOWN])
            if "npz" in self.kinds:
                with locked(self.path):
                    self._merge()
                shown = self.read(seeds if "png" in self.kinds else first)
                if "png" in self.kinds:
                    for seed, image in zip(seeds, shown, strict=True):
                        if not self._picture(seed).exists():
                            self._save_picture(seed, image)
            else:
                shown = torch.stack([_opened(self._picture(seed)) for seed in first])
            save_grid(shown[:SHOWN], self.path / "grid.png")
            for left in [*self.path.glob(f"{ASIDE}*"), *self.png.glob(f"{ASIDE}*")]:  # by a kill
                left.unlink(missing_ok=True)

    def _merge(self) -> None:
        """All parts into samples.npz, by seed; then they are removed. Another job may be adding to the folder."""
        files = self._files()
        if files in ([], [self.archive]):
            return
        seeds = {file: read_npz(file, ["seeds"], REMEDY)["seeds"] for file in files}
        rising = np.unique(np.concatenate(list(seeds.values())))
        merged = None
        for file in files:
            images = read_npz(file, ["arr_0"], REMEDY)["arr_0"]
            merged = np.empty((len(rising), *images.shape[1:]), images.dtype) if merged is None else merged
            merged[np.searchsorted(rising, seeds[file])] = images
        assert merged is not None
        replace_npz(self.archive, {"arr_0": merged, "seeds": rising})
        for file in files:
            if file != self.archive:
                file.unlink()
        shutil.rmtree(self.parts)

    def read(self, seeds: Sequence[int]) -> Tensor:
        """The images [N, C, H, W] of ``seeds``, as they are stored in samples.npz."""
        stored = read_npz(self.archive, ["arr_0", "seeds"], REMEDY)
        place = {int(seed): row for row, seed in enumerate(stored["seeds"])}
        rows = [place[seed] for seed in seeds]
        return torch.from_numpy(stored["arr_0"][rows]).movedim(-1, 1)

    def _files(self) -> list[Path]:
        whole = [self.archive] if self.archive.exists() else []
        return whole + sorted(self.parts.glob("[0-9]*.npz"))

    def _picture(self, seed: int) -> Path:
        return self.png / f"{seed:06d}.png"

    def _save_picture(self, seed: int, image: Tensor) -> None:
        save_png(as_grey_or_rgb(quantise(image)[None])[0].movedim(0, -1), self._picture(seed))

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room or choose another; repeat the command to continue with the images that are there"
        return writing("out", self.path, remedy)


def _opened(file: Path) -> Tensor:
    with Image.open(file) as picture:
        pixels = np.array(picture)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).movedim(-1, 0)
