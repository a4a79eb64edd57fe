"""``nidiff train``: from a data set to a trained model."""

import dataclasses
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.errors import InputError, one_of
from nidiff.training.experiment import PRESETS, Experiment, read_experiment

if TYPE_CHECKING:
    from nidiff.training.loop import Trainer

MEASURED_STEPS = 8


@dataclass(frozen=True)
class Train:
    """Train a diffusion model: alone, under torchrun or under accelerate launch; stop it and go on with --resume."""

    experiment: Annotated[Experiment, arg(name="")]
    out: Annotated[
        Path | None,
        arg(metavar="DIR", help_behavior_hint="(default: runs/PRESET, or runs/ and the name of the config)"),
    ] = None
    """The run directory."""
    preset: Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")] = "digits"
    """Where the other flags get their defaults."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Instead of a preset: an experiment.json, or a run directory that has one."""
    resume: bool = False
    """Go on with the run in the directory from its newest good checkpoint."""
    overwrite: bool = False
    """Begin anew in a directory that holds a run, which is lost."""
    dry_run: bool = False
    """Print the experiment, the size of the network, memory, speed and time to the end; train nothing."""

    @staticmethod
    def defaults(arguments: list[str]) -> "Train":
        """The defaults of the flags, which depend on --preset or --config."""
        preset, config = _value_of("--preset", arguments), _value_of("--config", arguments)
        if preset and config:
            raise InputError("preset and config exclude each other: give one.")
        if config:
            return Train(read_experiment(Path(config)))
        return Train(PRESETS[one_of("preset", preset or "digits", PRESETS)])

    def run(self) -> None:
        if self.dry_run:
            from nidiff.training.loop import build

            trainer = build(self.experiment)
            found = _dry_run(trainer)
            if trainer.accelerator.is_main_process:
                print(found)
        elif (folder := self.train()) is not None:
            print(folder)

    def train(self) -> Path | None:
        """Train to the end; the run directory, on the main process."""
        from nidiff.covariance.operator import Covariance
        from nidiff.report.html import write_report
        from nidiff.training.checkpoint import load_checkpoint
        from nidiff.training.loop import build, restore, train
        from nidiff.training.run import Run

        name = self.preset
        if self.config is not None:
            name = self.config.parent.name if self.config.name == "experiment.json" else self.config.stem
        run = Run(self.out or Path("runs") / name)
        run.check(self.experiment, resume=self.resume, overwrite=self.overwrite)
        trainer = build(self.experiment, Covariance.load(run.folder) if self.resume else None)
        facts = _facts(trainer)
        if self.resume:
            run.check_data(facts)
        main = trainer.accelerator.is_main_process
        if trainer.images.skipped and main:
            print(
                f"left out {len(trainer.images.skipped)} corrupt: {', '.join(trainer.images.skipped)}", file=sys.stderr
            )
        if self.resume:
            checkpoint = load_checkpoint(run.folder / "checkpoints")
            if checkpoint is not None:
                for line in checkpoint.damaged if main else ():
                    print(f"damaged checkpoint left out: {line}", file=sys.stderr)
                restore(trainer, checkpoint)
            if main:
                run.resume_at(trainer.step)
                run.describe(trainer.experiment, trainer.covariance, facts)
                print(f"resuming {run.folder} after step {trainer.step}", file=sys.stderr)
        elif main:
            run.begin(trainer.experiment, trainer.covariance, facts)
        trainer.accelerator.wait_for_everyone()
        train(trainer, run)
        if main:
            print(f"wrote {write_report(run.folder)}", file=sys.stderr)
        return run.folder if main else None


def _value_of(flag: str, arguments: list[str]) -> str | None:
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _facts(trainer: "Trainer") -> dict[str, Any]:
    """What a resumed run must find again; the checksum is of up to 64 images spread over the data."""
    import torch

    total = len(trainer.images)
    some = trainer.images.batch(torch.linspace(0, total - 1, min(total, 64)).long())
    return {
        "images": len(trainer.images),
        "image_shape": list(trainer.images.shape),
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
        "data_checksum": hashlib.sha256(some.numpy().tobytes()).hexdigest()[:16],
    }


def _dry_run(trainer: "Trainer") -> str:
    """Everything about the run, and a few real steps to see how fast it will be."""
    import torch

    from nidiff.training.loop import step_batches, train_step

    experiment = trainer.experiment
    trainer.experiment = dataclasses.replace(experiment, steps=MEASURED_STEPS)
    times = []
    start = time.perf_counter()
    for batches in step_batches(trainer):
        train_step(trainer, batches).item()  # waits for the device
        times.append(time.perf_counter() - start)
        start = time.perf_counter()
    step = sorted(times[2:])[len(times[2:]) // 2]
    facts = _facts(trainer)
    weights = facts["parameters"] * 4
    pixels = trainer.images.pixels
    data = pixels.numel() * pixels.element_size() if isinstance(pixels, torch.Tensor) else 0
    return json.dumps(
        {
            "experiment": experiment.to_json(),
            **facts,
            "weights_gradients_adam_ema_mb": round(5 * weights / 2**20, 1),
            "data_mb": round(data / 2**20, 1),
            "steps_per_s": round(1 / step, 3),
            "images_per_s": round(experiment.batch_size / step, 1),
            "hours_to_the_end": round(step * experiment.steps / 3600, 3),
        },
        indent=2,
    )
