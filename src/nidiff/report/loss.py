"""The log of a run and its picture."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from nidiff import style
from nidiff.data.figures import drawable

LOGGED = ("step", "loss", "images_per_s")
LARGEST, LARGEST_LOG = 1e60, 2**28  # a number that can be drawn; bytes of a log


def read_log(path: Path) -> dict[str, list[float]]:
    """Step, loss and speed of every whole line of a log.jsonl; empty columns where there are none yet."""
    text, lines = b"", []
    with suppress(OSError), path.open("rb") as file:
        text = file.read(LARGEST_LOG)
    for line in text.decode(errors="replace").splitlines():
        try:
            values = [float(json.loads(line)[name]) for name in LOGGED]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the last line of a run that is still training may be cut short
        if all(abs(value) < LARGEST for value in values):
            lines.append(values)
    return {name: [values[column] for values in lines] for column, name in enumerate(LOGGED)}


def smoothed(values: list[float]) -> np.ndarray:
    """The mean over a window of a tenth of the values about each; at the ends over the part that exists."""
    half, count = (max(1, len(values) // 10) | 1) // 2, len(values)
    total, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(count)
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, count)
    return (total[last] - total[first]) / (last - first)


@style.drawn
def losses_figure(logs: Mapping[str, dict[str, list[float]]]) -> Figure:
    """The losses of runs by step, smoothed; of a single one each line of its log, too."""
    figure = Figure(figsize=(style.WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    values = [value for log in logs.values() for value in log["loss"]]
    for (name, log), (colour, line) in zip(logs.items(), style.looks(), strict=False):
        if len(logs) == 1:
            axes.plot(
                log["step"], log["loss"], ".", color=style.look().soft, markersize=3, label="since the last point"
            )
        axes.plot(log["step"], smoothed(log["loss"]), color=colour, linestyle=line, label=drawable(name, 40))
    if 0 < min(values) < max(values) / 2:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:.2g}")
    axes.set(xlabel="step of the optimiser", ylabel="loss, smoothed")
    axes.grid()
    figure.legend(loc="outside right upper", frameon=False)
    return figure
