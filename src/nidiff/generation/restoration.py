"""Samples of what observed items were, and the folder that they are written to:

restoration.json  what decides the numbers; at the end what was measured, and the checksums of the other files
samples.npz       arr_0 [N, samples, *event, C] in the units of the data, and seeds [N, samples]
mean.npy          [N, *event, C], the mean of the samples before rounding
spread.npy        their standard deviation
observed.npy      [N, …, C], what was observed; NaN where nothing was
png/              pictures: ITEM-SEED.png, and ITEM-mean.png
samples.nc, …     all samples in other formats (`nidiff.generation.export`), one after the other but in NetCDF and Zarr,
                  which have the axis of the items and then that of the samples
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nidiff import __version__
from nidiff.data.dataset import WHOLE, as_stored
from nidiff.data.grid import Grid
from nidiff.data.pictures import as_grey_or_rgb, save_png
from nidiff.data.split import ITEM
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, shown
from nidiff.files import blaming, file_sha256, is_aside, read_object, remove_left, replace_json, replace_npz, replacing
from nidiff.generation.export import BY_SAMPLE, WHOLE_FILES, Samples, write_format
from nidiff.generation.job import Drawing, Job, draw_blocks, plan_job
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import VARIATION, observed_data, seeded, to_model
from nidiff.inverse.observation import Observation
from nidiff.inverse.posterior import posterior
from nidiff.inverse.scores import covered, crps, interval
from nidiff.locks import LOCK
from nidiff.progress import progress_bar
from nidiff.sampling.step import Visit
from nidiff.sampling.tile import tile_size
from nidiff.sealed import check_files, digest, read_sealed, seal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.data.dataset import Along

NUM_STEPS, MOST_TILE = 50, 8  # the defaults: an item has few samples
INTERVAL = 0.9  # whose coverage is measured, or the nearest that so few samples have
FACTS, FORMAT = "restoration.json", 1
ARRAYS = ("mean", "spread", "observed")
PICTURE = "restored.png"
OURS = ("samples.npz", *(f"{name}.npy" for name in ARRAYS), PICTURE, *BY_SAMPLE, *(n for n, _ in WHOLE_FILES.values()))
AGAIN = "delete the directory, and repeat the command that wrote it"
OTHER_DIRECTORY = "choose another directory, or delete that one"


@dataclass(frozen=True, eq=False)
class Restoration:
    """Samples ``x`` [N, S, C, *event] in the units of the model, by seed [N, S], and what was ``observed`` [N, C, …] in
    the units of the data, NaN where nothing was."""

    x: Tensor
    seeds: "NDArray[np.int64]"
    observed: Tensor
    grid: Grid
    scaling: Scaling | None
    truth: Tensor | None = None
    """[N, C, *event] in the units of the data, where it is known."""
    hidden: Tensor | None = None
    """Where errors are measured, of the shape of the truth; None, or nowhere: everywhere."""
    label: str = "observed"
    """The name of ``observed`` in a figure."""
    bicubic: Tensor | None = None
    """What interpolation makes of means over blocks, of the shape of the truth: the error to beat."""

    @classmethod
    def of(
        cls, model: Model, observation: Observation, x: Tensor, seeds: "NDArray[np.int64]", truth: Tensor | None = None
    ) -> "Restoration":
        """The restoration by samples ``x`` of the posterior."""
        mask = observation.operator.observed if observation.operator.is_mask else None
        hidden = None if mask is None else ~mask.expand(observation.y.shape)
        observed = observed_data(model, observation)
        return cls(x, seeds, observed, model.grid, model.scaling, truth, hidden)

    @property
    def samples(self) -> Tensor:
        """[N, S, C, *event] in the units of the data, not rounded."""
        return self.stored(self.grid.floats)

    def stored(self, dtype: str) -> Tensor:
        """The same in the type of a file."""
        scaling = None if self.scaling is None else self.scaling.repeated(self.x.shape[1])
        return as_stored(self.x.flatten(0, 1), scaling, dtype).reshape(self.x.shape)

    @property
    def mean(self) -> Tensor:
        samples = self.samples
        return samples.double().mean(1).to(samples.dtype)

    @property
    def spread(self) -> Tensor:
        """The standard deviation of the samples; 0 of a single one."""
        return self.samples.double().std(1, correction=min(1, self.x.shape[1] - 1)).float()

    @property
    def same(self) -> bool:
        """Whether every item has the same sample again and again."""
        return self.x.shape[1] > 1 and bool((self.x == self.x[:, :1]).all())

    def errors(self) -> dict[str, Any]:
        """Root mean square errors of the mean, of a sample and of `bicubic`, where nothing was observed, the continuous
        ranked probability score, and the share of the true values that lie in the `interval` of the samples nearest to
        90 %. Channels with units of their own are measured in those of the model. Whole numbers may be half a step
        beyond the ends of the interval.
        """
        if self.truth is None:
            return {}
        truth, count = self.truth.double(), self.x.shape[1]
        where = torch.ones_like(truth, dtype=torch.bool)
        if self.hidden is not None and bool(self.hidden.any()):
            where = self.hidden
        if self.scaling is not None and self.scaling.domain is not None:
            where = where & self.scaling.domain
        samples, units = self.samples.double(), "data"
        if self.scaling is not None and not isinstance(self.scaling.scale, int | float) and len(self.scaling.scale) > 1:
            samples, truth, units = self.x.double(), self.scaling.to_model(truth), "model"
        of_mean, of_samples = samples.mean(1) - truth, (samples - truth[:, None]).movedim(1, 0)[:, where]
        errors = {"rmse_of_mean": of_mean[where], "rmse_of_sample": of_samples}
        if self.bicubic is not None:
            simple = self.bicubic if units == "data" or self.scaling is None else self.scaling.to_model(self.bicubic)
            errors["rmse_of_bicubic"] = (simple - truth)[where]
        measured = {"units": units, **{name: error.square().mean().sqrt().item() for name, error in errors.items()}}
        if count > 1:
            ensemble, margin = samples.movedim(1, 0), 0.5 if self.grid.dtype in WHOLE else 0.0
            inside = covered(ensemble, truth, INTERVAL, margin)[where].double().mean().item()
            measured |= {"crps": crps(ensemble, truth)[where].mean().item()}
            measured |= {"coverage": inside, "interval": interval(count, INTERVAL)[1]}
        return measured


def restoration_job(
    model: Model,
    sampler: str | None = None,
    num_steps: int | None = None,
    *,
    tile: int | None = None,
    classes: Sequence[int] = (),
    **options: Any,
) -> Job:
    """The job that samples items given an observation or their noisy version, by default with 50 ancestral steps.
    ``classes`` has the class of all items, or none; ``options`` are those of `plan_job`."""
    if sampler is None:
        sampler = f"ancestral:variance={'beta' if model.denoiser.gaussian is None else 'gaussian'}"
    tile = min(tile_size(*model.shape[1:]), MOST_TILE) if tile is None else tile
    steps = min(NUM_STEPS, len(model.denoiser.process.schedule)) if num_steps is None else num_steps
    job = plan_job(model, sampler, steps, tile=tile, classes=classes, **options)
    if "start" in job.options:
        raise InputError("sampler", sampler, "says where sampling starts, and so does the data", "leave `start` out")
    return job


def restore(
    model: Model,
    job: Job,
    observation: Observation,
    *,
    method: str | None = None,
    truth: Tensor | None = None,
    **drawing: Any,
) -> Restoration:
    """Samples of each item given its observation; ``method`` is that of `nidiff.posterior`, ``truth`` has the items
    themselves, where they are known, and ``drawing`` are ``samples``, ``seed``, ``batch`` and ``watch``."""
    denoisers = _denoisers(model, job)

    def prepare(item: int, seeds: list[int]) -> Drawing:
        return posterior(denoisers(item), observation.for_images(torch.tensor([item])), method), seeds, {}

    x, seeds = _draw(model, job, len(observation.y), prepare, title="restoring", **drawing)
    return Restoration.of(model, observation, x, seeds, truth)


def denoise(
    model: Model, job: Job, items: Tensor, level: Level, *, add_noise: bool = False, **drawing: Any
) -> Restoration:
    """Samples of what ``items`` [N, C, *event], in the units of the data, were without the noise of ``level``; with
    ``add_noise`` they are clean, and each sample begins with another noise."""
    denoisers, y = _denoisers(model, job), to_model(items, model)

    def prepare(item: int, seeds: list[int]) -> Drawing:
        denoiser = denoisers(item)
        start = y[item].expand(len(seeds), *model.shape)
        if add_noise:
            sources = [seeded(seed, VARIATION) for seed in seeds]
            noise = denoiser.process.noise(tuple(start.shape), sources, device=y.device)
            start = start + level.sigma / level.signal * noise
        return denoiser, seeds, {"start": start, "level": level}

    x, seeds = _draw(model, job, len(items), prepare, title="denoising", **drawing)
    label = "given" if add_noise else "observed"
    return Restoration(x, seeds, items.double(), model.grid, model.scaling, label=label)


def _denoisers(model: Model, job: Job) -> Callable[[int], Denoiser]:
    """The denoiser of each item, given its own row of the conditions, such as its month."""
    prepared, conditioning = job.prepared(model.denoiser), job.conditioning
    bound = cache(lambda item: conditioning.bind(prepared, [item]))
    return lambda item: bound(item if conditioning.rows else 0)


def item_seeds(items: int, samples: int, seed: int = 0) -> "NDArray[np.int64]":
    """The seeds [items, samples] of the samples of each item, all different."""
    return np.arange(seed, seed + items * samples).reshape(items, samples)


def _draw(
    model: Model,
    job: Job,
    items: int,
    prepare: Callable[[int, list[int]], Drawing],
    *,
    title: str,
    samples: int,
    seed: int = 0,
    batch: int = 64,
    watch: Callable[[Visit], None] | None = None,
) -> tuple[Tensor, "NDArray[np.int64]"]:
    """Samples [items, S, C, *event] in the units of the model, and their seeds [items, S].

    ``watch`` is called at each level, and then shows the progress instead of a bar.
    """
    seeds = item_seeds(items, samples, seed)
    blocks = [
        (item, block.tolist()) for item in range(items) for block in np.split(seeds[item], range(batch, samples, batch))
    ]
    drawings = (prepare(item, block) for item, block in blocks)
    arguments = ((denoiser, block, {**job.arguments, **others}) for denoiser, block, others in drawings)
    with progress_bar(title, "samples", shown=watch is None) as progress:
        parts = [*draw_blocks(arguments, model.shape, lambda done: progress(done, seeds.size), watch)]
    return torch.cat(parts).reshape(items, samples, *model.shape), seeds


# The folder ---------------------------------------------------------------------------------------------------------


def known_facts(out: Path, task: Mapping[str, Any]) -> dict[str, Any] | None:
    """The facts in the folder ``out``, if it holds the same task and its files are as they were written; None if it is
    new, or the same task was stopped in it. Anything else is refused; nothing is written."""
    # Listed before the facts are read: another process may be writing them now, which comes before its other files.
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    if not (out / FACTS).is_file():
        if out.is_file() or any(name != LOCK and not is_aside(name) for name in names):
            raise InputError("out", out, "is a file, or holds other files", OTHER_DIRECTORY)
        return None
    facts = read_facts(out)
    if facts is None:
        problem = "holds a restoration of version 0.2, which has no checksums"
        raise InputError("out", out, problem, OTHER_DIRECTORY)
    stored = facts["task"]
    if different := [key for key in {**task, **stored} if stored.get(key) != task.get(key)]:
        words = "; ".join(f"`{key}`: {shown(stored.get(key))}, not {shown(task.get(key))}" for key in different)
        raise InputError("out", out, f"holds another restoration ({words})", OTHER_DIRECTORY)
    if "files" not in facts:
        if links := [name for name in names if (out / name).is_symlink()]:  # it could lead to anybody's pictures
            raise InputError("out", out, f"has a link {links[0]!r}", OTHER_DIRECTORY)
        return None
    _check_recorded(out, facts)
    return facts


def read_facts(folder: Path) -> dict[str, Any] | None:
    """restoration.json of a folder: its ``task`` and, of one that is finished, what was ``found`` and the checksums of
    its ``files``. None if version 0.2 wrote it, without checksums."""
    file = folder / FACTS
    if read_object(file, AGAIN).keys() == {"task", "found"}:
        return None
    facts = read_sealed(file, FORMAT, AGAIN)
    with blaming(file, AGAIN):
        is_finished = "files" in facts
        if not all(isinstance(facts[key], dict) for key in (("task", "found", "files") if is_finished else ("task",))):
            raise TypeError("it does not hold a task and what came of it")
        if is_finished and not isinstance(facts["found"]["same"], bool):
            raise TypeError("it does not say whether all samples are the same")
        if is_finished and "rmse_of_mean" in facts["found"]:
            errors_text(facts["found"])  # which needs numbers
    return facts


def check_restoration(folder: Path) -> bool:
    """Refuse a folder of a restoration that is damaged. False if it has no checksums, as version 0.2 wrote it."""
    if (facts := read_facts(folder)) is not None and "files" in facts:
        _check_recorded(folder, facts)
    return facts is not None


def _check_recorded(folder: Path, facts: Mapping[str, Any]) -> None:
    present = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    check_files(folder, present & facts["files"].keys(), facts["files"], AGAIN)


def begin_restoration(folder: Path, task: Mapping[str, Any]) -> None:
    """Mark a folder as that of a task, so that the same command can write it again after a kill."""
    replace_json(folder / FACTS, seal({"format": FORMAT, "nidiff": __version__, "task": dict(task)}))


def finish_restoration(folder: Path, task: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Write the facts of a task whose files are all there, and return them."""
    remove_left(folder, *(folder / name for name in BY_SAMPLE))
    files = [file for name in OURS for file in (folder / name, *(folder / name).rglob("*")) if file.is_file()]
    checksums = {file.relative_to(folder).as_posix(): file_sha256(file) for file in sorted(files)}
    facts = {"task": dict(task), "found": dict(found), "files": checksums}
    replace_json(folder / FACTS, seal({"format": FORMAT, "nidiff": __version__, **facts}))
    return facts


