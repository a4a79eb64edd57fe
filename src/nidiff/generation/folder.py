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
from nidiff.files import ASIDE, read_npz, replace_npz, replace_text, writing
from nidiff.locks import locked

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
        out = f"out={str(self.path)!r}"
        if job.floats and "npz" not in self.kinds:
            raise InputError("floats cannot be kept as png: use the format npz or both.")
        # Listed before job.json is read: another job may be writing it now, which comes before its other files.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        try:
            found = dict(json.loads((self.path / "job.json").read_text())["job"])
        except (FileNotFoundError, NotADirectoryError):
            if any(not name.startswith(ASIDE) for name in names):
                raise InputError(f"{out} holds other files: choose an empty or new directory.") from None
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{out} has a damaged job.json: choose another directory.") from error
        if "steps" in found:  # what version 0.1 called it
            found["num_steps"] = found.pop("steps")
        mine = asdict(job)
        different = "; ".join(
            f"{key}: {found.get(key)!r}, not {mine[key]!r}" for key in mine if found.get(key) != mine[key]
        )
        if different:
            remedy = "choose another directory, or delete that one"
            raise InputError(f"{out} holds the samples of another job ({different}): {remedy}.")

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The ``seeds`` that are still to be drawn, rising."""
        if "npz" in self.kinds:
            with self._writing(), locked(self.path):  # another job may be merging the parts
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
                self._save_pictures(seeds, images)

    def finish(self, seeds: Sequence[int]) -> None:
        """Merge the parts, write the pictures of ``seeds``, and remove what is no longer needed."""
        with self._writing():
            first = seeds[:SHOWN]
            if "npz" in self.kinds:
                with locked(self.path):
                    self._merge()
                if "png" in self.kinds:
                    self._save_pictures(seeds, self.read(seeds))
                shown = self.read(first)
            else:
                shown = torch.stack([_opened(self._picture(seed)) for seed in first])
            save_grid(shown, self.path / "grid.png")
            for left in [*self.path.glob(f"{ASIDE}*"), *self.png.glob(f"{ASIDE}*")]:  # by a kill
                left.unlink(missing_ok=True)

    def _merge(self) -> None:
        """All parts into samples.npz, by seed; then they are removed. Another job may be adding to the folder."""
        files = self._files()
        if files in ([], [self.archive]):
            return
        stored = [read_npz(file, ["arr_0", "seeds"], REMEDY) for file in files]
        rising, places = np.unique(np.concatenate([part["seeds"] for part in stored]), return_index=True)
        images = np.concatenate([part["arr_0"] for part in stored])[places]
        replace_npz(self.archive, {"arr_0": images, "seeds": rising})
        shutil.rmtree(self.parts)

    def read(self, seeds: Sequence[int]) -> Tensor:
        """The images [N, C, H, W] of ``seeds``, as they are stored in samples.npz."""
        stored = read_npz(self.archive, ["arr_0", "seeds"], REMEDY)
        return torch.from_numpy(stored["arr_0"][np.searchsorted(stored["seeds"], seeds)]).movedim(-1, 1)

    def _files(self) -> list[Path]:
        whole = [self.archive] if self.archive.exists() else []
        return whole + sorted(self.parts.glob("[0-9]*.npz"))

    def _picture(self, seed: int) -> Path:
        return self.png / f"{seed:06d}.png"

    def _save_pictures(self, seeds: Sequence[int], images: Tensor) -> None:
        for seed, image in zip(seeds, as_grey_or_rgb(quantise(images)), strict=True):
            if not self._picture(seed).exists():
                save_png(image.movedim(0, -1), self._picture(seed))

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room or choose another; repeat the command to continue with the images that are there"
        return writing("out", self.path, remedy)


def _opened(file: Path) -> Tensor:
    with Image.open(file) as picture:
        pixels = np.array(picture)
    return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).movedim(-1, 0)
