"""Results over training seeds: runs that differ only in the seed as one group, and a paired test between groups."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from inspect import signature
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nidiff.covariance.fields import ALIASES, COVARIANCES, from_data
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.errors import InputError
from nidiff.evaluation.results import NOT_MEASURED, Measured, Result, Trainings, finite
from nidiff.files import read_object
from nidiff.notation import parse_call
from nidiff.training.experiment import EXPERIMENT, Experiment, read_experiment
from nidiff.training.identity import as_identity

CALLS = ("covariance", "schedule", "gaussian", "network")  # settings that are written as NAME:key=value,…
Cell = tuple[str, int, str]  # sampler, number of steps and source of a result


# Groups ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the training seed."""

    name: str
    runs: Mapping[int, str]
    """The name of the run of each seed, by rising seed."""


def group_runs(runs: Mapping[str, Path]) -> list[Group]:
    """The groups of two or more among runs, given by name: all settings but the seed are equal, and so are the data.

    A run without a readable experiment.json is in no group, and neither is the second run of one seed.
    """
    by_settings: list[tuple[dict[str, Any], dict[int, str]]] = []
    for name, path in runs.items():
        try:
            experiment, stored = read_experiment(path / EXPERIMENT), read_object(path / EXPERIMENT)
        except InputError:
            continue
        settings = settings_of(experiment) | {"digest of the data": as_identity(stored.get("identity"))["data"]}
        seed = settings.pop("seed")
        same = next((members for known, members in by_settings if known == settings), None)
        if same is None:
            by_settings.append((settings, {seed: name}))
        else:
            same.setdefault(seed, name)
    groups = [dict(sorted(members.items())) for _, members in by_settings if len(members) > 1]
    names = [f"{shared_name([*members.values()])} ({len(members)} seeds)" for members in groups]
    return [
        Group(", ".join(members.values()) if names.count(name) > 1 or name in runs else name, members)
        for name, members in zip(names, groups, strict=True)
    ]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """All that decides the weights: the fixed settings and the steps; gamma=1 and gamma=1.0 are the same, and so is a
    default that is left out."""
    settings = experiment.resolved().fixed() | {"steps": experiment.steps}
    known: dict[str, Any] = {"covariance": {**COVARIANCES, "from_data": from_data}, "schedule": SCHEDULES}
    for name in CALLS:
        with suppress(InputError):  # what is not written so stays as it is
            called, arguments = parse_call(name, settings[name])
            called = ALIASES.get(called, called) if name == "covariance" else called
            function = known.get(name, {}).get(called, lambda: None)
            # Without the boundary, which can be that of the run.
            defaults = {key: p.default for key, p in signature(function).parameters.items() if key != "boundary"}
            usual = {key: value for key, value in defaults.items() if isinstance(value, bool | int | float | str)}
            settings[name] = called, usual | arguments
    return settings


def shared_name(names: Sequence[str]) -> str:
    """How the names of runs begin, without the word before the seed: ddpm for ddpm-seed0 and ddpm-seed1."""
    start = commonprefix(names)  # noqa: RUF071 - letters are meant, not folders
    if any(name[len(start) :][:1].isdigit() for name in names):
        start = start.rstrip("0123456789")  # 1 of 10 and 11 is not shared
    start = re.sub(r"(?:^|(?<=[\W_]))(?:training[\W_]?)?(?:seed|s)[\W_]*$", "", start)
    return start.strip("-_,.=: ") or names[0]


def over_groups(results: Sequence[Result], groups: Sequence[Group]) -> list[Result]:
    """The results with one in place of those of a group for each sampler and number of steps, over its trainings."""
    group_of = {run: group for group in groups for run in group.runs.values()}
    lines: dict[tuple[str, Any], Result] = {}
    for index, result in enumerate(results):
        if (group := group_of.get(result.run)) is None:
            lines[result.run, index] = result
        elif (group.name, cell := _cell(result)) not in lines:
            same = [*_cells(results, group)[cell].values()]
            first, provenances = same[0], [one.provenance.items() for one in same]
            shared = {
                key: value for key, value in first.provenance.items() if all((key, value) in p for p in provenances)
            }
            metrics = {
                name: over_seeds([one.metrics.get(name, NOT_MEASURED) for one in same]) for name in first.metrics
            }
            details = {key: first.details[key] for key in ("floor", "floor_of") if key in first.details}
            lines[group.name, cell] = replace(
                first, run=group.name, metrics=metrics, provenance=shared, details=details
            )
    return [*lines.values()]


def over_seeds(values: Sequence[float | Measured]) -> Measured:
    """The mean over trainings, with their standard deviation, and the mean of their errors over samples.

    The deviation is that of one training (its square is divided by n − 1), and None for a single one. The mean has no
    value if one of the trainings has none.
    """
    measured = [value if isinstance(value, Measured) else Measured(float(value), None) for value in values]
    value, deviation = _mean_and_deviation([metric.finite for metric in measured])
    error, _ = _mean_and_deviation([finite(metric.error) for metric in measured])
    return Measured(value, error, measured[0].higher_is_better, Trainings(deviation, len(measured)))


