"""A folder of samples, one per seed:

job.json       what decides the numbers of a seed; the samples of another job are refused
parts/         finished batches, while the job runs
samples.npz    arr_0 [N, *event, C] in the units of the data, seeds [N], their classes [N], and the digest of the job
png/           SEED.png: pictures themselves (unless there are 1 or 3 channels, in grey side by side), others drawn
grid.png       the first of them
samples.npy, samples.nc, samples.zarr, wav/, gif/  the same in other formats (`nidiff.generation.export`)

Every file that is read again carries the digest of its job, and only whole files of this job count as drawn. So the
files are the same on any number of processes, however often the job is killed.
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
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError, Interrupted, one_of, shown
from nidiff.extras import require
from nidiff.files import ASIDE, as_path, read_npz, read_object, recover_folder, replace_json, replace_npz, writing
from nidiff.generation.export import BY_SEED, WHOLE_FILES, Samples, check_export
from nidiff.generation.job import Job, as_saved, draw_seeds
from nidiff.locks import LOCK, claimed
from nidiff.progress import progress_bar
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import rehearse
from nidiff.sampling.step import Visit
from nidiff.sealed import digest, seal, unseal

if TYPE_CHECKING:
    from accelerate import PartialState
    from numpy.typing import NDArray

    from nidiff.generation.loaded_model import SingleProcess

FORMATS = {"npz": {"npz"}, "png": {"png"}, "both": {"npz", "png"}} | {
    kind: {"npz", kind} for kind in (*WHOLE_FILES, *BY_SEED)
}
JOB, ARCHIVE, GRID = "job.json", "samples.npz", "grid.png"
SHOWN, MOST_COLUMNS = 64, 16  # samples and columns of grid.png
REDRAW = "delete it, so that its images are drawn again"
OTHER_DIRECTORY = "choose another directory, or delete that one"


def run_job(
    denoiser: Denoiser,
    folder: "SampleFolder",
    seeds: Sequence[int],
    *,
    batch: int,
    state: "PartialState | SingleProcess",
    title: str = "sampling",
) -> None:
    """Draw the images of ``seeds`` that the folder lacks, ``batch`` at a time on each process.

    No other job may write to the folder meanwhile.
    """
    batch = check_whole("batch", batch)
    rehearse(denoiser.clipped(folder.job.clip), folder.shape, **folder.job.arguments)
    with folder.claimed() if state.is_main_process else contextlib.nullcontext():
        folder.check()
        missing = folder.missing(seeds)
        state.wait_for_everyone()  # all have looked before one writes
        if state.is_main_process:
            folder.begin()
        _draw(denoiser, folder, missing, batch, state, title)
        state.wait_for_everyone()
        if state.is_main_process:
            folder.finish(seeds)
        state.wait_for_everyone()


def _draw(
    denoiser: Denoiser,
    folder: "SampleFolder",
    missing: Sequence[int],
    batch: int,
    state: "PartialState | SingleProcess",
    title: str,
) -> None:
    """This process' share of the images."""
    job = folder.job
    blocks = [missing[i : i + batch] for i in range(0, len(missing), batch)]
    with progress_bar(title, "images", shown=state.is_main_process) as progress:
        try:
            for number, block in enumerate(blocks[state.process_index :: state.num_processes]):

                def advance(visit: Visit, before: int = number * batch, size: int = len(block)) -> None:
                    done = state.num_processes * (before + size * visit.step / visit.num_steps)  # of all processes
                    progress(min(done, len(missing)), len(missing))

                images = draw_seeds(denoiser, job, block, folder.shape, advance)
                folder.add(block, as_saved(images, denoiser.scaling, folder.grid.dtype, job.floats))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped: repeat the command to continue with the images in {folder.path}.") from None


