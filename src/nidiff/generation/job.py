"""Many images by their seeds: the same files on any number of processes, however often the job is killed."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nidiff.data.dataset import WHOLE, as_stored
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError, Interrupted
from nidiff.generation.folder import OPTIONAL, SampleFolder
from nidiff.generation.told import classes_text, tell
from nidiff.progress import progress_bar
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import Visit, rehearse, sample
from nidiff.sampling.spacing import FROM_DATA, SPACINGS

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch import Tensor

    from nidiff.generation.opened import Alone


@dataclass(frozen=True)
class Job:
    """All that decides the pixels of a seed."""

    model: str  # its checksum
    sampler: str
    num_steps: int
    spacing: str
    options: dict[str, Any] = field(default_factory=dict)  # the sampler's own, such as eta
    clip: float | None = 1.0  # x̂0 is clipped to [−clip, clip]; None: it is not
    tile: int = 0  # images in one call of the network, whatever the batch; 0: the batch
    floats: bool = False  # keep float32 in [−1, 1] instead of whole numbers
    shape: tuple[int, ...] = ()  # of the event, if it is not the model's own
    classes: tuple[int, ...] = ()  # the class of a seed is classes[seed % len(classes)]; without any, there is none
    guidance: float | None = None  # its scale, if it is not 1
    interval: tuple[float, float] | None = None  # the rows of the schedule between which it is guided; None: all
    condition: str = ""  # the digest of the rows
    rows: Mapping[str, "Tensor"] = field(default_factory=dict, compare=False, repr=False)
    """Conditions [N, …] by name, of which a seed is told row seed % N; not stored."""

    def to_json(self) -> dict[str, Any]:
        """The job as it is stored, and as its digest is made of; what is `OPTIONAL` only if it is there."""
        values = asdict(replace(self, rows={}))
        del values["rows"]
        found = {name: values.pop(name) for name in OPTIONAL}
        given = {name: value for name, value in found.items() if value not in ((), None, "")}
        return values | {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @property
    def told(self) -> dict[str, Any]:
        """What the images are told, as a name and a table say it."""
        found = {
            "classes": classes_text(self.classes),
            "guidance": self.guidance,
            "guidance_interval": "/".join(f"{row:g}" for row in self.interval or ()),
            "condition": self.condition[:8],
        }
        return {key: value for key, value in found.items() if value not in ("", None)}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `nidiff.sample`."""
        spacing = (
            {"spacing": self.spacing} if self.spacing in (*SPACINGS, *FROM_DATA) else {}
        )  # else it is the sampler's own function
        drawing = {"sampler": self.sampler, "num_steps": self.num_steps, "tile": self.tile or None}
        return {**drawing, **spacing, **self.options}


def run_job(
    denoiser: Denoiser,
    folder: SampleFolder,
    seeds: Sequence[int],
    *,
    batch: int,
    state: "PartialState | Alone",
    title: str = "sampling",
) -> None:
    """Draw the images of ``seeds`` that the folder lacks, ``batch`` at a time on each process.

    No other job may write to the folder meanwhile.
    """
    job, shape = folder.job, folder.shape
    batch = check_whole("batch", batch)
    ready = denoiser.clipped(job.clip)
    rehearse(ready, shape, **job.arguments)
    with folder.claimed() if state.is_main_process else contextlib.nullcontext():
        folder.check()
        missing = folder.missing(seeds)
        state.wait_for_everyone()  # all have looked before one writes
        if state.is_main_process:
            folder.begin()
        _draw(ready, folder, missing, batch, state, title)
        state.wait_for_everyone()
        if state.is_main_process:
            folder.finish(seeds)
        state.wait_for_everyone()


def _draw(
    denoiser: Denoiser,
    folder: SampleFolder,
    missing: Sequence[int],
    batch: int,
    state: "PartialState | Alone",
    title: str,
) -> None:
    """This process' share of the images."""
    job = folder.job
    blocks = [missing[i : i + batch] for i in range(0, len(missing), batch)]
    with progress_bar(title, "images", shown=state.is_main_process) as progress:
        try:
            for number, block in enumerate(blocks[state.process_index :: state.num_processes]):

                def advance(at: Visit, before: int = number * batch, size: int = len(block)) -> None:
                    done = state.num_processes * (before + size * at.step / at.num_steps)  # the others are as far
                    progress(min(done, len(missing)), len(missing))

                images = draw_seeds(denoiser, job, block, folder.shape, advance)
                folder.add(block, kept(images, denoiser.scaling, folder.grid.dtype, job.floats))
        except KeyboardInterrupt:
            raise Interrupted(f"stopped: repeat the command to continue with the images in {folder.path}.") from None


def draw_seeds(
    denoiser: Denoiser, job: Job, seeds: Sequence[int], shape: Sequence[int], callback: Callable[[Visit], None]
) -> "Tensor":
    """The images [N, C, *event] of ``seeds`` in the units of the model, all of them finite; ``denoiser`` clips as the
    job says."""
    told = tell(denoiser, job, seeds)
    images = sample(told, (len(seeds), *shape), seeds=seeds, callback=callback, **job.arguments).cpu()
    data = kept(images, denoiser.scaling, "float32")  # an exponential can overflow too
    for seed, *both in zip(seeds, images, data, strict=True):
        if not all(bool(each.isfinite().all()) for each in both):
            problem = f"the image of seed {seed} has NaN or infinite pixels"
            raise InputError(f"{problem}: use more steps, or train the model again.")
    return images


def kept(x: "Tensor", scaling: Scaling | None, dtype: str, floats: bool = False) -> "Tensor":
    """What the model made as it is kept: in the units of the data and the type of its files. With ``floats``, whole
    numbers are not rounded, and their range is [−1, 1]."""
    if not (floats and dtype in WHOLE):
        return as_stored(x, scaling, dtype)
    if scaling in (None, WHOLE[dtype]):
        return x.clamp(-1, 1)
    return WHOLE[dtype].to_model(as_stored(x, scaling, "float32")).clamp(-1, 1)
