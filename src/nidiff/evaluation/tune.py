"""The sampler for few evaluations of a network, chosen by trial against held-out data.

Candidates are compared on one half of the held-out data by a few samples each; the better third is compared again by
more samples, and so on (successive halving). All of them have the same seeds, so their differences are less noisy than
their scores. The one that is chosen, and the default, are then measured with other seeds on the other half, which had
no part in the choice: the smallest of many noisy numbers is too small.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.aligned import aligned
from nidiff.data.dataset import Dataset, as_stored, quantise
from nidiff.data.sources import spread_rows
from nidiff.design.samplers import sampler_candidates
from nidiff.diffusion.choice import Choice
from nidiff.diffusion.condition import CLASSES
from nidiff.diffusion.denoiser import Denoiser, check_denoiser
from nidiff.errors import InputError, one_of
from nidiff.evaluation.evaluator import Evaluator, open_evaluator
from nidiff.evaluation.metrics import METRICS, measure
from nidiff.evaluation.results import Measured
from nidiff.evaluation.samples import SampleSet
from nidiff.generation.conditioning import Conditioning, plan_conditions
from nidiff.generation.job import draw_blocks
from nidiff.progress import Progress
from nidiff.randomness import permutation
from nidiff.recipe import check_whole
from nidiff.sampling.sampler import DEFAULT, Diverged, sample
from nidiff.sampling.tile import tile_size

SCORED = {True: ("frechet",), False: ("spectrum", "values", "increments")}  # of pictures, of all other data
SHOWN = {True: ("frechet", "kernel"), False: ("spectrum", "values", "increments")}
RUNGS = {True: (64, 256, 1024), False: (32, 64, 128)}  # samples of each candidate, if its numbers are few
FEWEST = {True: 32, False: 8}  # samples, whatever the size of an item and the budget
MOST_NUMBERS = 2**14  # of an item: of larger ones there are fewer samples
KEPT = 3  # of so many candidates one goes on
CLEAR, TIED = 3.0, 1.0  # standard errors: beyond which a candidate is worse, within which the default is as good
GROUPS = 8  # of samples, that the jackknife leaves out in turn
BLOCK = 10**9  # seeds of the choice begin here and those of the report at twice that, far from those of users
MOST_EVALUATIONS = 1000
MOST_ROWS = 15  # of a table


@dataclass(frozen=True, eq=False)
class Trial:
    """A sampler at one number of evaluations."""

    evaluations: int
    sampler: str
    num_steps: int
    calls: int
    """Of the network, for one image."""
    num_samples: int = 0
    """By which it was judged last."""
    score: float | None = None
    """On the half that the choice is made on: the mean of the metrics; None if it diverged."""
    error: float | None = None
    """The standard error of its difference from the best, by the same seeds."""
    report: Mapping[str, Measured] = field(default_factory=dict)
    """On the other half, with other seeds: of the one that is chosen, and of the default."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """What was tried, and the choice for each number of evaluations."""

    trials: tuple[Trial, ...]
    """By number of evaluations, the chosen one first, then the best."""
    default: str
    metrics: tuple[str, ...]
    """Whose mean is the score."""
    real: Mapping[str, Measured]
    """The same metrics of real data against real data: of ``num_floor`` items of one half against the other."""
    num_floor: int
    data: str
    num_real: int
    """Items in the half that is reported on."""

    @property
    def chosen(self) -> dict[int, Trial]:
        """The trial that was chosen for each number of evaluations."""
        first = {trial.evaluations: trial for trial in reversed(self.trials)}
        return dict(sorted(first.items()))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """For `Denoiser.with_choices` and `nidiff.save_model`."""
        return tuple(
            Choice(count, trial.sampler, trial.num_steps, self._facts(trial)) for count, trial in self.chosen.items()
        )

    def _facts(self, trial: Trial) -> dict[str, Any]:
        facts: dict[str, Any] = {"data": self.data, "num_real": self.num_real, "num_samples": trial.num_samples}
        sides = {"chosen": trial.report, "default": self._of_default(trial.evaluations).report, "real": self.real}
        facts |= {name: _json(side) for name, side in sides.items()}
        return facts | {"default_sampler": self.default, "score": list(self.metrics)}

    def _of_default(self, count: int) -> Trial:
        return next(trial for trial in self.trials if (trial.evaluations, trial.sampler) == (count, self.default))

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        trials = [asdict(trial) | {"report": _json(trial.report)} for trial in self.trials]
        values = asdict(self) | {"trials": trials, "real": _json(self.real)}
        return values | {"chosen": {str(count): trial.sampler for count, trial in self.chosen.items()}}

    def text(self) -> str:
        """A table for each number of evaluations, for a terminal."""
        parts, names = [], [*self.real]
        score = " + ".join(self.metrics) + (f", divided by {len(self.metrics)}" if len(self.metrics) > 1 else "")
        for count, chosen in self.chosen.items():
            rows = [[f"{count} evaluation{'s' * (count > 1)}", "samples", "score", "+-", *names]]
            trials = [trial for trial in self.trials if trial.evaluations == count]
            for trial in trials[:MOST_ROWS]:
                mark = " (chosen)" if trial is chosen else ""
                mark += " (default)" if trial.sampler == self.default else ""
                steps = "" if trial.num_steps == count else f", {trial.num_steps} steps"
                numbers = [_number(trial.score), _number(trial.error)]
                numbers += [_number(trial.report[name].value if name in trial.report else None) for name in names]
                rows.append([f"{trial.sampler}{steps}{mark}", str(trial.num_samples), *numbers])
            floor = [_number(metric.value) for metric in self.real.values()]
            rows.append(["real data against real data", str(self.num_floor), "", "", *floor])
            worse = len(trials) - MOST_ROWS
            parts.append(aligned(rows) + (f"\n{worse} worse ones are in the JSON" if worse > 0 else ""))
        parts.append(
            f"score: {score}, on one half of {self.data}; +-: the standard error of its difference from the best,\n"
            f"by the same seeds. {' and '.join(names)}: on the other half, {self.num_real} items, with other seeds."
        )
        return "\n\n".join(parts)


def tune(
    denoiser: Denoiser,
    held_out: Evaluator | Dataset | Tensor,
    evaluations: Sequence[int] = (5, 10),
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> Tuning:
    """Try samplers with ``denoiser``, and choose one for each number of ``evaluations``: of calls of the network for an
    image. A step of `heun` takes two, and so does guidance.

    Nothing is stored: ``denoiser.with_choices(tuning.choices)`` is the denoiser that `nidiff.sample` draws with the
    chosen sampler for so many steps, and `nidiff.save_model` stores them with it.

    Args:
        held_out: data that the network was not trained on, in their own units; or an `Evaluator` of them.
        progress: called with the calls of the network that are done, and with how many there are at most.
        settings: those of `plan_tuning`: ``metric``, ``candidates``, ``num_samples``, ``budget``, ``seed``, ….
    """
    return plan_tuning(denoiser, held_out, evaluations, **settings).run(progress)


def plan_tuning(
    denoiser: Denoiser,
    held_out: Evaluator | Dataset | Tensor,
    evaluations: Sequence[int] = (5, 10),
    *,
    metric: str | Sequence[str] | None = None,
    candidates: Sequence[str] | None = None,
    default: str = DEFAULT,
    num_samples: Sequence[int] | None = None,
    budget: int | None = None,
    seed: int = 0,
    batch: int = 128,
    **settings: Any,
) -> "Plan":
    """What `tune` is to try, checked; nothing is drawn yet.

    Args:
        metric: one or more of `METRICS`, of which 0 is best; the score is their mean. Default: "frechet" of 8-bit
            pictures, and "spectrum", "values" and "increments" of all other data.
        candidates: samplers as NAME:key=value,…. Default: `nidiff.design.sampler_candidates`.
        default: the sampler that is tried in any case, and chosen where none is better beyond the noise.
        num_samples: of each candidate, in the first comparison and in those of the better third after it.
        budget: how many samples may be drawn in all; comparisons are of fewer samples then.
        seed: another one has other samples.
        batch: how many are drawn at a time, which does not change them.
        settings: how data are compared, such as ``features``: arguments of `open_evaluator`.
    """
    check_denoiser(denoiser)
    if not isinstance(held_out, Evaluator):
        boundary = denoiser.process.covariance.spatial.boundary or None
        held_out = open_evaluator(Path("held_out"), held_out, **{"boundary": boundary, **settings})
    elif settings:
        raise InputError(next(iter(settings)), None, "is settled by the evaluator", "leave it out")
    check_whole("seed", seed, 0, BLOCK)
    counts, shape = _check_counts(evaluations), tuple(held_out.items.shape[1:])
    denoiser.process.covariance.check_trailing(shape, "data")
    keys = _check_metrics(held_out, metric)
    least = 2 * (held_out.k + 1 if held_out.network else 2)
    if len(held_out.items) < least:
        problem = f"has {len(held_out.items)} held-out items ({held_out.name}), too few to halve"
        raise InputError("data", None, problem, f"give {least} or more")
    trials = _trials(denoiser, shape, counts, candidates, default)
    sizes = Counter(trial.evaluations for trial in trials)
    rungs = _rungs(held_out, num_samples, budget, [*sizes.values()])
    labels, classes = held_out.data.labels, None
    if CLASSES in denoiser.conditions and labels is not None:  # drawn as in the data
        classes = labels[permutation(len(labels), seed)].tolist()
    conditioning = Conditioning() if denoiser.condition_values else plan_conditions(denoiser, classes)
    return Plan(denoiser, held_out, trials, default, keys, rungs, conditioning, seed, check_whole("batch", batch))


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that is to be tried, checked; `run` draws and chooses."""

    denoiser: Denoiser
    evaluator: Evaluator
    trials: tuple[Trial, ...]
    default: str
    keys: tuple[str, ...]
    """Of the metrics whose mean is the score."""
    rungs: tuple[int, ...]
    """Samples of each candidate, comparison by comparison."""
    conditioning: Conditioning
    seed: int
    batch: int

    @property
    def by_count(self) -> dict[int, list[Trial]]:
        """The trials of each number of evaluations."""
        counts = dict.fromkeys(trial.evaluations for trial in self.trials)
        return {count: [trial for trial in self.trials if trial.evaluations == count] for count in counts}

    @property
    def num_candidates(self) -> int:
        return len({trial.sampler for trial in self.trials})

    @property
    def samples(self) -> int:
        """How many samples are drawn at most."""
        return sum(_most_samples(len(trials), self.rungs) for trials in self.by_count.values())

    @property
    def calls(self) -> int:
        """How often the network is called for one image, over all images, at most."""
        return sum(count * _most_samples(len(trials), self.rungs) for count, trials in self.by_count.items())

    def run(self, progress: Progress | None = None, found: Callable[[Tuning], None] | None = None) -> Tuning:
        """Draw, compare and choose; ``found`` is called with what is known after each number of evaluations."""
        real, other = self.evaluator.halves
        some = real.resampled(spread_rows(len(real), min(self.rungs[-1], len(real))))
        floor, scored = (measure(other, some, bootstrap=0, keys=keys) for keys in (self.shown, self.keys))
        about = (self.default, tuple(scored), floor, len(some), self.evaluator.name, len(other))
        done, total, tuning = 0, self.calls, Tuning((), *about)
        for count, candidates in self.by_count.items():

            def show(calls: float, before: int = done) -> None:
                if progress is not None:
                    progress(before + calls, total)

            show(0)
            tuning = Tuning((*tuning.trials, *_Contest(self, show).judged(candidates)), *about)
            if found is not None:
                found(tuning)
            done += count * _most_samples(len(candidates), self.rungs)
        return tuning

    @property
    def shown(self) -> tuple[str, ...]:
        """The keys of the metrics that are reported."""
        return tuple(dict.fromkeys((*self.keys, *SHOWN[self.evaluator.is_picture])))


