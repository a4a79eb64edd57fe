"""``nidiff train``: from a data set to a trained model."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.commands.usage import check_words, parse
from nidiff.errors import InputError, one_of
from nidiff.extras import require
from nidiff.files import as_path
from nidiff.model.zoo import find_model
from nidiff.training.experiment import PRESETS, Experiment, experiment_file, read_experiment

if TYPE_CHECKING:
    from nidiff.training.build import Trainer
    from nidiff.training.run import RunDirectory


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
    overwrite: bool = False
    """Replace the run that the directory holds, which is lost."""
    report: bool = True
    """Write report.html at the end."""
    dry_run: bool = False
    """Print the experiment, the size of the network, memory, and an estimate of the speed and the time to the end."""

    @staticmethod
    def defaults(arguments: list[str]) -> "Train":
        """The defaults of the flags: those of --preset or --config, or of the run that --resume continues."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("--preset", "--config", "--out"):
            parser.add_argument(name, nargs="?")
        parser.add_argument("--resume", action="store_true")
        given, _ = parser.parse_known_args(arguments)
        for name in ("config", "out"):
            if getattr(given, name) == "":
                raise InputError(name, None, "is empty", "give a path, or leave it out")
        if given.preset is not None and given.config is not None:
            raise InputError("preset", given.preset, "excludes `config`", "give one of them")
        out = None if given.out is None else as_path("out", given.out)
        if given.resume and out and given.preset is None and given.config is None:
            with suppress(InputError):  # `RunDirectory.check` says what is wrong with it
                return Train(read_experiment(experiment_file(out)))
        if given.config is not None:
            return Train(read_experiment(find_model(given.config, "config")))
        return Train(PRESETS[one_of("preset", "digits" if given.preset is None else given.preset, PRESETS)])

    @classmethod
    def parsed(cls, words: Sequence[str]) -> "Train":
        """The run that the words of a command line ask for; its flags have the defaults of a preset."""
        prog = "nidiff train"
        check_words(cls, words, prog=prog)
        default = cls.defaults([*words])
        settings = {**default.experiment.settings(), "report": True}
        on = {f"--{name}".replace("_", "-") for name, value in settings.items() if value is True}
        words = [word for word in words if word not in on]  # tyro takes only --no-… for a flag that is on by default
        return parse(cls, words, prog=prog, default=default)

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        if self.dry_run:
            self._dry_run()
        elif (folder := self.train()) is not None:
            print(folder)

    def train(self) -> Path | None:
        """Train to the end; returns the run directory, on the main process."""
        import torch
        from accelerate import PartialState

        from nidiff.report.html import write_report
        from nidiff.training.build import build
        from nidiff.training.loop import train

        run, asked = self.directory(), {"resume": self.resume, "overwrite": self.overwrite}
        run.check(self.experiment, **asked)
        processes = PartialState(cpu=not torch.cuda.is_available())
        processes.wait_for_everyone()  # nothing is written before all have looked
        with run.claim(self.experiment, **asked) if processes.is_main_process else nullcontext():
            processes.wait_for_everyone()
            stored = run.stored() if self.resume else None
            process = None if stored is None else (run.identity or {}).get("process")
            trainer = build(self.experiment, stored=stored, process=process)
            for note in trainer.notes:
                _say(trainer, note)
            if skipped := trainer.data.skipped:
                _say(trainer, f"skipped {len(skipped)} corrupt: {', '.join(skipped)}")
            self._resume(trainer, run) if self.resume else self._begin(trainer, run)
            processes.wait_for_everyone()
            train(trainer, run)
            if not processes.is_main_process:
                return None
            if self.report:
                first = trainer.data.batch(torch.tensor([0]))[0]
                _say(trainer, f"wrote {write_report(run.folder, first)}")
            return run.folder

    def directory(self) -> "RunDirectory":
        from nidiff.training.run import RunDirectory

        config = Path(self.preset if self.config is None else os.path.abspath(self.config))  # a dot has no name
        name = config.parent.name if config.name == "experiment.json" else config.stem
        return RunDirectory(Path("runs") / name if self.out is None else self.out)

    def _begin(self, trainer: "Trainer", run: "RunDirectory") -> None:
        if trainer.accelerator.is_main_process:
            facts = _facts(trainer) | {"gaussian": trainer.baseline}
            run.begin(trainer.experiment, trainer.denoiser, trainer.data.grid, facts, trainer.identity)

    def _resume(self, trainer: "Trainer", run: "RunDirectory") -> None:
        from nidiff.training.checkpoint import load_checkpoint
        from nidiff.training.loop import restore

        run.check_same(trainer.identity)
        checkpoint = load_checkpoint(run.checkpoints, trainer.identity, use=partial(restore, trainer))
        for line in checkpoint.damaged if checkpoint else ():
            _say(trainer, f"skipped a checkpoint that cannot be used: {line}")
        run.check_steps(trainer.step, self.experiment)
        trainer.accelerator.wait_for_everyone()  # nothing is written before all have read
        if trainer.accelerator.is_main_process:
            facts = {**run.facts, **_facts(trainer)}
            run.resume(trainer.step, trainer.experiment, trainer.denoiser, facts, trainer.identity)
        _say(trainer, f"resuming {run.folder} after step {trainer.step}")

    def _dry_run(self) -> None:
        from nidiff.data.spec import MEMORY_LIMIT
        from nidiff.training.build import BYTES, build
        from nidiff.training.speed import seconds_per_step

        # Images of a folder are read when they are needed, and compiling takes longer than the answer should.
        trainer = build(replace(self.experiment, compile=False), memory_limit=0)
        facts, experiment, seconds = _facts(trainer), self.experiment.resolved(), seconds_per_step(trainer)
        size = math.prod(trainer.data.values.shape) * trainer.data.values.dtype.itemsize
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


def _say(trainer: "Trainer", text: str) -> None:
    trainer.accelerator.print(text, file=sys.stderr)


def _facts(trainer: "Trainer") -> dict[str, Any]:
    """What came of the settings, for people to read."""
    conditions = {
        name: condition.classes or list(condition.shape) for name, condition in trainer.denoiser.conditions.items()
    }
    return {
        "images": len(trainer.data),
        "image_shape": list(trainer.data.shape),
        **({"conditions": conditions} if conditions else {}),
        "parameters": sum(p.numel() for p in trainer.net.parameters()),
    }
