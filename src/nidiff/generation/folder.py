"""A folder of samples, an image per seed:

job.json       what decides the pixels of a seed; the samples of another job are refused
parts/         finished batches, while the job runs
samples.npz    arr_0 [N, H, W, C], uint8 or floats in [-1, 1], seeds [N], and the digest of the job
png/           SEED.png; unless there are 1 or 3 channels, they are grey images side by side
grid.png       the first of them

Every file carries the digest of its job, and only whole files of this job count as drawn.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff import __version__
from nidiff.data.dataset import quantise
from nidiff.data.pictures import as_grey_or_rgb, save_grid, save_png
from nidiff.errors import FileError, InputError, one_of, shown
from nidiff.files import ASIDE, as_path, read_npz, read_object, replace_json, replace_npz, writing
from nidiff.locks import LOCK, claimed
from nidiff.sealed import SEAL, digest, seal, unseal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.generation.job import Job

FORMATS = {"npz": {"npz"}, "png": {"png"}, "both": {"npz", "png"}}
JOB, ARCHIVE = "job.json", "samples.npz"
SHOWN = 64  # in grid.png
REMEDY = "delete it, so that its images are drawn again"


class SampleFolder:
    """The images [C, H, W] = ``shape`` of a job, by seed, at ``path``; ``kind`` is a name in `FORMATS`.

    The processes of one launch may `add` at once.
    """

    def __init__(self, path: Path, job: "Job", shape: Sequence[int], kind: str = "npz") -> None:
        self.path, self.job, self.shape = as_path("out", path), job, tuple(shape)
        self.kinds = FORMATS[one_of("format", kind, FORMATS)]
        self.archive, self.parts, self.png = self.path / ARCHIVE, self.path / "parts", self.path / "png"
        self._digest = digest(asdict(job))

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep the folder for this job; another job is told who has it."""
        self.check()  # a folder that is not ours is not even locked
        with claimed(self.path):
            yield

    def check(self) -> None:
        """Refuse a folder that holds anything but samples of this job; nothing is written."""
        out, again = f"out={str(self.path)!r}", "choose another directory, or delete that one"
        if self.job.floats and "npz" not in self.kinds:
            raise InputError("floats cannot be kept as png: use the format npz or both.")
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{out} is a file: choose another directory.")
        for part in (self.parts, self.png):
            if part.is_symlink():  # of a stranger's folder, it could lead to anybody's pictures
                raise InputError(f"{out} has a link {part.name!r}, which could lead to other files: {again}.")
        # Listed before job.json is read: another job may be writing it now, which comes before its other files.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        if not (self.path / JOB).exists():
            if any(name != LOCK and not name.startswith(ASIDE) for name in names):
                raise InputError(f"{out} holds other files: choose an empty or new directory.")
            return
        found, mine = read_job(self.path, again), asdict(self.job)
        different = "; ".join(
            f"{key}: {shown(found.get(key))}, not {mine[key]!r}" for key in mine if found.get(key) != mine[key]
        )
        if different:
            raise InputError(f"{out} holds the samples of another job ({different}): {again}.")

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The ``seeds`` that are still to be drawn, rising."""
        if "npz" in self.kinds:
            have = {int(seed) for file in self._files() for seed in self._stored(file)["seeds"]}
        else:
            have = {seed for seed in seeds if self._picture(seed) is not None}
        return sorted(set(seeds) - have)

    def begin(self) -> None:
        with self._writing():
            replace_json(self.path / JOB, seal({"job": asdict(self.job), "nidiff": __version__}))

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Keep images [N, C, H, W], uint8 or floats."""
        with self._writing():
            if "npz" in self.kinds:
                file = self.parts / f"{seeds[0]}-{len(seeds)}.npz"
                self._store(file, images.movedim(1, -1).numpy(), np.array(seeds, dtype=np.int64))
            else:
                self._save_pictures(seeds, images)

    def finish(self, seeds: Sequence[int]) -> None:
        """Merge the parts, write the pictures of ``seeds``, and remove what is no longer needed."""
        with self._writing():
            if "npz" in self.kinds:
                self._merge()
                images = self.read(seeds)
                if "png" in self.kinds:
                    self._save_pictures(seeds, images)
                shown = images[:SHOWN]
            else:
                pictures = [self._picture(seed) for seed in seeds[:SHOWN]]
                shown = torch.stack([picture for picture in pictures if picture is not None])
            save_grid(shown, self.path / "grid.png")
            for left in [*self.path.glob(f"{ASIDE}*"), *self.png.glob(f"{ASIDE}*")]:  # by a kill
                left.unlink(missing_ok=True)

    def read(self, seeds: Sequence[int]) -> Tensor:
        """The images [N, C, H, W] of ``seeds``, as they are stored in samples.npz."""
        stored = self._stored(self.archive)
        places = np.searchsorted(stored["seeds"], seeds).clip(max=len(stored["seeds"]) - 1)
        if not np.array_equal(stored["seeds"][places], seeds):
            raise FileError(f"{str(self.archive)!r} lacks some of the images: {REMEDY}.")
        return torch.from_numpy(stored["arr_0"][places]).movedim(-1, 1)

    def _merge(self) -> None:
        """All parts into samples.npz, by seed; then they are removed."""
        files = self._files()
        if files in ([], [self.archive]):
            return
        stored = [self._stored(file) for file in files]
        rising, places = np.unique(np.concatenate([part["seeds"] for part in stored]), return_index=True)
        self._store(self.archive, np.concatenate([part["arr_0"] for part in stored])[places], rising)
        shutil.rmtree(self.parts)

    def _files(self) -> list[Path]:
        whole = [self.archive] if self.archive.exists() else []
        return whole + sorted(self.parts.glob("[0-9]*.npz"))

    def _store(self, file: Path, images: "NDArray[Any]", seeds: "NDArray[Any]") -> None:
        replace_npz(file, {"arr_0": images, "seeds": seeds, "job": np.array(self._digest)})

    def _stored(self, file: Path) -> "dict[str, NDArray[Any]]":
        """What a file holds, if it is of this job; version 0.1 wrote no digest."""
        found = read_npz(file, ["arr_0", "seeds"], REMEDY, optional=["job"])
        images, seeds = found["arr_0"], found["seeds"]
        expected = (len(seeds) if seeds.ndim else 0, *self.shape[1:], self.shape[0])
        kind = np.dtype(np.float32 if self.job.floats else np.uint8)
        if seeds.dtype != np.int64 or seeds.ndim != 1 or (np.diff(seeds) <= 0).any() or not len(seeds):
            raise FileError(f"{str(file)!r} does not hold rising seeds: {REMEDY}.")
        if images.dtype != kind or images.shape != expected:
            wrong = f"images {images.dtype} {images.shape}, not {kind} {expected}"
            raise FileError(f"{str(file)!r} holds {wrong}: {REMEDY}.")
        if str(found.get("job", self._digest)) != self._digest:
            raise FileError(f"{str(file)!r} holds the images of another job: {REMEDY}.")
        return found

    def _picture_file(self, seed: int) -> Path:
        return self.png / f"{seed:06d}.png"

    def _picture(self, seed: int) -> Tensor | None:
        """The pixels [C, H, W] of a picture that is whole and of this job, else None."""
        like = as_grey_or_rgb(torch.empty(1, *self.shape, device="meta"))[0]
        mode, size = "RGB" if len(like) == 3 else "L", (like.shape[2], like.shape[1])
        try:
            for step in (
                Image.Image.verify,
                Image.Image.load,
            ):  # check the checksums, then decode: each needs the file anew
                with Image.open(self._picture_file(seed), formats=["PNG"]) as picture:
                    if (picture.mode, picture.size) != (mode, size):
                        return None
                    step(picture)
                    if step is Image.Image.load:
                        pixels, text = np.array(picture), dict(picture.info)
        except Exception:  # Pillow raises nearly anything when a file is broken
            return None
        mine = self._about(seed)
        if any(text.get(key, words) != words for key, words in mine.items()):
            return None
        return torch.from_numpy(pixels.reshape(*pixels.shape[:2], -1)).movedim(-1, 0)

    def _save_pictures(self, seeds: Sequence[int], images: Tensor) -> None:
        for seed, image in zip(seeds, as_grey_or_rgb(quantise(images)), strict=True):
            known = self._picture(seed)
            if known is None or not torch.equal(known, image):
                save_png(image.movedim(0, -1), self._picture_file(seed), self._about(seed))

    def _about(self, seed: int) -> dict[str, str]:
        return {"job": self._digest, "seed": str(seed)}

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room or choose another; repeat the command to continue with the images that are there"
        return writing("out", self.path, remedy)


def read_job(folder: Path, remedy: str) -> Mapping[str, Any]:
    """The job whose samples are in a folder."""
    file = folder / JOB
    values = read_object(file, remedy)
    values = unseal(values, repr(str(file)), remedy) if SEAL in values else values  # version 0.1 sealed nothing
    if not (values.keys() == {"job", "nidiff"} and isinstance(values["job"], dict)):
        raise FileError(f"{str(file)!r} is damaged: {remedy}.")
    job = dict(values["job"])
    if "steps" in job:  # what version 0.1 called it
        job["num_steps"] = job.pop("steps")
    return job


def check_samples(folder: Path) -> None:
    """Refuse a folder of samples whose files are damaged or of another job."""
    job = read_job(folder, "delete the folder, and draw its images again")
    for file in [folder / ARCHIVE, *sorted((folder / "parts").glob("[0-9]*.npz"))]:
        if file.exists():
            found = read_npz(file, ["arr_0", "seeds"], REMEDY, optional=["job"])
            if str(found.get("job", digest(job))) != digest(job):
                raise FileError(f"{str(file)!r} holds the images of another job: {REMEDY}.")
