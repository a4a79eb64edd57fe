"""A folder of samples, one per seed:

job.json       what decides the numbers of a seed; the samples of another job are refused
parts/         finished batches, while the job runs
samples.npz    arr_0 [N, *event, C] in the units of the data, seeds [N], their classes [N], and the digest of the job
grid.png       the first of them
png/, samples.nc, …  the same in other formats (`nidiff.generation.export`)

Every file that is read again carries the digest of its job, and only whole files of this job count as drawn. So the
files are the same on any number of processes, however often the job is killed.
"""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.data.figures import save_samples_figure
from nidiff.data.grid import Grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError, Interrupted, shown
from nidiff.files import (
    as_path,
    blaming,
    is_aside,
    read_npz,
    read_object,
    recover_folder,
    remove_left,
    replace_json,
    replace_npz,
    writing,
)
from nidiff.generation.export import BY_SAMPLE, WHOLE_FILES, Samples, check_format, write_format
from nidiff.generation.job import Job, as_saved, draw_blocks
from nidiff.locks import LOCK, claimed
from nidiff.progress import progress_bar
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import rehearse
from nidiff.sealed import digest, seal, unseal

if TYPE_CHECKING:
    from accelerate import PartialState
    from numpy.typing import NDArray

    from nidiff.generation.loaded_model import SingleProcess

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
    folder.check()  # a folder that is not ours is not even locked
    with claimed(folder.path) if state.is_main_process else contextlib.nullcontext():
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
    job, count = folder.job, len(missing)
    blocks = [missing[i : i + batch] for i in range(0, count, batch)][state.process_index :: state.num_processes]
    prepared = job.prepared(denoiser)  # once, for a sampler may remember what it measured with this network
    drawings = ((job.conditioning.bind(prepared, block), block, job.arguments) for block in blocks)
    with progress_bar(title, "images", shown=state.is_main_process) as progress:

        def show(done: float) -> None:
            progress(min(state.num_processes * done, count), count)  # of all processes

        try:
            for block, images in zip(blocks, draw_blocks(drawings, folder.shape, show), strict=True):
                scaling = denoiser.scaling and denoiser.scaling.at_times(job.times_of(block))
                folder.add(block, as_saved(images, scaling, folder.grid.dtype, job.floats))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped: repeat the command to continue with the images in {folder.path}.") from None