class _Contest:
    """The candidates at one number of evaluations, and what was drawn of each of them."""

    def __init__(self, plan: Plan, show: Callable[[float], None]) -> None:
        self.plan, self.show, self.calls = plan, show, 0
        self._drawn: dict[tuple[str, int], tuple[Tensor, Tensor | None]] = {}
        self._without: dict[tuple[str, int], Tensor] = {}

    def judged(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials with their scores: first the one that is chosen, then those that were judged by more samples, the
        best first."""
        judged: dict[str, Trial] = {}
        for size in self.plan.rungs:
            ranked = sorted((self._scored(trial, size) for trial in trials), key=_rank)
            best, default = ranked[0], next(trial for trial in ranked if trial.sampler == self.plan.default)
            if best.score is None:
                problem = f"all end in NaN or infinite numbers, or in one image, at {best.evaluations} evaluations"
                raise InputError("candidates", None, problem, "allow more, or check the weights of the network")
            is_last = size == self.plan.rungs[-1]
            compared = [best, *([] if is_last else ranked[1 : max(2, math.ceil(len(ranked) / KEPT))]), default]
            errors = {trial.sampler: self._error(trial, best, size) for trial in compared}
            ranked = [replace(trial, error=errors.get(trial.sampler)) for trial in ranked]
            judged = {trial.sampler: trial for trial in ranked} | {
                name: trial for name, trial in judged.items() if name not in {each.sampler for each in ranked}
            }
            near = [trial for trial in ranked if trial.sampler in errors and _is_near(trial, best, CLEAR)]
            trials = [trial for trial in ranked if trial in near or trial.sampler == default.sampler]
            self._drawn = {key: drawn for key, drawn in self._drawn.items() if key[0] in {t.sampler for t in trials}}
            if len(trials) == 1:
                break
        best, default = next(iter(judged.values())), judged[self.plan.default]
        chosen = default if _is_near(default, best, TIED) else best
        for trial in {chosen.sampler: chosen, default.sampler: default}.values():
            judged[trial.sampler] = replace(trial, report=self._report(trial))
        return sorted(judged.values(), key=lambda trial: trial.sampler != chosen.sampler)

    def _scored(self, trial: Trial, size: int) -> Trial:
        """The trial with its score on the first half; without one if it does not end in numbers."""
        samples = self._samples(trial, 0, size)
        score = math.nan if samples is None else self._score(samples)
        return replace(trial, num_samples=size, score=score if math.isfinite(score) else None, error=None)

    def _report(self, trial: Trial) -> dict[str, Measured]:
        """The metrics on the other half, of other samples."""
        samples = self._samples(trial, 1, self.plan.rungs[-1])
        real = self.plan.evaluator.halves[1]
        return {} if samples is None else measure(real, samples, bootstrap=0, keys=self.plan.shown)

    def _score(self, samples: SampleSet) -> float:
        measured = measure(self.plan.evaluator.halves[0], samples, bootstrap=0, keys=self.plan.keys)
        return sum(metric.value or 0.0 for metric in measured.values()) / len(measured)

    def _error(self, trial: Trial, best: Trial, size: int) -> float | None:
        """The standard error of the difference of two scores by the jackknife: both without the same seeds, a group of
        them at a time. (A resample of the bootstrap has samples twice, which changes distances of features.)"""
        if trial.score is None:
            return None
        first, second = (self._scores_without(each, size) for each in (trial, best))
        difference = first - second
        return ((GROUPS - 1) * difference.var(correction=0)).sqrt().item()

    def _scores_without(self, trial: Trial, size: int) -> Tensor:
        """The scores without each group of samples."""
        if (trial.sampler, size) not in self._without:
            samples, group = self._samples(trial, 0, size), torch.arange(size) % GROUPS
            assert samples is not None
            scores = [self._score(samples.resampled((group != out).nonzero()[:, 0])) for out in range(GROUPS)]
            self._without[trial.sampler, size] = torch.tensor(scores, dtype=torch.float64)
        return self._without[trial.sampler, size]

    def _samples(self, trial: Trial, half: int, size: int) -> SampleSet | None:
        """``size`` samples of the seeds of a half, of which those that are missing are drawn; None if some of them are
        not finite, or all of them the same."""
        plan, key = self.plan, (trial.sampler, half)
        evaluator, first = plan.evaluator, (2 * plan.seed + half + 1) * BLOCK
        items, features = self._drawn.get(key, (evaluator.items[:0], None))
        seeds = range(first + len(items), first + size)
        blocks = [seeds[i : i + plan.batch] for i in range(0, len(seeds), plan.batch)]
        arguments = {"sampler": trial.sampler, "num_steps": trial.num_steps, "tile": tile_size(*items.shape[2:])}
        drawings = ((plan.conditioning.bind(plan.denoiser, block), block, arguments) for block in blocks)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # a bad candidate has a bad score
                parts = draw_blocks(drawings, items.shape[1:], lambda n: self.show(self.calls + n * trial.calls))
                new = [as_data(images, plan.denoiser, evaluator) for images in parts]
        except InputError as error:
            if error.argument is not None:
                raise
            return None  # it diverged
        self.calls += len(seeds) * trial.calls
        if new:
            items, added = torch.cat([items, *new]), evaluator.features_of(torch.cat(new))
            features = added if features is None or added is None else torch.cat([features, added])
            self._drawn[key] = items, features
        return None if bool((items == items[0]).all()) else evaluator.as_set(items, features)


def as_data(images: Tensor, denoiser: Denoiser, evaluator: Evaluator) -> Tensor:
    """Images of a denoiser as the evaluator has its real data."""
    if evaluator.is_picture and denoiser.scaling is None:
        return quantise(images)
    dtype = "uint8" if evaluator.is_picture else evaluator.data.grid.dtype
    return as_stored(images, denoiser.scaling, dtype).to(evaluator.items.dtype)


def _rank(trial: Trial) -> float:
    return math.inf if trial.score is None else trial.score


def _is_near(trial: Trial, best: Trial, errors: float) -> bool:
    """Whether a trial is as good as the best, to within so many standard errors."""
    if trial.score is None or best.score is None:
        return False
    return trial.score - best.score <= errors * (trial.error or 0.0)


def _most_samples(candidates: int, rungs: Sequence[int]) -> int:
    """How many samples are drawn at one number of evaluations, if no candidate is dropped before it has to be."""
    total, before = 2 * rungs[-1], 0  # the last are those of the report
    for size in rungs:
        total += candidates * (size - before)
        before, candidates = size, min(candidates, max(2, math.ceil(candidates / KEPT)) + 1)
    return total


def _rungs(
    evaluator: Evaluator, num_samples: Sequence[int] | None, budget: int | None, candidates: Sequence[int]
) -> tuple[int, ...]:
    """The numbers of samples of the comparisons, fewer where items are large or the budget is small."""
    fewest = FEWEST[evaluator.is_picture]
    if num_samples is not None:
        sizes = tuple(check_whole("num_samples", size, GROUPS) for size in num_samples)
        if not sizes or any(a >= b for a, b in pairwise(sizes)):
            raise InputError("num_samples", num_samples, "do not rise", "give numbers such as 64 256 1024")
    else:
        share = min(1.0, MOST_NUMBERS / evaluator.items[0].numel())
        sizes = _scaled(RUNGS[evaluator.is_picture], share, fewest)
    if budget is None:
        return sizes
    check_whole("budget", budget)
    while (needed := sum(_most_samples(count, sizes) for count in candidates)) > budget and sizes[-1] > fewest:
        sizes = _scaled(sizes, 0.95, fewest)
    if needed > budget:
        problem = f"is too small for {max(candidates)} candidates at {len(candidates)} numbers of evaluations"
        raise InputError("budget", budget, problem, f"give {needed} samples or more, or fewer `candidates`")
    return sizes


def _scaled(sizes: Sequence[int], share: float, fewest: int) -> tuple[int, ...]:
    return tuple(sorted({max(fewest, int(size * share)) for size in sizes}))


def _check_counts(evaluations: Sequence[int]) -> list[int]:
    counts = [check_whole("evaluations", count, 1, MOST_EVALUATIONS) for count in evaluations]
    if not counts or len({*counts}) < len(counts):
        problem = "names a number twice" if counts else "is empty"
        raise InputError("evaluations", [*counts], problem, "give different numbers, such as 5 10")
    return counts


def _check_metrics(evaluator: Evaluator, metric: str | Sequence[str] | None) -> tuple[str, ...]:
    """The keys of the metrics whose mean is the score."""
    example = evaluator.as_set(evaluator.items[:1], torch.zeros(1, 1) if evaluator.network else None)
    usable = [key for key, each in METRICS.items() if each.applies(example) and not each.higher_is_better]
    if metric is None:
        return tuple(key for key in SCORED[evaluator.is_picture] if key in usable) or tuple(usable[:1])
    return tuple(
        dict.fromkeys(one_of("metric", key, usable) for key in ([metric] if isinstance(metric, str) else metric))
    )


def _trials(
    denoiser: Denoiser, shape: tuple[int, ...], counts: Sequence[int], candidates: Sequence[str] | None, default: str
) -> tuple[Trial, ...]:
    """The candidates with as many steps as each number of evaluations allows. One of the user's that cannot be drawn is
    refused; of ours, some may not fit every schedule."""
    texts = [default, *(sampler_candidates(denoiser) if candidates is None else candidates)]
    trials = []
    for count in counts:
        for text in dict.fromkeys(texts):
            try:
                trials.append(_trial(denoiser, shape, count, text))
            except InputError:
                if candidates is not None or text == default:
                    raise
    return tuple(trials)


def _trial(denoiser: Denoiser, shape: tuple[int, ...], count: int, text: str) -> Trial:
    for num_steps in range(count, 0, -1):
        if (calls := count_calls(denoiser, shape, text, num_steps)) <= count:
            return Trial(count, text, num_steps, calls)
    raise InputError("evaluations", count, f"are too few for one step of {text}", "give more, or leave it out")


def count_calls(denoiser: Denoiser, shape: Sequence[int], sampler: str, num_steps: int) -> int:
    """How often the network is called for one image, by drawing one with a network that returns 0; what `rescale` draws
    beforehand is not counted."""
    seen = 0

    def net(x: Tensor, label: Tensor, **conditions: Any) -> Tensor:
        nonlocal seen
        seen += len(x)
        return torch.zeros_like(x)

    counted = denoiser.with_zero_net().for_images(torch.tensor([0])).with_net(net)
    with warnings.catch_warnings(), contextlib.suppress(Diverged):
        warnings.simplefilter("ignore", UserWarning)
        sample(counted, (1, *shape), generator=[0], device="cpu", sampler=sampler, num_steps=num_steps, rescale=False)
    return seen


def _json(metrics: Mapping[str, Measured]) -> dict[str, float | None]:
    return {name: metric.finite for name, metric in metrics.items()}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
