"""``nidiff sweep``: a grid of training runs, one after the other, and their table."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro.conf import Fixed, Suppress, arg

from nidiff.aligned import aligned
from nidiff.commands.flags import Comparing, Drawing, Measuring
from nidiff.commands.grid import TABLE, expand, split_flags, without_no
from nidiff.commands.table import Table
from nidiff.commands.train import Train
from nidiff.commands.usage import check_words, flags_of, own_flags, parse
from nidiff.errors import FileError, InputError, Interrupted
from nidiff.extras import require
from nidiff.notation import parse_seeds

if TYPE_CHECKING:
    from nidiff.data.dataset import Dataset
    from nidiff.training.experiment import Experiment
    from nidiff.training.run import RunDirectory

PROG = "nidiff sweep"
NEW, BEGUN, FINISHED = "new", "to resume", "finished"
NOT_HERE = {
    "--resume": "leave it out: a sweep resumes what has begun and skips what is finished",
    "--overwrite": "delete the run, or choose another --out: a sweep replaces nothing",
}


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
    grid: Annotated[Mapping[str, Sequence[str]], Fixed, Suppress] = field(default_factory=dict)
    table_words: Annotated[tuple[str, ...], Fixed, Suppress] = ()

    also = (Train,)  # whose flags are taken too

    @classmethod
    def parsed(cls, words: Sequence[str]) -> "Sweep":
        """The sweep that the words of a command line ask for."""
        check_words(cls, words, prog=PROG)
        if {"-h", "--help"} & {*words}:
            return parse(cls, ["--help"], prog=PROG)
        known, own_names = flags_of(cls), own_flags(cls)
        given = split_flags(words, known, PROG)
        for flag in (bare for flag in given if (bare := without_no(flag, known)) in NOT_HERE):
            raise InputError(flag, None, f"is not a flag of {PROG}", NOT_HERE[flag])
        mine = {flag: values for flag, values in given.items() if without_no(flag, known) in own_names}
        of_table = own_flags(Table).keys() - {"--out"}
        return replace(
            parse(cls, [word for flag, values in mine.items() for word in (flag, *values)], prog=PROG),
            grid={flag: values for flag, values in given.items() if flag not in mine},
            table_words=tuple(word for flag in mine if flag in of_table for word in (flag, *mine[flag])),
        )

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        runs = self.planned()
        left = [run for run in runs if run.state != FINISHED]
        if self.dry_run:
            print(aligned([("run", "state"), *((run.name, run.state) for run in runs)]))
        elif self.commands:
            for run in left:
                print(shlex.join(["nidiff", *run.words]))
            table = ["nidiff", "table", *(str(self.out / run.name) for run in runs), *self._table_words()]
            print(f"when they have ended: {shlex.join(table)}", file=sys.stderr)
        else:
            self._check(left)
            try:
                self._train(runs)
                self._table(runs).run()
            except (Interrupted, KeyboardInterrupt) as error:
                reason = str(error).rstrip(".") or "interrupted"
                raise Interrupted(f"{reason}; the same {PROG} command continues the whole sweep.") from error

    def planned(self) -> list[Planned]:
        """The runs, of which each is checked as far as that is possible without its data."""
        from nidiff.evaluation.seeds import settings_of

        if self.out.exists() and not self.out.is_dir():
            raise FileError("out", str(self.out), "is a file", "choose another directory")
        self._check_table()
        planned: list[Planned] = []
        known: list[tuple[dict[str, Any], str]] = []
        for name, words in expand(self.grid):
            words = ("train", *words, "--out", str(self.out / name))
            train = Train.parsed(words[1:])
            settings = settings_of(train.experiment)
            if same := next((other for before, other in known if before == settings), None):
                raise InputError(
                    None, None, f"{same!r} and {name!r} of the grid are the same training", "leave one out"
                )
            known.append((settings, name))
            _check_experiment(train.experiment)
            state = _state(train.directory(), train.experiment)
            if state == BEGUN:
                train, words = replace(train, resume=True), (*words, "--resume")
            planned.append(Planned(name, train, words, state))
        return planned

    def _train(self, runs: Sequence[Planned]) -> None:
        for number, run in enumerate(runs, 1):
            print(f"run {number} of {len(runs)}: {run.name} ({run.state})", file=sys.stderr, flush=True)
            if run.state != FINISHED:
                run.train.train()

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

    def _table_words(self) -> list[str]:
        """The flags of ``nidiff table``; its own defaults of samplers and steps are others."""
        words = [*self.table_words, "--out", str(self.out / TABLE)]
        for flag, values in (("--samplers", self.samplers), ("--num-steps", self.num_steps)):
            words += [] if flag in words else [flag, *map(str, values)]
        return words

    def _check_table(self) -> None:
        """Refuse what the table would refuse for any model."""
        from nidiff.evaluation.metrics import check_bootstrap
        from nidiff.recipe import check_whole
        from nidiff.sampling.sampler import as_sampler

        if not (self.samplers and self.num_steps):
            raise InputError("samplers", None, "and `num_steps` are empty", "give one of each, or more")
        for sampler in self.samplers:
            as_sampler(sampler)
        for steps in self.num_steps:
            check_whole("num_steps", steps)
        check_bootstrap(self.measuring.bootstrap)
        check_whole("k", self.measuring.k)
        parse_seeds(self.drawing.seeds)
        self._table([]).check_out()

    def _check(self, runs: Sequence[Planned]) -> None:
        """Build each setting with its data, without a step of training, and draw an image for each cell of the table:
        what would be refused after hours is refused before the first run."""
        from nidiff.sampling.sampler import rehearse
        from nidiff.training.build import build

        tried: list[Experiment] = []
        for run in runs:
            experiment = replace(run.train.experiment, seed=0, compile=False)
            if experiment in tried:  # they differ only in the seed
                continue
            print(f"checking {run.name}", file=sys.stderr, flush=True)
            trainer = build(experiment, memory_limit=0)
            for sampler in self.samplers:
                for steps in self.num_steps:
                    rehearse(trainer.denoiser, trainer.data.shape, sampler=sampler, num_steps=steps)
            if experiment.data.source not in [other.data.source for other in tried]:
                self._check_measuring(trainer.data)
            tried.append(experiment)

    def _check_measuring(self, data: "Dataset") -> None:
        """Refuse features that are not there, and too few samples, before hours of training."""
        from nidiff.evaluation.evaluator import USUAL_FEATURES, are_pictures
        from nidiff.evaluation.features import load_features

        features, trust, k = self.measuring.features, self.measuring.trust_features, self.measuring.k
        if are_pictures(data):
            load_features(features or USUAL_FEATURES, file=self.measuring.features_file, trust=trust)
            if len(parse_seeds(self.drawing.seeds)) <= k:
                raise InputError("seeds", self.drawing.seeds, f"are too few for k={k}", "give k + 1 or more")
        elif features is not None:
            load_features(features, shape=data.shape, trust=trust)


def _check_experiment(experiment: "Experiment") -> None:
    """Refuse names that are not known, and settings that contradict each other, without reading data."""
    from nidiff.covariance.config import check_text
    from nidiff.diffusion.objective import WEIGHTINGS
    from nidiff.errors import one_of
    from nidiff.training.build import check_sampling

    one_of("weighting", experiment.weighting, WEIGHTINGS)
    check_text(experiment.covariance)
    check_sampling(experiment)
    for name in ("warmup", "cooldown"):
        if (length := getattr(experiment, name)) > experiment.steps:
            problem = f"is more than steps={experiment.steps}"
            raise InputError(name, length, problem, f"give `{name}` with `steps`")


def _state(run: "RunDirectory", experiment: "Experiment") -> str:
    """What there is of a run; one of other settings is refused."""
    from nidiff.training.checkpoint import list_checkpoints, step_of

    begun = run.exists()
    run.check(experiment, resume=begun, overwrite=False)
    if not begun:
        return NEW
    if (steps := run.experiment.steps) != experiment.steps:
        problem = f"holds a run of {steps} steps, and `steps` is {experiment.steps}"
        raise FileError("out", str(run.folder), problem, "choose another directory")
    newest = [step_of(path) for path in list_checkpoints(run.checkpoints)[-1:]]
    return FINISHED if run.has_model and all(step >= steps for step in newest) else BEGUN
