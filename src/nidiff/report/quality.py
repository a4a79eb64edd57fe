"""The plot of quality against the number of steps."""

import math
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from nidiff import style
from nidiff.data.figures import drawable
from nidiff.errors import InputError
from nidiff.evaluation.results import NOT_MEASURED, Measured, Result
from nidiff.evaluation.table import find_metrics, group_lines
from nidiff.report.loss import LARGEST

OVER_SEEDS = "Error bars of a line over seeds: ± standard deviation over trainings; of a run: error over samples"
REAL = "real data in place of samples"
DOTTED: dict[str, Any] = {"color": "black", "linestyle": ":", "marker": ""}
FAR = 30  # so many times below the smallest value real data are not drawn
MOST_METRICS, MOST_LINES, MOST_TICKS = 24, 96, 40

# Lines differ in colour and in marker, for eyes that do not tell all colours apart.
SOLID = cycler(color=style.COLOURS * 4) + cycler(marker=style.MARKERS * 3)  # 24 pairs, all different
LOOKS: list[dict[str, Any]] = list(cycler(linestyle=style.DASHES) * SOLID)


@style.drawn
def quality_figure(results: Sequence[Result]) -> Figure:
    """Quality against the number of steps: a panel per metric, a line with error bars per run and sampler.

    The error bars of a group of trainings are its standard deviation over them, those of a run its error over samples.
    A picture has room for the first `MOST_METRICS` and `MOST_LINES`. Dotted: real data in place of samples,
    if they are near enough.
    """
    metrics = dict(islice(find_metrics(results).items(), MOST_METRICS))
    lines = dict(islice(group_lines(results).items(), MOST_LINES))
    if not metrics:
        raise InputError("results", None, "has no metrics", "measure some first")
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    labels = [_plain(f"{run}, {sampler}") for run, sampler in lines]
    width = max(5.0, style.WIDTH / 3 * columns)
    abreast = min(len(lines), max(1, int(width / (0.09 * max(map(len, labels)) + 0.6))))  # entries of the legend
    height = 2.5 * rows + 0.25 * math.ceil(len(lines) / abreast) + 0.2
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, metrics, strict=False):
        _draw_metric(axes, name, list(lines.values()))
        axes.set_title(f"{_plain(name)}: {'higher' if metrics[name] else 'lower'} is better", fontsize=style.SMALL)
        if metrics[name]:  # logarithms show small distances well, and shares badly
            axes.set_yscale("linear")
    for axes in panels[len(metrics) :]:
        axes.set_axis_off()
    handles = [panels[0].plot([], [], **LOOKS[index % len(LOOKS)])[0] for index in range(len(lines))]
    if any(line.get_gid() == REAL for axes in panels for line in axes.lines):
        handles, labels = [*handles, panels[0].plot([], [], **DOTTED)[0]], [*labels, REAL]
    drawn = [metric for line in lines.values() for result in line for metric in result.metrics.values()]
    grouped = any(metric.over is not None for metric in drawn)
    look: dict[str, Any] = {"ncols": abreast, "frameon": False}
    figure.legend(handles, labels, loc="outside lower center", title=OVER_SEEDS if grouped else None, **look)
    return figure


def _draw_metric(axes: Axes, name: str, lines: Sequence[Sequence[Result]]) -> None:
    low, high = math.inf, 0.0
    ticks: set[int] = set()
    for index, line in enumerate(lines):
        measured = {result.num_steps: result.metrics.get(name, NOT_MEASURED) for result in line}
        points = [(steps, *_drawable(metric)) for steps, metric in measured.items() if metric.finite is not None]
        if points:
            steps, values, errors = zip(*points, strict=True)
            aside = 1.03 ** (index - (len(lines) - 1) / 2)  # so that error bars do not cover each other
            places, look = [step * aside for step in steps], LOOKS[index % len(LOOKS)]
            axes.errorbar(places, values, yerr=errors, elinewidth=1, **look)
            bottoms = [value - error for value, error in zip(values, errors, strict=True)]
            low, high, ticks = min(low, *bottoms), max(high, *values), ticks | {*steps}
    floors = {result.details.get("floor", {}).get(name, {}).get("value") for line in lines for result in line}
    for floor in floors - {None}:
        if floor > low / FAR:  # else the line would leave no room for the others
            axes.axhline(floor, gid=REAL, **DOTTED)
            low, high = min(low, floor), max(high, floor)
    axes.set_xscale("log")
    if 0 < low < high / 8:
        axes.set_yscale("log")
    shown = sorted(ticks)[:: 1 + len(ticks) // MOST_TICKS]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.set_xticks([], minor=True)
    if len(ticks) == 1:
        axes.set_xlim(min(ticks) / 2, min(ticks) * 2)
    axes.set_xlabel("steps")
    axes.grid()


def _drawable(metric: Measured) -> tuple[float, float]:
    """Value and error, as near to them as matplotlib can draw."""
    over = metric.over
    value, error = metric.value or 0.0, metric.error if over is None or over.n == 1 else over.deviation
    error = error if error is not None and math.isfinite(error) else 0.0
    return max(-LARGEST, min(value, LARGEST)), min(abs(error), LARGEST)


def _plain(label: str) -> str:
    """For matplotlib, which leaves a label out that begins with _."""
    return re.sub(r"^_", " _", drawable(label, 80))