def write_restoration(
    folder: Path, restoration: Restoration, task: Mapping[str, Any], kind: str, along: "Along | None" = None
) -> None:
    """Write the arrays and pictures to ``folder``, and the samples in the format ``kind`` too; ``along`` is what the
    items lie along, such as their times."""
    x, seeds, scaling, grid = restoration.x, restoration.seeds, restoration.scaling, restoration.grid
    stored = restoration.stored(grid.dtype)
    replace_npz(folder / "samples.npz", {"arr_0": _channels_last(stored, 2), "seeds": seeds})
    mean = restoration.mean
    arrays = (mean, restoration.spread, restoration.observed.to(mean.dtype))
    for name, values in zip(ARRAYS, arrays, strict=True):
        with replacing(folder / f"{name}.npy") as file:
            np.lib.format.write_array(file, _channels_last(values, 1), allow_pickle=False)
    about = {"source": f"nidiff {__version__}", "task": digest(dict(task))}
    names = [f"{item:04d}-{seed:06d}" for item, row in enumerate(seeds) for seed in row]
    items = (ITEM, np.arange(len(x))) if along is None else along
    samples = Samples(stored.flatten(0, 1).numpy(), seeds.flatten(), grid, about, names, items)
    write_format(samples, folder, kind)
    if grid.kind == "picture":
        write_format(samples, folder, "png")
        for item, mean in enumerate(as_grey_or_rgb(as_stored(x.double().mean(1), scaling, grid.dtype))):
            save_png(mean.movedim(0, -1), folder / "png" / f"{item:04d}-mean.png")


def _channels_last(values: Tensor, axis: int) -> "NDArray[Any]":
    return np.ascontiguousarray(values.movedim(axis, -1).numpy())


def errors_text(measured: Mapping[str, Any]) -> str:
    """The errors of a restoration in words."""
    mean, single = measured["rmse_of_mean"], measured["rmse_of_sample"]
    errors = f"RMS error {mean:.4g} of the mean, {single:.4g} of a single sample"
    if "rmse_of_bicubic" in measured:
        errors += f", {measured['rmse_of_bicubic']:.4g} of bicubic interpolation"
    errors += f", in units of the {measured['units']}"
    if "coverage" not in measured:
        return errors
    score = f", CRPS {measured['crps']:.4g}" if "crps" in measured else ""  # version 0.2 did not have it
    inside = f"the {measured['interval']:.0%} interval contains {measured['coverage']:.1%} of the true values"
    return f"{errors}{score}; {inside}"


def default_folder(model: Model, task: Mapping[str, Any]) -> Path:
    """restored/… or denoised/… in the run, or in out/NAME for a shipped model."""
    words = [Path(str(task["file"])).stem, str(task["sampler"]), str(task["num_steps"]), digest(dict(task))[:8]]
    return model.home / f"{task['command']}d" / "-".join(words)
