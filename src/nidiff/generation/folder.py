"""A folder of samples, one per seed:

job.json       what decides the numbers of a seed; the samples of another job are refused
parts/         finished batches, while the job runs
samples.npz    arr_0 [N, *event, C] in the units of the data, seeds [N], their classes [N], and the digest of the job
png/           SEED.png: pictures themselves (unless there are 1 or 3 channels, in grey side by side), others drawn
grid.png       the first of them
samples.npy, samples.nc, samples.zarr, wav/, gif/  the same in other formats (`nidiff.generation.export`)

Every file that is read again carries the digest of its job, and only whole files of this job count as drawn.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from nidiff import __version__
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.figures import samples_figure, save_drawn, save_samples_figure
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, save_png
from nidiff.errors import FileError, InputError, one_of, shown
from nidiff.extras import require
from nidiff.files import (
    ASIDE,
    as_path,
    read_npz,
    read_object,
    recover_folder,
    replace_json,
    replace_npz,
    writing,
)
from nidiff.generation.export import BY_SEED, WHOLE_FILES, Samples, check_export
from nidiff.locks import LOCK, claimed
from nidiff.sealed import SEAL, digest, seal, unseal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.generation.job import Job

FORMATS = {"npz": {"npz"}, "png": {"png"}, "both": {"npz", "png"}} | {
    kind: {"npz", kind} for kind in (*WHOLE_FILES, *BY_SEED)
}
JOB, ARCHIVE, GRID = "job.json", "samples.npz", "grid.png"
SHOWN = 64  # in grid.png
MOST_COLUMNS = 16  # there
OPTIONAL = ("shape", "classes", "guidance", "interval", "condition")  # of a job: stored only where they are set
REMEDY = "delete it, so that its images are drawn again"


class SampleFolder:
    """The samples [C, *event] = ``shape`` of a job, by seed, at ``path``; ``kind`` is a name in `FORMATS`.

    ``grid`` says what the numbers are; by default they are 8-bit images. The processes of one launch may `add` at once.
    """

    def __init__(
        self, path: Path, job: "Job", shape: Sequence[int], kind: str = "npz", grid: Grid | None = None
    ) -> None:
        self.path, self.job, self.shape = as_path("out", path), job, tuple(shape)
        self.grid = Grid.usual(shape, "uint8") if grid is None else grid
        self.kinds = FORMATS[one_of("format", kind, FORMATS)]
        if self.grid.kind != "picture":
            self.kinds = self.kinds | {"npz"}  # a figure cannot be read again
        self.archive, self.parts, self.png = self.path / ARCHIVE, self.path / "parts", self.path / "png"
        self._digest = digest(job.to_json())

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
        for kind in self.kinds:
            check_export(kind, self.grid)
        if "png" in self.kinds and self.grid.kind != "picture":
            require("matplotlib")
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{out} is a file: choose another directory.")
        for part in (self.parts, *self._folders()):
            if part.is_symlink():  # of a stranger's folder, it could lead to anybody's pictures
                raise InputError(f"{out} has a link {part.name!r}, which could lead to other files: {again}.")
        # Listed before job.json is read: another job may be writing it now, which comes before its other files.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        if not (self.path / JOB).exists():
            if any(name != LOCK and not name.startswith(ASIDE) for name in names):
                raise InputError(f"{out} holds other files: choose an empty or new directory.")
            return
        found, mine = read_job(self.path, again), self.job.to_json()
        keys = [*mine, *(key for key in OPTIONAL if key in found.keys() - mine.keys())]
        different = "; ".join(
            f"{key}: {shown(found.get(key))}, not {mine.get(key)!r}" for key in keys if found.get(key) != mine.get(key)
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
            replace_json(self.path / JOB, seal({"job": self.job.to_json(), "nidiff": __version__}))

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Keep samples [N, C, *event] in the units of the data."""
        with self._writing():
            if "npz" in self.kinds:
                file = self.parts / f"{seeds[0]}-{len(seeds)}.npz"
                self._store(file, images.movedim(1, -1).numpy(), np.array(seeds, dtype=np.int64))
            else:
                self._save_pictures(seeds, images)

    def finish(self, seeds: Sequence[int]) -> None:
        """Merge the parts, write the pictures and other files of ``seeds``, and remove what is no longer needed."""
        with self._writing():
            if "npz" in self.kinds:
                self._merge()
                images = self.read(seeds)
                if "png" in self.kinds:
                    self._save_pictures(seeds, images)
                shown = images[: self._shown]
            else:
                pictures = [self._picture(seed) for seed in seeds[: self._shown]]
                shown = torch.stack([picture for picture in pictures if picture is not None])
            save_samples_figure(shown, self.grid, self.path / GRID, self._columns)
            self._export(seeds)
            self._clean()

    @property
    def _columns(self) -> int | None:
        """Of grid.png: one for each class, if they fit."""
        return len(self.job.classes) if 1 < len(self.job.classes) <= MOST_COLUMNS else None

    @property
    def _shown(self) -> int:
        return SHOWN - SHOWN % (self._columns or 1)

    def _export(self, seeds: Sequence[int]) -> None:
        """The samples in the other formats that are asked for. A file of all samples that is there already is kept up
        to date."""
        about = {"source": f"nidiff {__version__}", "job": self._digest}
        for kind, (name, write) in WHOLE_FILES.items():
            if kind in self.kinds or (self.path / name).exists():
                stored = self._stored(self.archive)
                write(Samples(np.moveaxis(stored["arr_0"], -1, 1), stored["seeds"], self.grid, about), self.path / name)
        for kind, write in BY_SEED.items():
            if kind in self.kinds:
                write(Samples(self.read(seeds).numpy(), np.array(seeds), self.grid, about), self.path / kind)

    def _clean(self) -> None:
        """Remove what a kill left."""
        recover_folder(self.path / WHOLE_FILES["zarr"][0])
        for folder in (self.path, *self._folders()):
            for left in folder.glob(f"{ASIDE}*"):
                left.unlink(missing_ok=True)

    def _folders(self) -> list[Path]:
        return [self.png, *(self.path / kind for kind in BY_SEED), self.path / WHOLE_FILES["zarr"][0]]

    def read(self, seeds: Sequence[int]) -> Tensor:
        """The samples [N, C, *event] of ``seeds``, as they are stored in samples.npz."""
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
        classes = np.array(self.job.classes, dtype=np.int64)
        told = {"classes": classes[seeds % len(classes)]} if len(classes) else {}
        replace_npz(file, {"arr_0": images, "seeds": seeds, **told, "job": np.array(self._digest)})

    def _stored(self, file: Path) -> "dict[str, NDArray[Any]]":
        """What a file holds, if it is of this job; version 0.1 wrote no digest."""
        found = read_npz(file, ["arr_0", "seeds"], REMEDY, optional=["job"])
        images, seeds = found["arr_0"], found["seeds"]
        expected = (len(seeds) if seeds.ndim else 0, *self.shape[1:], self.shape[0])
        kind = np.dtype(np.float32 if self.job.floats else self.grid.dtype)
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
        dtype = getattr(torch, self.grid.dtype)
        like = as_grey_or_rgb(torch.empty(1, *self.shape, device="meta", dtype=dtype))[0]
        mode = "RGB" if len(like) == 3 else "I;16" if dtype == torch.uint16 else "L"
        size = (like.shape[2], like.shape[1])
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
        if self.grid.kind != "picture":
            self._save_figures(seeds, images)
            return
        dtype = self.grid.dtype
        pixels = as_stored(images, WHOLE[dtype], dtype) if self.job.floats else images
        for seed, image in zip(seeds, as_grey_or_rgb(pixels), strict=True):
            known = self._picture(seed)
            if known is None or not torch.equal(known, image):
                save_png(image.movedim(0, -1), self._picture_file(seed), self._about(seed))

    def _save_figures(self, seeds: Sequence[int], images: Tensor) -> None:
        for seed, image in zip(seeds, images, strict=True):
            if not self._is_figure(seed):
                save_drawn(samples_figure(image[None], self.grid), self._picture_file(seed), self._about(seed))

    def _is_figure(self, seed: int) -> bool:
        """Whether the figure of a seed is there, whole and of this job."""
        try:
            with Image.open(self._picture_file(seed), formats=["PNG"]) as picture:
                picture.verify()
                return self._about(seed).items() <= picture.info.items()
        except Exception:  # Pillow raises nearly anything when a file is broken
            return False

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
