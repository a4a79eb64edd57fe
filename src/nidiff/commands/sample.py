"""``nidiff sample``: images of a trained model, by their seeds."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import Drawing, parse_seeds


@dataclass(frozen=True)
class Sample:
    """Draw images: alone, under torchrun or under accelerate launch. Repeat it to continue where it stopped."""

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, or its model folder."""
    drawing: Annotated[Drawing, arg(name="")]
    sampler: str = "dpmpp_2m"
    """ancestral, ddim, euler, heun, dpmpp_2m, euler_maruyama, pc, als or cas, with options: ddim:eta=1,spacing=karras;
    angle or angle_2m, for few steps, if the model knows its data's Gaussian, as nidiff train fits it. Keys of each are
    spacing (uniform, trailing, logsnr, karras; with the Gaussian angle, or planned, the steps of least error) and, with
    the Gaussian, start=gaussian, which begins at a lower level, and bound, what that may lose in nats per dimension:
    dpmpp_2m:spacing=planned,start=gaussian,bound=0.005."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the sampler's own)")] = None
    """Sampling steps, that is, noise levels visited. The default is 20 for ODE solvers, 10 for angles, else all."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: generated/… in the run)")] = None
    """Where the images go."""
    format: Annotated[str, arg(metavar="{npz,png,both}")] = "npz"
    """One samples.npz (arr_0 [N, H, W, C] and seeds), a PNG per seed, or both."""
    floats: bool = False
    """Keep float32 in [-1, 1] in the npz instead of uint8."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of the directory."""

    def run(self) -> None:
        from nidiff.generation.folder import SampleFolder
        from nidiff.generation.job import run_job
        from nidiff.generation.opened import cell_name, open_model, plan_job, process_state, seeds_text

        drawing, seeds, state = self.drawing, parse_seeds(self.drawing.seeds), process_state()
        model = open_model(self.model, state)
        job = plan_job(model, self.sampler, self.num_steps, clip=drawing.clip, tile=drawing.tile, floats=self.floats)
        out = self.out or model.path / "generated" / cell_name(job)
        folder = SampleFolder(out, job, model.shape, self.format)
        run_job(model.denoiser, folder, seeds, batch=drawing.batch, state=state)
        if state.is_main_process:
            print(f"wrote {folder.path / 'grid.png'}", file=sys.stderr)
            found = {"out": str(folder.path), "images": len(seeds), "seeds": seeds_text(seeds), "shape": model.shape}
            print(json.dumps(found) if self.json else folder.path)
