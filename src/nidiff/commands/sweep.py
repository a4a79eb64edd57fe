"""``nidiff sweep``: a grid of training runs, one after the other, and their table."""

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro.conf import Fixed, Suppress, arg

from nidiff.aligned import aligned
from nidiff.commands.flags import Comparing, Drawing, Measuring, QuietFlag
from nidiff.commands.grid import TABLE, expand
from nidiff.commands.table import Table
from nidiff.commands.train import Train
from nidiff.commands.usage import own_flags, parse, split_flags
from nidiff.errors import InputError, Interrupted, shown
from nidiff.extras import require
from nidiff.locks import claimed
from nidiff.notation import parse_seeds
from nidiff.plugins import import_words

if TYPE_CHECKING:
    from nidiff.training.experiment import Experiment
    from nidiff.training.run import RunDirectory

PROG = "nidiff sweep"
NEW, BEGUN, FINISHED = "new", "to resume", "finished"


class Planned(NamedTuple):
    """A run of the sweep: its command, ready to train, and what is there of it."""

    name: str
    train: Train
    words: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class Sweep:
    """Train a grid of settings, one run after the other, and compare them in a table. The same command resumes it.

    It takes the flags of nidiff train, whose values may be lists: --covariance gff:gamma=0,0.5,1 --seed 0-2 --widths
    32/64 64/128. See docs/sweep.md.
    """

    drawing: Annotated[Drawing, arg(name="")]
    measuring: Annotated[Measuring, arg(name="")]
    out: Annotated[Path, arg(metavar="DIR")] = Path("runs/sweep")
    """Where the runs go, each in a directory named by what varies, and the table, in table/."""
    samplers: tuple[str, ...] = ("dpmpp_2m",)
    """Of the table, the same as in nidiff sample."""
    num_steps: tuple[int, ...] = (100, 20, 10)
    """Of the table: numbers of steps."""
    commands: Annotated[bool, arg(help_behavior_hint="")] = False
    """Only print a nidiff train command for each run that is not finished, one per line, for a scheduler."""
    dry_run: Annotated[bool, arg(help_behavior_hint="")] = False
    """Only check the grid and list its runs."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False
    grid: Annotated[Mapping[str, Sequence[str]], Fixed, Suppress] = field(default_factory=dict)

    also = (Train,)  # whose flags are taken too

    @classmethod
    def parsed(cls, words: Sequence[str]) -> "Sweep":
        """The sweep that the words of a command line ask for."""
        if {"-h", "--help"} & {*words}:
            return parse(cls, ["--help"], prog=PROG)
        (_, loose), *given = split_flags(cls, words, PROG)
        if loose:
            raise InputError(None, None, f"{shown(loose[0])} is one argument too many", f"see {PROG} --help")
        names, mine = [flag.replace("--no-", "--", 1) for flag, _ in given], own_flags(cls)
        for name in names:
            if name in ("--resume", "--finish", "--overwrite"):
                remedy = "leave it out: a sweep resumes what has begun, and replaces nothing"
                raise InputError(name, None, f"is not a flag of {PROG}", remedy)
            if names.count(name) > 1:
                raise InputError(name, None, "is given twice", "give it once, with all of its values after it")
        own_words = [word for flag, values in given if flag in mine for word in (flag, *values)]
        grid = {flag: values for flag, values in given if flag not in mine}
        return replace(parse(cls, own_words, prog=PROG), grid=grid)

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        from nidiff.generation.loaded_model import process_state

        runs = self.planned()
        left = [run for run in runs if run.state != FINISHED]
        if self.commands:
            for run in left:
                print(shlex.join(["nidiff", *import_words(), *run.words]))
            print(f"when they have ended, the same {PROG} without --commands makes the table", file=sys.stderr)
            return
        self._check(left)
        if self.dry_run:
            print(aligned([("run", "state"), *((run.name, run.state) for run in runs)]))
            return
        with claimed(self.out) if process_state().is_main_process else contextlib.nullcontext():
            try:
                for number, run in enumerate(runs, 1):
                    print(f"run {number} of {len(runs)}: {run.name} ({run.state})", file=sys.stderr, flush=True)
                    if run.state != FINISHED:
                        run.train.train()
                self._table(runs).run()
            except (Interrupted, KeyboardInterrupt) as error:
                reason = str(error).rstrip(".") or "interrupted"
                raise Interrupted(f"{reason}; the same {PROG} command continues the whole sweep.") from error

    def planned(self) -> list[Planned]:
        """The runs of the grid, and what there is of each."""
        from nidiff.evaluation.seeds import settings_of

        planned: list[Planned] = []
        known: list[dict[str, Any]] = []
        for name, words in expand(self.grid):
            words = ("train", *words, "--out", str(self.out / name))
            train = Train.parsed(words[1:])
            settings = settings_of(train.experiment)
            if settings in known:
                same = f"{planned[known.index(settings)].name!r} and {name!r} of the grid are the same training"
                raise InputError(None, None, same, "leave one out")
            known.append(settings)
            for flag in ("warmup", "cooldown"):
                if (length := getattr(train.experiment, flag)) > (steps := train.experiment.steps):
                    raise InputError(flag, length, f"is more than steps={steps}", f"give `{flag}` with `steps`")
            state = _state(train.directory(), train.experiment)
            if state == BEGUN:
                train, words = replace(train, resume=True), (*words, "--resume")
            planned.append(Planned(name, train, words, state))
        return planned

    def _table(self, runs: Sequence[Planned]) -> Table:
        return Table(
            runs=tuple(self.out / run.name for run in runs),
            drawing=self.drawing,
            comparing=Comparing(**vars(self.measuring)),
            samplers=self.samplers,
            num_steps=self.num_steps,
            out=self.out / TABLE,
            json=self.json,
        )

    def _check(self, runs: Sequence[Planned]) -> None:
        """Build each setting with its data, without a step of training, draw an image for each cell of the table, and
        open what it compares with: what would be refused after hours is refused before the first run."""
        from nidiff.evaluation.evaluator import open_evaluator
        from nidiff.sampling.sampler import rehearse
        from nidiff.training.build import build

        if not (self.samplers and self.num_steps):
            raise InputError("samplers", None, "and `num_steps` are empty", "give one of each, or more")
        self._table([]).check_out()
        tried: list[Experiment] = []
        for run in runs:
            experiment = replace(run.train.experiment, seed=0, compile=False)
            if experiment in tried:  # they differ only in the seed
                continue
            print(f"checking {run.name}", file=sys.stderr, flush=True)
            trainer = build(experiment, memory_limit=0)
            for sampler, steps in product(self.samplers, self.num_steps):
                rehearse(trainer.denoiser, trainer.data.shape, sampler=sampler, num_steps=steps)
            if experiment.data not in [other.data for other in tried]:
                evaluator = open_evaluator(self.out, trainer.data, **vars(self.measuring))
                evaluator.check(tuple(trainer.data.shape), len(parse_seeds(self.drawing.seeds)))
            tried.append(experiment)


def _state(run: "RunDirectory", experiment: "Experiment") -> str:
    """What there is of a run; one of other settings is refused."""
    from nidiff.training.checkpoint import list_checkpoints, step_of

    begun, steps = run.exists(), experiment.steps
    run.check(experiment, resume=begun, overwrite=False)
    if not begun:
        return NEW
    newest = [step_of(path) for path in list_checkpoints(run.checkpoints)[-1:]]
    is_done = run.has_model and run.experiment.steps == steps and all(step >= steps for step in newest)
    return FINISHED if is_done else BEGUN