class SampleFolder:
    """The samples [C, *event] = ``shape`` of a job, by seed, at ``path``; ``kind`` is a name in `FORMATS`.

    ``grid`` says what the numbers are; by default they are 8-bit images. The processes of one launch may `add` at once.
    """

    def __init__(self, path: Path, job: Job, shape: Sequence[int], kind: str = "npz", grid: Grid | None = None) -> None:
        self.path, self.job, self.shape = as_path("out", path), job, tuple(shape)
        self.grid = Grid.usual(shape, "uint8") if grid is None else grid
        self.kinds = FORMATS[one_of("format", kind, FORMATS)]
        if self.grid.kind != "picture":
            self.kinds = self.kinds | {"npz"}  # a figure cannot be read again
        self.archive, self.parts, self.png = self.path / ARCHIVE, self.path / "parts", self.path / "png"
        self._digest = digest(job.to_json())

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder for this job; another job is refused, with the process that has it."""
        self.check()  # a folder that is not ours is not even locked
        with claimed(self.path):
            yield

    def check(self) -> None:
        """Refuse a folder that holds anything but samples of this job; nothing is written."""
        if self.job.floats and "npz" not in self.kinds:
            raise InputError("floats", None, "cannot be written as png", "use the `format` npz or both")
        for kind in self.kinds:
            check_export(kind, self.grid)
        if "png" in self.kinds and self.grid.kind != "picture":
            require("matplotlib")
        for part in (self.parts, *self._folders()):
            if part.is_symlink():  # of a stranger's folder, it could lead to anybody's pictures
                problem = f"has a link {part.name!r}, which could lead to other files"
                raise InputError("out", self.path, problem, OTHER_DIRECTORY)
        # Listed before job.json is read: another job may be writing it now, which comes before its other files.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        if not (self.path / JOB).exists():
            is_file = self.path.exists() and not self.path.is_dir()
            if is_file or any(name != LOCK and not name.startswith(ASIDE) for name in names):
                raise InputError(
                    "out", self.path, "is a file, or holds other files", "choose an empty or new directory"
                )
            return
        stored, job = read_job(self.path, OTHER_DIRECTORY), self.job.to_json()
        if different := [key for key in {**job, **stored} if stored.get(key) != job.get(key)]:
            words = "; ".join(f"`{key}`: {shown(stored.get(key))}, not {job.get(key)!r}" for key in different)
            raise InputError("out", self.path, f"holds the samples of another job ({words})", OTHER_DIRECTORY)

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
        """The columns of grid.png: one for each class, if they fit."""
        count = len(self.job.conditioning.classes)
        return count if 1 < count <= MOST_COLUMNS else None

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
            raise FileError("file", self.archive, "lacks some of the images", REDRAW)
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
        numbers = np.array(self.job.conditioning.classes, dtype=np.int64)
        classes = {"classes": numbers[seeds % len(numbers)]} if len(numbers) else {}
        replace_npz(file, {"arr_0": images, "seeds": seeds, **classes, "job": np.array(self._digest)})

    def _stored(self, file: Path) -> "dict[str, NDArray[Any]]":
        """The arrays of a file, if it is of this job."""
        stored = read_archive(file, self._digest)
        images, seeds = stored["arr_0"], stored["seeds"]
        expected = (len(seeds) if seeds.ndim else 0, *self.shape[1:], self.shape[0])
        kind = np.dtype(np.float32 if self.job.floats else self.grid.dtype)
        rising = seeds.dtype == np.int64 and seeds.ndim == 1 and len(seeds) and (np.diff(seeds) > 0).all()
        if not rising or images.dtype != kind or images.shape != expected:
            problem = f"holds images {images.dtype} {images.shape}, not {kind} {expected} of rising seeds"
            raise FileError("file", file, problem, REDRAW)
        return stored

    def _png_file(self, seed: int) -> Path:
        return self.png / f"{seed:06d}.png"

    def _is_png(self, seed: int) -> bool:
        """Whether the PNG of a seed is there, whole and of this job."""
        try:
            with Image.open(self._png_file(seed), formats=["PNG"]) as picture:
                picture.verify()  # the checksums
                return self._about(seed).items() <= picture.info.items()
        except Exception:  # Pillow raises nearly anything when a file is broken
            return False

    def _picture(self, seed: int) -> Tensor | None:
        """The pixels [C, H, W] of a picture that is whole and of this job, else None."""
        dtype = getattr(torch, self.grid.dtype)
        like = as_grey_or_rgb(torch.empty(1, *self.shape, device="meta", dtype=dtype))[0]
        mode = "RGB" if len(like) == 3 else "I;16" if dtype == torch.uint16 else "L"
        try:
            with Image.open(self._png_file(seed), formats=["PNG"]) as picture:
                if (picture.mode, picture.size) != (mode, (like.shape[2], like.shape[1])) or not self._is_png(seed):
                    return None
                pixels = np.array(picture)
        except Exception:  # Pillow raises nearly anything when a file is broken
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
                save_png(image.movedim(0, -1), self._png_file(seed), self._about(seed))

    def _save_figures(self, seeds: Sequence[int], images: Tensor) -> None:
        for seed, image in zip(seeds, images, strict=True):
            if not self._is_png(seed):
                save_drawn(samples_figure(image[None], self.grid), self._png_file(seed), self._about(seed))

    def _about(self, seed: int) -> dict[str, str]:
        return {"job": self._digest, "seed": str(seed)}

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "make room or choose another; repeat the command to continue with the images that are there"
        return writing("out", self.path, remedy)


def read_job(folder: Path, remedy: str) -> Mapping[str, Any]:
    """The job whose samples are in a folder."""
    file = folder / JOB
    values = unseal(read_object(file, remedy), repr(str(file)), remedy)
    if not (values.keys() == {"job", "nidiff"} and isinstance(values["job"], dict)):
        raise FileError("file", file, "is damaged", remedy)
    return dict(values["job"])


def read_archive(file: Path, job: str) -> "dict[str, NDArray[Any]]":
    """The arrays of an npz of samples, if it is of the job with the digest ``job``."""
    stored = read_npz(file, ["arr_0", "seeds", "job"], REDRAW)
    if str(stored["job"]) != job:
        raise FileError("file", file, "holds the images of another job", REDRAW)
    return stored


def check_samples(folder: Path) -> None:
    """Refuse a folder of samples whose files are damaged or of another job."""
    job = digest(read_job(folder, "delete the folder, and draw its images again"))
    for file in [folder / ARCHIVE, *sorted((folder / "parts").glob("[0-9]*.npz"))]:
        if file.exists():
            read_archive(file, job)
