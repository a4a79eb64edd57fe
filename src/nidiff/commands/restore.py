"""``nidiff restore`` and ``nidiff denoise``: samples of what data were, given an observation or a noisy version."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, QuietFlag
from nidiff.commands.observing import observed_by
from nidiff.errors import InputError, one_of
from nidiff.recipe import check_whole

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.data.dataset import Along, Dataset
    from nidiff.generation.job import Job
    from nidiff.generation.loaded_model import Model
    from nidiff.generation.restoration import Restoration

SAME = (
    "all samples of an item are the same, so they are not draws of the posterior: {} adds no fresh noise (ancestral "
    "does), or all of it is beyond the range of the model."
)


@dataclass(frozen=True)
class RestoringFlags:
    """Which samples are drawn of each item, how, and where they go."""

    samples: int = 8
    """Samples of each item. From two on, their spread is measured."""
    sampler: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: ancestral)")] = None
    """As in nidiff sample. One that adds no fresh noise, such as dpmpp_2m, has one answer for one start. The default is
    ancestral:variance=gaussian if the model knows its data's Gaussian, as nidiff train fits it, else variance=beta."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 50, or all there are)")] = None
    """Sampling steps. With few of them, the spread of variance=posterior is too small, and that of beta too large."""
    seed: int = 0
    """Of the first sample of the first item; the samples of all items have seeds that follow."""
    batch: int = 64
    """Samples of an item at a time. It changes the speed and the memory, not the samples."""
    clip: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the model's own)")] = None
    """The expected clean item is clipped to [-clip, clip] at every step; 0: no clipping."""
    tile: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 1 to 8, by the size)")] = None
    """Items in one call of the network: the same bits with any --batch; 0: the whole batch."""
    units: Annotated[str, arg(metavar="{data,model}")] = "data"
    """Of --noise: those of the data (of 8-bit pictures, 0 to 255), or those of the model, noise / scale (of 8-bit
    pictures, noise / 127.5)."""
    classes: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """The class of all items, for a model that was trained with labels."""
    guidance: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1)")] = None
    """Guidance towards that class: 1 is the law that the model learned."""
    layout: Annotated[str | None, arg(metavar="LETTERS", help_behavior_hint="(default: by the model's shape)")] = None
    """What the axes of an array are, such as NCHW, as in nidiff train."""
    variables: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: the model's)")] = ()
    """Of NetCDF, HDF5 and Zarr: the variables that are the channels; of .npz: its array."""
    sample_axis: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first one)")] = None
    """Of NetCDF, HDF5 and Zarr: the axis of the items."""
    checkpoint: CheckpointFlag = None
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the run)")] = None
    """A new directory for the files; of a model that ships by default in out/NAME."""
    format: Annotated[str, arg(metavar="{npz,png,npy,netcdf,zarr,wav,gif}")] = "npz"
    """samples.npz, which is always written, or another format besides, as in nidiff sample."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of the directory."""

    def open(self, path: Path) -> "Model":
        """The model of the samples."""
        from nidiff.generation.export import check_format
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.generation.observations import UNITS

        one_of("units", self.units, UNITS)
        for name, least, most in (("samples", 1, None), ("batch", 1, None), ("seed", 0, 2**62)):
            check_whole(name, getattr(self, name), least, most)
        model = open_model(path, process_state(), self.checkpoint)
        check_format(self.format, model.grid)
        return model

    def job(self, model: "Model") -> "Job":
        """The job of the samples, for a model that knows the items."""
        from nidiff.generation.restoration import restoration_job

        classes = [] if self.classes is None else [self.classes]
        options: Any = {"clip": self.clip, "tile": self.tile, "classes": classes, "guidance": self.guidance}
        return restoration_job(model, self.sampler, self.num_steps, **options)

    @property
    def drawing(self) -> dict[str, Any]:
        """The arguments of `restore` and `denoise` that say which samples are drawn."""
        return {"samples": self.samples, "seed": self.seed, "batch": self.batch}

    def load(
        self, path: Path, model: "Model", *, scale: int = 1, noise: float = 0.0, with_nan: bool = False
    ) -> tuple["Model", "Dataset"]:
        """Items [N, C, *event] in the units of the data, on the model's grid or one that is coarser by ``scale``; and
        the model for them."""
        from nidiff.data.load import open_items
        from nidiff.generation.observations import check_range

        reading: Any = {"layout": self.layout, "variables": self.variables, "sample_axis": self.sample_axis}
        data = open_items(path, model.shape, grid=model.grid, scale=scale, **reading)
        model, items = model.about(data, path), cast("Tensor", data.values)
        if scale == 1 or not (model.scaling.is_per_pixel or model.times is not None):  # which are on the model's grid
            check_range(model, items, path, noise, self.units)
        if not items.is_floating_point():
            return model, data
        known, domain = items.isfinite(), model.scaling.domain
        if bool((known if domain is None else known | ~domain).all()):
            return model, data
        if not with_nan or bool(items.isinf().any()) or not bool(known.flatten(1).any(1).all()):
            problem = "has infinite values, NaN, or an item that is NaN everywhere"
            remedy = "use nidiff restore with --missing, which takes NaN as unobserved, or fill them in"
            raise InputError("file", path, problem, remedy)
        return model, data

    def finish(
        self,
        command: str,
        path: Path,
        model: "Model",
        job: "Job",
        data: "Dataset",
        arguments: Mapping[str, Any],
        make: "Callable[[], Restoration]",
    ) -> None:
        """Draw the samples, unless they are there already, write them, and print where they are.

        ``arguments`` are those of the command that decide the numbers, besides the flags here and the job.
        """
        from nidiff.files import as_path
        from nidiff.generation.restoration import baselines_text, default_folder, errors_text, known_facts
        from nidiff.sealed import digest, shaped, tensors_sha256

        units = {"units": self.units} if "noise" in arguments else {}
        file = {"file": path.name, "values": tensors_sha256(shaped(cast("Tensor", data.values)))}
        if model.times is not None:
            file["times"] = digest(model.times.astype("datetime64[s]").astype(str).tolist())
        task: dict[str, Any] = {"command": command, "format": self.format, **file, **arguments, **units}
        task |= {**job.to_json(), "samples": self.samples, "seed": self.seed}
        out = as_path("out", default_folder(model, task) if self.out is None else self.out)
        facts = known_facts(out, task)  # a folder that is not ours is not even locked
        if facts is None:
            facts = self._write(out, task, make, data.along, model.boundary)
        else:
            print("the same was done before, and its files are left as they are", file=sys.stderr)
        measured = facts["found"]
        if measured["same"]:
            print(SAME.format(job.sampler), file=sys.stderr)
        if "rmse_of_mean" in measured:
            print(errors_text(measured), file=sys.stderr)
            if text := baselines_text(measured):
                print(text, file=sys.stderr)
        print(json.dumps({"out": str(out), **measured}) if self.json else out)

    def _write(
        self,
        out: Path,
        task: Mapping[str, Any],
        make: "Callable[[], Restoration]",
        along: "Along | None",
        boundary: tuple[str, ...],
    ) -> dict[str, Any]:
        """Draw the samples and write the folder, in which no other process may write meanwhile; returns its facts."""
        from nidiff.data.figures import can_draw
        from nidiff.evaluation.restored import spectra
        from nidiff.files import writing
        from nidiff.generation.restoration import (
            PICTURE,
            SCORES,
            begin_restoration,
            finish_restoration,
            known_facts,
            write_restoration,
        )
        from nidiff.locks import claimed
        from nidiff.report.restored import save_restored

        with claimed(out):
            if (facts := known_facts(out, task)) is not None:  # another process had it until now
                return facts
            restoration = replace(make(), along=along)
            counts = {"items": len(restoration.x), "samples": self.samples, "same": restoration.same}
            with writing("out", out, "repeat the command"):
                begin_restoration(out, task)
                write_restoration(out, restoration, task, self.format)
                save_restored(restoration, out / PICTURE)
                measured = restoration.errors() | spectra(restoration, boundary)
                if measured and can_draw(out / SCORES):
                    from nidiff.report.scores import save_scores  # which needs matplotlib

                    save_scores(measured, tuple(restoration.x.shape[3:]), boundary, out / SCORES)
                facts = finish_restoration(out, task, {**counts, **measured})
        for name in (PICTURE, SCORES):
            if (out / name).is_file():
                print(f"wrote {out / name}", file=sys.stderr)
        return facts


