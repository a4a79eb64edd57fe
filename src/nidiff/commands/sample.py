"""``nidiff sample``: samples of a trained model, by their seeds."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, ConditioningFlags, Drawing, PrecisionFlag, QuietFlag
from nidiff.errors import InputError
from nidiff.notation import parse_seeds, seeds_text


@dataclass(frozen=True)
class Sample:
    """Draw samples: alone, under torchrun or under accelerate launch. Repeat it to continue where it stopped."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships (see nidiff models)."""
    drawing: Annotated[Drawing, arg(name="")]
    conditioning: Annotated[ConditioningFlags, arg(name="")]
    checkpoint: CheckpointFlag = None
    precision: PrecisionFlag = "fp32"
    sampler: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: as tuned, or as in training)")] = (
        None
    )
    """ancestral, ddim, euler, heun, dpmpp_2m, ipndm, euler_maruyama, pc, als or cas, with options: ddim:spacing=karras;
    dpmpp_2m:eta=0.5, with fresh noise, 1 being the SDE; churn, with noise of another amount or colour
    (churn:amount=0.5,colour=gff,gamma=1); repaint; diffpir; angle, angle_2m or gaussian_2m, for few steps, if the model
    knows its data's Gaussian, as nidiff train fits it. Keys of each are spacing (uniform, trailing, logsnr, karras;
    with the Gaussian also angle) and start=gaussian or start=mixture, which begin at a lower level with that model of
    the data, where it loses at most max_loss nats per dimension, or at the row level:
    dpmpp_2m:start=mixture,max_loss=0.001. With the Gaussian, rescale=true gives every mode its known variance after
    each step: gaussian_2m:rescale=true, for spectra. The default of a model that ships is that of its picture, with as
    many steps."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the sampler's own)")] = None
    """Sampling steps, that is, noise levels visited. The default is 20 for ODE solvers, 10 for angles, else all."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: generated/… in the run)")] = None
    """Where the samples go; those of a model that ships by default to out/NAME/generated/…."""
    format: Annotated[str, arg(metavar="{npz,png,npy,netcdf,zarr,wav,gif}")] = "npz"
    """samples.npz is always written (arr_0 [N, *event, C] in the units of the data, seeds and any classes). Besides it:
    a PNG per seed, where what is no picture is drawn; samples.npy; samples.nc or samples.zarr, with names, units and
    coordinates; a WAV file per seed, for signals; or a GIF per seed, for video."""
    shape: Annotated[tuple[int, ...] | None, arg(metavar="INT ...", help_behavior_hint="(default: the model's)")] = None
    """Sample on another grid over the same domain, of so many points along each axis."""
    rate: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: that of the data)")] = None
    """Samples per second in a WAV file."""
    times: Annotated[str | None, arg(metavar="TIMES", help_behavior_hint="(default: none)")] = None
    """The months or days of the samples, such as 2020-01:2020-12, in turn (seed s has the time number s modulo how many
    there are), of a model that removes a climatology, or has a time as a condition. Without it, samples of the former
    are anomalies."""
    floats: bool = False
    """Keep whole numbers as float32 in [-1, 1], not rounded."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of the directory."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.covariance.checks import check_shape
        from nidiff.generation.folder import GRID, SampleFolder, run_job
        from nidiff.generation.job import plan_job
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.recipe import check_whole
        from nidiff.sampling.warm import warm_text

        drawing, seeds, state = self.drawing, parse_seeds(self.drawing.seeds), process_state()
        if self.rate is not None and self.format != "wav":
            raise InputError("rate", self.rate, "has no meaning without `format` wav", "leave it out")
        model = open_model(self.model, state, self.checkpoint)
        model = model if self.shape is None else model.at(check_shape(self.shape))
        grid = model.grid if self.rate is None else replace(model.grid, rate=check_whole("rate", self.rate))
        options: dict[str, Any] = {"clip": drawing.clip, "tile": drawing.tile}
        options |= {"precision": self.precision, "floats": self.floats, "times": self.times}
        job = plan_job(model, self.sampler, self.num_steps, **options, **self.conditioning.arguments)
        if "start" in job.options and state.is_main_process and not self.quiet:
            print(warm_text(model.denoiser, job.num_steps, **job.options), file=sys.stderr)
        out = self.out or model.home / "generated" / job.name
        anomalies = model.scaling.anomalies
        if anomalies and self.times is None and state.is_main_process:
            print(f"the samples are {anomalies}; --times 2020-01:2020-12 would put it back", file=sys.stderr)
        folder = SampleFolder(out, job, model.shape, self.format, grid, anomalies)
        run_job(model.denoiser, folder, seeds, batch=drawing.batch, state=state)
        if state.is_main_process:
            if (folder.path / GRID).is_file():  # which needs matplotlib, for what is no picture
                print(f"wrote {folder.path / GRID}", file=sys.stderr)
            found = {"out": str(folder.path), "images": len(seeds), "seeds": seeds_text(seeds), "shape": model.shape}
            print(json.dumps(found) if self.json else folder.path)
