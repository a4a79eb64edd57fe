"""``nidiff train``: from a data set to a trained model."""

import argparse
import hashlib
import json
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.errors import InputError, one_of
from nidiff.extras import require
from nidiff.training.experiment import PRESETS, Experiment, read_experiment

if TYPE_CHECKING:
    from nidiff.training.loop import Trainer


@dataclass(frozen=True)
class Train:
    """Train a diffusion model: alone, under torchrun or accelerate launch. Stop it any time; --resume continues it."""

    experiment: Annotated[Experiment, arg(name="")]
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/ and a name)")] = None
    """The run directory; its name is by default that of the preset or the config."""
    preset: Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")] = "digits"
    """Where the other flags take their defaults from."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Instead of a preset: an experiment.json, or a run directory that has one."""
    resume: bool = False
    """Resume the run in the directory from its newest good checkpoint."""
    overwrite: bool = False
    """Replace the run that the directory holds, which is lost."""
    dry_run: bool = False
    """Print the experiment, the size of the network, memory, and an estimate of the speed and the time to the end."""

    @staticmethod
    def defaults(arguments: list[str]) -> "Train":
        """The defaults of the flags: those of --preset or --config, or of the run that --resume continues."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--preset", nargs="?")
        parser.add_argument("--config", nargs="?", type=Path)
        parser.add_argument("--out", nargs="?", type=Path)
        parser.add_argument("--resume", action="store_true")
        given, _ = parser.parse_known_args(arguments)
        if given.preset and given.config:
            raise InputError("preset and config exclude each other: give one.")
        if given.resume and given.out and not given.preset and (given.out / "experiment.json").is_file():
            given.config = given.config or given.out
        if given.config:
            return Train(read_experiment(given.config))
        return Train(PRESETS[one_of("preset", given.preset or "digits", PRESETS)])

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        if self.dry_run:
            self._dry_run()
        elif (folder := self.train()) is not None:
            print(folder)

    def train(self) -> Path | None:
        """Train to the end; returns the run directory, on the main process."""
        from nidiff.report.html import write_report
        from nidiff.training.checkpoint import load_checkpoint
        from nidiff.training.loop import build, restore, train
        from nidiff.training.run import RunDirectory

        config = self.config or Path(self.preset)
        name = config.parent.name if config.name == "experiment.json" else config.stem
        run = RunDirectory(self.out or Path("runs") / name)
        run.check(self.experiment, resume=self.resume, overwrite=self.overwrite)
        trainer = build(self.experiment, run.covariance if self.resume else None)
        facts, main = _facts(trainer), trainer.accelerator.is_main_process
        say = partial(trainer.accelerator.print, file=sys.stderr)
        if trainer.images.skipped:
            say(f"skipped {len(trainer.images.skipped)} corrupt: {', '.join(trainer.images.skipped)}")
        if self.resume:
            run.check_data(facts)
            checkpoint = load_checkpoint(run.checkpoints)
            if checkpoint is not None:
                for line in checkpoint.damaged:
                    say(f"skipped a damaged checkpoint: {line}")
                restore(trainer, checkpoint)
            if main:
                run.resume(trainer.step, trainer.experiment, trainer.denoiser, facts)
            say(f"resuming {run.folder} after step {trainer.step}")
        elif main:
            run.begin(trainer.experiment, trainer.denoiser, facts)
        trainer.accelerator.wait_for_everyone()
        train(trainer, run)
        if main:
            say(f"wrote {write_report(run.folder)}")
        return run.folder if main else None

    def _dry_run(self) -> None:
        from nidiff.data.encoded import MEMORY_LIMIT
        from nidiff.training.loop import build
        from nidiff.training.speed import seconds_per_step

        # Images of a folder are read when they are needed, and compiling takes longer than the answer should.
        trainer = build(replace(self.experiment, compile=False), memory_limit=0)
        facts, experiment, seconds = _facts(trainer), self.experiment.resolved(), seconds_per_step(trainer)
        size = math.prod(trainer.images.pixels.shape) * trainer.images.pixels.dtype.itemsize
        found = {
            "experiment": experiment.to_json(),
            **facts,
            "weights_gradients_adam_ema_mb": round(5 * 4 * facts["parameters"] / 2**20, 1),
            "data_mb": round(size / 2**20, 1) if size <= MEMORY_LIMIT else 0.0,
            "steps_per_s": float(f"{1 / seconds:.3g}"),
            "images_per_s": float(f"{experiment.batch_size / seconds:.3g}"),
            "hours_to_the_end": float(f"{seconds * experiment.steps / 3600:.3g}"),
        }
        trainer.accelerator.print(json.dumps(found, indent=2))


def _facts(trainer: "Trainer") -> dict[str, Any]:
    """What must not change when a run is resumed; the checksum is of up to 64 images spread over the data."""
    import torch

    total = len(trainer.images)
    some = trainer.images.batch(torch.linspace(0, total - 1, min(total, 64)).long())
    return {
        "images": len(trainer.images),
        "image_shape": list(trainer.images.shape),
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
        "data_checksum": hashlib.sha256(some.numpy().tobytes()).hexdigest()[:16],
    }