@dataclass(frozen=True)
class Restore:
    """Samples of what data were, given some of their points, values at stations, their means over blocks, a blurred
    version, or any linear function of them.

    Give FILE with one of --mask, --scale, --blur, --missing and --operator, or --stations, or both."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships (see nidiff models)."""
    restoring: Annotated[RestoringFlags, arg(name="")]
    file: Annotated[Positional[Path | None], arg(metavar="FILE", help_behavior_hint="")] = None
    """What was observed, in the units of the data: a picture, a sound, .npy, .npz, NetCDF, HDF5, Zarr, a folder of
    pictures or sounds, or, with --degrade, held-out items of a data set with a name, such as turbulence:0-3. Units and
    axes that a file names are matched with the model's. With --stations alone, none."""
    mask: Annotated[str | None, arg(metavar="FILE_OR_WORD", help_behavior_hint="")] = None
    """What is observed: the left, right, top or bottom half, the center, random:0.03 (that share of the points), the
    ones of an array or the white of a picture, or a variable of FILE; not-center is all but the center, and so on."""
    scale: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """FILE has means over blocks of so many points along each axis; the last block has those that are left."""
    blur: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """FILE is blurred by a Gaussian of this standard deviation in pixels."""
    missing: bool = False
    """NaN in FILE are unobserved, and all else is observed."""
    operator: Annotated[str | None, arg(metavar="MODULE:FUNCTION", help_behavior_hint="")] = None
    """FILE has y = f(items), of your linear function in a module here or installed, which is imported and so run: from
    torch tensors [B, C, *event] in the units of the data to [B, …]. f.transpose, if it has one, is that of y."""
    stations: Annotated[Path | None, arg(metavar="TABLE", help_behavior_hint="")] = None
    """A table of values at places between the points: .csv, .tsv, NetCDF or Zarr. Columns are called as the axes and
    channels of the model, with errors in NAME_error, units in brackets, and time where there are several:
    latitude, longitude, t2m (K), t2m_error (K)."""
    interpolation: Annotated[str, arg(metavar="{bilinear,nearest}")] = "bilinear"
    """How a station sees the points around it."""
    noise: Annotated[str, arg(metavar="NUMBER_OR_FILE")] = "0"
    """The standard deviation of white noise in the observation, in the units of the data (see --units): a number, or
    one for each entry, as an array or a variable of FILE; of stations, that of values without an error in the table.
    Means over blocks and blurred pictures in whole numbers have that of rounding, 0.29, besides."""
    variance: Annotated[str | None, arg(metavar="NUMBER_OR_FILE", help_behavior_hint="")] = None
    """Instead of --noise: R, the variance of the noise, its square."""
    degrade: bool = False
    """FILE is clean: it is masked, averaged, blurred or seen by the stations first, noise is added, and the samples are
    compared with FILE."""
    truth: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """What the data were, to compare the samples with."""
    method: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: gaussian or mmps)")] = None
    """gaussian (with the Gaussian of the data that the model knows), mixture (with its mixture, for up to 2048 values),
    mmps (with the network's own moments: slower, for any model), tmpd, pigdm, gradient, dps, diffpir, or replacement
    (for masks without noise); with settings, as in dps:scale=1."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.generation.restoration import Restoration, restore

        kind = self._kind()
        model = self.restoring.open(self.model)
        seen = observed_by(self, model, kind)
        job = self.restoring.job(seen.model)

        def make() -> Restoration:
            return restore(
                seen.model, job, seen.observed, method=self.method, truth=seen.truth, **self.restoring.drawing
            )

        arguments = {**seen.arguments, "method": self.method, "degrade": self.degrade}
        self.restoring.finish("restore", seen.path, seen.model, job, seen.data, arguments, make)

    def _kind(self) -> str | None:
        """The flag that says what FILE has: mask, scale, blur, missing or operator; None where only stations are
        given."""
        flags = {name: getattr(self, name) is not None for name in ("mask", "scale", "blur", "operator")}
        kinds = [name for name, is_set in {**flags, "missing": self.missing}.items() if is_set]
        has_stations, ways = self.stations is not None, "`mask`, `scale`, `blur`, `missing` and `operator`"
        if len(kinds) > 1 or (not kinds and not has_stations):
            count = "none is given" if not kinds else f"{' and '.join(f'`{kind}`' for kind in kinds)} are given"
            problem = f"of {ways}, which say what was observed, {count}"
            raise InputError(
                None, None, problem, "give one of them, or `stations`" if not kinds else "give one of them"
            )
        if self.file is None and (kinds or self.degrade):
            needed = kinds[0] if kinds else "degrade"
            raise InputError(needed, None, "is about a FILE, and none is given", "give it after the model")
        if self.file is not None and not kinds and not self.degrade:
            problem = f"is given, and none of {ways} says what it holds"
            raise InputError("file", self.file, problem, "give one of them, or `degrade` to see it by the stations")
        if self.missing and self.degrade:
            raise InputError("degrade", None, "needs clean data, and with `missing` some are not known", "give `mask`")
        if self.truth is not None and self.degrade:
            raise InputError("truth", self.truth, "is FILE with `degrade`", "leave one of them out")
        if self.variance is not None and self.noise != "0":
            raise InputError("variance", self.variance, "is the square of `noise`, which is given too", "give one")
        return kinds[0] if kinds else None


@dataclass(frozen=True)
class Denoise:
    """Samples of what noisy data were without noise of the model's covariance, or variations of an image.

    With y = x0 + noise of covariance proportional to the model's, y is a state of the process, and sampling starts
    there: samples of x0 given y, as the model knows it, without any guidance."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships (see nidiff models)."""
    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """The data, in their own units: a picture, a sound, .npy, .npz, NetCDF, HDF5, Zarr, or a folder of pictures or
    sounds, whose units and axes, if they name them, are matched with the model's; or held-out items of a data set that
    has a name: digits:0-3, or digits for the first one."""
    restoring: Annotated[RestoringFlags, arg(name="")]
    noise: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """The standard deviation of the noise that FILE has, in the units of the data (see --units)."""
    add_noise: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Instead, FILE is clean, and so much noise is added first, another for each sample, for variations of it. In the
    units of the model, where data have a standard deviation of about 1, or a range from -1 to 1."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.generation.observations import noise_level
        from nidiff.generation.restoration import denoise

        flags, add_noise = self.restoring, self.add_noise is not None
        if (self.noise is not None) == add_noise:
            remedy = "give `noise`, that of the file, or `add_noise`, which is to be added"
            raise InputError(None, None, "one of `noise` and `add_noise` is needed", remedy)
        model = flags.open(self.model)
        name, units = ("add_noise", "model") if add_noise else ("noise", flags.units)
        amount = getattr(self, name)
        level = noise_level(amount, model, units, name)
        model, data = flags.load(self.file, model, noise=self.noise or 0.0)
        job = flags.job(model)
        items = cast("Tensor", data.values)

        def make() -> "Restoration":
            return denoise(model, job, items, level, add_noise=add_noise, **flags.drawing)

        flags.finish("denoise", self.file, model, job, data, {name: amount}, make)
