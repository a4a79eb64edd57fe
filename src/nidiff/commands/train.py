"""``nidiff train``: from a data set to a trained model."""

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from nidiff.commands.flags import QuietFlag
from nidiff.commands.usage import parse, split_flags
from nidiff.errors import InputError, one_of, printable
from nidiff.extras import require
from nidiff.files import as_path
from nidiff.model.zoo import find_model
from nidiff.training.experiment import EXPERIMENT, PRESETS, Experiment, experiment_file, read_experiment

if TYPE_CHECKING:
    from nidiff.training.build import Trainer
    from nidiff.training.run import RunDirectory

PROG = "nidiff train"


@dataclass(frozen=True)
class Train:
    """Train a diffusion model: alone, under torchrun or accelerate launch. Stop it any time; --resume continues it."""

    experiment: Annotated[Experiment, arg(name="")]
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: runs/ and a name)")] = None
    """The run directory; its name is by default that of the preset or the config."""
    preset: Annotated[str, arg(metavar="{" + ",".join(PRESETS) + "}")] = "digits"
    """Where the other flags take their defaults from."""
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(optional)")] = None
    """Instead of a preset: an experiment.json, a run directory that has one, or the name of a model that ships."""
    resume: bool = False
    """Resume the run in the directory from its newest good checkpoint."""
    finish: bool = False
    """With --resume: end the run early. From its newest good checkpoint on, the learning rate falls over --cooldown
    steps, by default as many as were planned, and the run is then the one that began with so many --steps; --cooldown 0
    ends it at once. A cool-down that has begun goes on to its end."""
    overwrite: bool = False
    """Replace the run that the directory holds, which is lost."""
    report: bool = True
    """Write report.html at the end."""
    tracker: Annotated[tuple[str, ...], arg(metavar="[wandb mlflow tensorboard]")] = ()
    """Log the run to Weights & Biases or MLflow too, which are set up by variables of their own, such as
    WANDB_MODE=offline and MLFLOW_TRACKING_URI. Every run is logged for TensorBoard if that is installed; named here, it
    must be."""
    dry_run: bool = False
    """Print the experiment, the size of the network, memory, and an estimate of the speed and the time to the end."""
    quiet: QuietFlag = False

    @staticmethod
    def defaults(words: Sequence[str]) -> "Train":
        """The defaults of the flags: those of --preset or --config, or of the run that --resume continues."""
        given = dict(split_flags(Train, words, PROG))
        preset, config, out = (" ".join(given.get(flag, [])[:1]) for flag in ("--preset", "--config", "--out"))
        if preset and config:
            raise InputError("preset", preset, "excludes `config`", "give one of them")
        if "--resume" in given and out and not preset and not config:
            with suppress(InputError):  # `RunDirectory.check` says what is wrong with it
                return Train(read_experiment(experiment_file(as_path("out", out))))
        if config:
            experiment = read_experiment(find_model(config, "config"))
        else:
            experiment = PRESETS[one_of("preset", preset or "digits", PRESETS)]
        # Attention, too, is only at the resolutions that --widths leaves.
        depths = len(given.get("--widths", experiment.widths))
        return Train(replace(experiment, attention=tuple(depth for depth in experiment.attention if depth < depths)))

    @classmethod
    def parsed(cls, words: Sequence[str]) -> "Train":
        """The run that the words of a command line ask for; its flags have the defaults of a preset."""
        default = cls.defaults(words)
        settings = {**default.experiment.settings(), "report": True}
        on = {f"--{name}".replace("_", "-") for name, value in settings.items() if value is True}
        words = [word for word in words if word not in on]  # tyro takes only --no-… for a flag that is on by default
        return parse(cls, words, prog=PROG, default=default)

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        if self.dry_run:
            self._dry_run()
        elif (folder := self.train()) is not None:
            print(folder)

    def train(self) -> Path | None:
        """Train to the end; returns the run directory, on the main process."""
        import torch

        from nidiff.generation.loaded_model import process_state
        from nidiff.report.html import write_report
        from nidiff.training.build import build
        from nidiff.training.loop import train
        from nidiff.training.trackers import check_trackers, started_trackers

        check_trackers(self.tracker)
        run, asked = self.directory(), {"resume": self.resume, "overwrite": self.overwrite}
        experiment = self._resumed(run) if self.finish else self.experiment
        run.check(experiment, **asked)
        processes = process_state()
        processes.wait_for_everyone()  # nothing is written before all have looked
        with run.claim(experiment, **asked) if processes.is_main_process else nullcontext():
            processes.wait_for_everyone()
            trainer = build(experiment, resumed=run if self.resume else None)
            _say(trainer, _place(trainer))
            for note in trainer.notes:
                _say(trainer, note)
            if skipped := trainer.data.skipped:
                _say(trainer, f"skipped {len(skipped)} corrupt: {', '.join(skipped)}")
            if self.resume:
                trainer = _resume(trainer, run, self.experiment.cooldown if self.finish else None)
            elif processes.is_main_process:
                run.begin(trainer)
            processes.wait_for_everyone()
            names = self.tracker if processes.is_main_process else ()
            with started_trackers(names, run, trainer.experiment) as trackers:
                train(trainer, run, trackers)
            if not processes.is_main_process:
                return None
            if self.report:
                first = trainer.data.batch(torch.tensor([0]))[0]
                _say(trainer, f"wrote {write_report(run.folder, first)}")
            return run.folder

    def _resumed(self, run: "RunDirectory") -> Experiment:
        """The experiment of the run that --finish ends, before its end is changed."""
        if not self.resume:
            raise InputError("finish", None, "is for a run that is resumed", "give `resume` too")
        planned = self.experiment
        with suppress(InputError):  # `RunDirectory.check` says what is wrong with it
            planned = run.experiment
        if self.experiment.steps != planned.steps:
            problem = f"has no meaning with `finish`, which decides it, and the run has {planned.steps}"
            raise InputError("steps", self.experiment.steps, problem, "leave it out; `cooldown` may be shorter")
        return replace(self.experiment, cooldown=planned.cooldown)

    def directory(self) -> "RunDirectory":
        from nidiff.training.run import RunDirectory

        return RunDirectory(Path("runs") / run_name(self.preset, self.config) if self.out is None else self.out)

    def _dry_run(self) -> None:
        from nidiff.data.crops import Crops
        from nidiff.data.spec import MEMORY_LIMIT
        from nidiff.training.build import BYTES, build
        from nidiff.training.loop import seconds_per_step

        # Images of a folder are read when they are needed, and compiling takes longer than the answer should.
        trainer = build(replace(self.experiment, compile=False), memory_limit=0)
        facts, experiment, seconds = trainer.facts, self.experiment.resolved(), seconds_per_step(trainer)
        values = trainer.data.values
        stored = values.whole if isinstance(values, Crops) else values
        size = math.prod(stored.shape) * stored.dtype.itemsize
        estimate = {
            "experiment": experiment.to_json(),
            **facts,
            "weights_gradients_adam_ema_mb": round(BYTES * facts["parameters"] / 2**20, 1),
            "data_mb": round(size / 2**20, 1) if size <= MEMORY_LIMIT else 0.0,
            "steps_per_s": float(f"{1 / seconds:.3g}"),
            "images_per_s": float(f"{experiment.batch_size / seconds:.3g}"),
            "hours_to_the_end": float(f"{seconds * experiment.steps / 3600:.3g}"),
        }
        trainer.accelerator.print(json.dumps(estimate, indent=2))