class SampleFolder:
    """The samples [C, *event] = ``shape`` of a job, by seed, at ``path``, and in the format ``kind`` too.

    ``grid`` says what the numbers are; by default they are 8-bit images; ``anomalies`` what they are differences from,
    where the job has no times. The processes of one launch may `add` at once.
    """

    def __init__(
        self,
        path: Path,
        job: Job,
        shape: Sequence[int],
        kind: str = "npz",
        grid: Grid | None = None,
        anomalies: str = "",
    ) -> None:
        self.anomalies = "" if job.times else anomalies
        self.path, self.job, self.shape, self.kind = as_path("out", path), job, tuple(shape), kind
        self.grid = Grid.usual(shape, "uint8") if grid is None else grid
        self.archive, self.parts = self.path / ARCHIVE, self.path / "parts"
        self._folders = [self.path / name for name in (*BY_SAMPLE, WHOLE_FILES["zarr"][0])]
        self._digest = digest(job.to_json())

    def check(self) -> None:
        """Refuse a folder that holds anything but samples of this job; nothing is written."""
        check_format(self.kind, self.grid)
        # Listed before job.json is read: another job may be writing it now, which comes before its other files.
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        others = [name for name in names if name != LOCK and not is_aside(name)]
        links = [part.name for part in (self.parts, *self._folders) if part.is_symlink()]
        is_ours = (self.path / JOB).exists()
        if links or (not is_ours and (others or self.path.is_file())):
            # In a stranger's folder, a link could lead to anybody's pictures.
            problem = f"has a link {links[0]!r}" if links else "is a file, or holds other files"
            raise InputError("out", self.path, problem, "choose an empty or new directory")
        if not is_ours:
            return
        stored, job = read_job(self.path, OTHER_DIRECTORY), self.job.to_json()
        if different := [key for key in {**job, **stored} if stored.get(key) != job.get(key)]:
            words = "; ".join(f"`{key}`: {shown(stored.get(key))}, not {job.get(key)!r}" for key in different)
            raise InputError("out", self.path, f"holds the samples of another job ({words})", OTHER_DIRECTORY)

    def missing(self, seeds: Sequence[int]) -> list[int]:
        """The ``seeds`` that are still to be drawn, rising."""
        return sorted(set(seeds) - {int(seed) for file in archives(self.path) for seed in self._stored(file)["seeds"]})

    def begin(self) -> None:
        with self._writing():
            replace_json(self.path / JOB, seal({"job": self.job.to_json(), "nidiff": __version__}))

    def add(self, seeds: Sequence[int], images: Tensor) -> None:
        """Keep samples [N, C, *event] in the units of the data."""
        with self._writing():
            file = self.parts / f"{seeds[0]}-{len(seeds)}.npz"
            self._store(file, images.movedim(1, -1).numpy(), np.array(seeds, dtype=np.int64))

    def finish(self, seeds: Sequence[int]) -> None:
        """Merge the parts, write ``seeds`` in the other format, and remove what a kill left.

        A file of all samples that is there already is kept up to date.
        """
        with self._writing():
            self._merge()
            images, about = self.read(seeds), {"source": f"nidiff {__version__}", "job": self._digest}
            count = len(self.job.conditioning.classes)
            columns = count if 1 < count <= MOST_COLUMNS else None  # one for each class, if they fit
            save_samples_figure(images[: SHOWN - SHOWN % (columns or 1)], self.grid, self.path / GRID, columns)
            for kind, (name, _) in WHOLE_FILES.items():
                if kind == self.kind or (self.path / name).exists():
                    stored = self._stored(self.archive)
                    data = np.moveaxis(stored["arr_0"], -1, 1)
                    write_format(self._samples(data, stored["seeds"], about), self.path, kind)
            if self.kind in BY_SAMPLE:
                write_format(self._samples(images.numpy(), np.array(seeds), about), self.path, self.kind)
            recover_folder(self.path / WHOLE_FILES["zarr"][0])
            remove_left(self.path, *self._folders)

    def _samples(self, data: "NDArray[Any]", seeds: "NDArray[Any]", about: Mapping[str, str]) -> Samples:
        times = self.job.times_of(seeds.tolist())
        return Samples(data, seeds, self.grid, about, times=times, anomalies=self.anomalies)

    def read(self, seeds: Sequence[int]) -> Tensor:
        """The samples [N, C, *event] of ``seeds``, as they are stored in samples.npz."""
        stored = self._stored(self.archive)
        places = np.searchsorted(stored["seeds"], seeds).clip(max=len(stored["seeds"]) - 1)
        if not np.array_equal(stored["seeds"][places], seeds):
            raise FileError("file", self.archive, "lacks some of the images", REDRAW)
        return torch.from_numpy(stored["arr_0"][places]).movedim(-1, 1)

    def _merge(self) -> None:
        """All parts into samples.npz, by seed; then they are removed."""
        files = archives(self.path)
        if files in ([], [self.archive]):
            return
        stored = [self._stored(file) for file in files]
        rising, places = np.unique(np.concatenate([part["seeds"] for part in stored]), return_index=True)
        self._store(self.archive, np.concatenate([part["arr_0"] for part in stored])[places], rising)
        for part in files:
            if part != self.archive:
                part.unlink()
        remove_left(self.parts)
        with contextlib.suppress(OSError):  # something else is in it
            self.parts.rmdir()

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

    def _writing(self) -> AbstractContextManager[None]:
        return writing("out", self.path, "repeat the command to continue with the images that are there")


def read_job(folder: Path, remedy: str) -> Mapping[str, Any]:
    """The job whose samples are in a folder."""
    file = folder / JOB
    values = unseal(read_object(file, remedy), repr(str(file)), remedy)
    with blaming(file, remedy):
        return dict(values["job"])


def archives(folder: Path) -> list[Path]:
    """The files of samples in a folder."""
    return [path for path in (folder / ARCHIVE, *sorted((folder / "parts").glob("[0-9]*.npz"))) if path.exists()]


def read_archive(file: Path, job: str) -> "dict[str, NDArray[Any]]":
    """The arrays of an npz of samples, if it is of the job with the digest ``job``."""
    stored = read_npz(file, ["arr_0", "seeds", "job"], REDRAW)
    if str(stored["job"]) != job:
        raise FileError("file", file, "holds the images of another job", REDRAW)
    return stored


def check_samples(folder: Path) -> None:
    """Refuse a folder of samples whose files are damaged or of another job."""
    job = digest(read_job(folder, "delete the folder, and draw its images again"))
    for file in archives(folder):
        read_archive(file, job)