def _mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (n − 1) of one value per training; None where there is none."""
    if any(value is None for value in values):
        return None, None
    numbers = torch.tensor([*values], dtype=torch.float64)
    return numbers.mean().item(), numbers.std().item() if len(numbers) > 1 else None


def groups_json(results: Sequence[Result], groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each group's cells: mean, standard deviation over trainings, mean error over samples, number of trainings."""
    runs, cells = {group.name: group.runs for group in groups}, []
    for line in (line for line in over_groups(results, groups) if line.run in runs):
        cell = {key: getattr(line, key) for key in ("sampler", "num_steps", "spacing", "options", "seeds", "clip")}
        metrics = {}
        for name, metric in line.metrics.items():
            std, n = metric.over or Trainings(None, 1)
            numbers = {"mean": metric.finite, "std": std, "error": metric.error, "n": n}
            metrics[name] = numbers | {"higher_is_better": metric.higher_is_better}
        members = {str(seed): run for seed, run in runs[line.run].items()}
        cells.append({"group": line.run, "runs": members, **cell, "metrics": metrics})
    return cells


def _cell(result: Result) -> Cell:
    return result.sampler_text, result.num_steps, result.source


def _cells(results: Sequence[Result], group: Group) -> dict[Cell, dict[int, Result]]:
    """The results of a group by cell and seed, by rising seed."""
    cells: dict[Cell, dict[int, Result]] = {}
    for seed, run in group.runs.items():
        for result in results:
            if result.run == run:
                cells.setdefault(_cell(result), {})[seed] = result
    return cells


# The paired test -------------------------------------------------------------------------------------------------


class PairedTest(NamedTuple):
    """The differences of two groups, seed by seed: their mean, its standard error, and p of the two-sided t-test."""

    difference: float
    error: float
    p: float | None
    """None where all differences are equal, as then there is nothing to test."""
    n: int


class Comparison(NamedTuple):
    """One cell of two groups with the same training seeds: ``group`` minus ``baseline`` in each metric."""

    group: str
    baseline: str
    seeds: tuple[int, ...]
    sampler: str
    num_steps: int
    source: str
    tests: Mapping[str, PairedTest]

    def to_json(self) -> dict[str, Any]:
        return self._asdict() | {"tests": {name: test._asdict() for name, test in self.tests.items()}}


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Student's t-test of first − second, which belong together in pairs: here by the seed of two trainings.

    t = d̄ / (s / √n) with n − 1 degrees of freedom, where d̄ and s are mean and standard deviation of the differences.
    """
    if len(first) != len(second) or len(first) < 2:
        problem = f"has {len(first)} values and `second` has {len(second)}"
        raise InputError("first", None, problem, "give two or more of each")
    differences = torch.tensor([*first], dtype=torch.float64) - torch.tensor([*second], dtype=torch.float64)
    n = len(differences)
    mean, error = differences.mean().item(), differences.std().item() / math.sqrt(n)
    rounding = 1e-14 * max(map(abs, [*first, *second]))
    p = None if not error > rounding else student_p(mean / error, n - 1)
    return PairedTest(mean, error, p, n)


def student_p(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) of Student's t with a whole number of degrees of freedom, by the finite sum.

    With θ = atan(|t| / √ν), 1 − p is sin θ · (1 + ½ cos² θ + 1·3/(2·4) cos⁴ θ + …) for even ν, and
    2/π · (θ + sin θ · (cos θ + ⅔ cos³ θ + …)) for odd ν; the last power is ν − 2 (Abramowitz and Stegun 26.7.3).
    """
    theta, odd = math.atan2(abs(t), math.sqrt(degrees)), degrees % 2
    term = math.cos(theta) if odd else 1.0
    total = 0.0
    for power in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(theta) ** 2
    inside = math.sin(theta) * total
    return min(1.0, max(0.0, 1 - (2 / math.pi * (theta + inside) if odd else inside)))


def compare_groups(results: Sequence[Result], groups: Sequence[Group]) -> list[Comparison]:
    """Each group against the first one before it with the same training seeds, where both were measured alike."""
    comparisons = []
    for index, group in enumerate(groups):
        baseline = next((before for before in groups[:index] if before.runs.keys() == group.runs.keys()), None)
        if baseline is None:
            continue
        first, second = _cells(results, group), _cells(results, baseline)
        for cell in (cell for cell in first if cell in second):
            seeds = tuple(seed for seed in group.runs if seed in first[cell] and seed in second[cell])
            pairs = [(first[cell][seed].metrics, second[cell][seed].metrics) for seed in seeds]
            tests = {}
            for name in pairs[0][0] if len(pairs) > 1 else ():
                values: Any = [[metrics.get(name, NOT_MEASURED).finite for metrics in pair] for pair in pairs]
                if not any(None in pair for pair in values):
                    tests[name] = paired_test(*zip(*values, strict=True))
            if tests:
                comparisons.append(Comparison(group.name, baseline.name, seeds, *cell, tests))
    return comparisons