def run_name(preset: str, config: str | Path | None) -> str:
    """The name of a run that is given none: that of the preset, or of the file or directory of the config."""
    path = Path(preset if config is None else os.path.abspath(config))  # a dot has no name
    return path.parent.name if path.name == EXPERIMENT else path.stem


def _resume(trainer: "Trainer", run: "RunDirectory", cooldown: int | None) -> "Trainer":
    """The trainer where the run stopped; with ``cooldown``, that of the run that ends after so many steps."""
    from nidiff.training.checkpoint import load_checkpoint
    from nidiff.training.loop import restore

    run.check_same(trainer)
    if checkpoint := load_checkpoint(run.checkpoints, *run.identities):
        restore(trainer, checkpoint)
        for line in checkpoint.damaged:
            _say(trainer, f"skipped a checkpoint that cannot be used: {line}")
    if cooldown is not None:
        if not trainer.step:
            raise InputError("finish", None, "needs a checkpoint, and the run has none", "leave it out")
        trainer = replace(trainer, experiment=trainer.experiment.ended(trainer.step, cooldown))
    run.check_steps(trainer)
    trainer.accelerator.wait_for_everyone()  # nothing is written before all have read
    if trainer.accelerator.is_main_process:
        run.resume(trainer)
    _say(trainer, f"resuming {run.folder} after step {trainer.step} of {trainer.experiment.steps}")
    return trainer


def _place(trainer: "Trainer") -> str:
    """Where a run trains: whoever asked for two processes sees whether there are two."""
    from nidiff.training.sharding import is_sharded

    accelerator = trainer.accelerator
    count, kind = accelerator.num_processes, accelerator.device.type
    parts = ", each with a part of the network" if is_sharded(trainer.net) else ""
    precision = "fp32" if accelerator.mixed_precision == "no" else accelerator.mixed_precision
    return f"training on {count} process{'es' if count > 1 else ''}{parts}, {kind}, {precision}"


def _say(trainer: "Trainer", text: str) -> None:
    trainer.accelerator.print(printable(text), file=sys.stderr)
