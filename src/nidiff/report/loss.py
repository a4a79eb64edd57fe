"""The log of a run and its picture."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from nidiff import style
from nidiff.data.figures import drawable
from nidiff.errors import InputError

LOGGED = ("step", "loss", "images_per_s")
LARGEST, LARGEST_LOG = 1e60, 2**28  # a number that can be drawn; bytes of a log


def read_log(path: Path) -> dict[str, list[float]]:
    """Step, loss and speed of every whole line of a log.jsonl; empty columns where there are none yet."""
    lines = []
    for line in _text(path).splitlines():
        try:
            values = [float(json.loads(line)[name]) for name in LOGGED]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the last line of a run that is still training may be cut short
        if all(abs(value) < LARGEST for value in values):
            lines.append(values)
    return {name: [values[column] for values in lines] for column, name in enumerate(LOGGED)}


def _text(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_LOG).decode(errors="replace")
    except OSError as error:
        problem = f"{path.name} cannot be read ({error.strerror})"
        raise InputError(None, None, problem, "make it readable") from error


def smoothed(values: list[float]) -> np.ndarray:
    """The mean over a window of a tenth of the values about each; at the ends over the part that exists."""
    half, count = (max(1, len(values) // 10) | 1) // 2, len(values)
    total, at = np.concatenate([[0.0], np.cumsum(values)]), np.arange(count)
    first, last = np.maximum(at - half, 0), np.minimum(at + half + 1, count)
    return (total[last] - total[first]) / (last - first)


@style.drawn
def loss_figure(log: dict[str, list[float]]) -> Figure:
    """Left: the loss of each line of the log, and smoothed. Right: the speed."""
    figure = Figure(figsize=(style.WIDTH, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.plot(
        log["step"], log["loss"], ".", color=style.look().soft, markersize=3, label="mean since the previous point"
    )
    left.plot(log["step"], smoothed(log["loss"]), color=style.BLUE, linewidth=2.0, label="smoothed")
    if 0 < min(log["loss"]) < max(log["loss"]) / 2:
        left.set_yscale("log")
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("{x:.2g}")
        left.tick_params(axis="y", which="minor", labelsize=style.TINY)
    left.legend()
    right.plot(log["step"], log["images_per_s"], color=style.ORANGE)
    right.set_ylim(bottom=0)
    for axes, title in ((left, "loss"), (right, "images per second")):
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid()
    return figure


@style.drawn
def losses_figure(logs: Mapping[str, dict[str, list[float]]]) -> Figure:
    """The smoothed losses of several runs by step."""
    figure = Figure(figsize=(style.WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    values = [value for log in logs.values() for value in log["loss"]]
    for (name, log), (colour, line) in zip(logs.items(), style.looks(), strict=False):
        axes.plot(log["step"], smoothed(log["loss"]), color=colour, linestyle=line, label=drawable(name, 40))
    if values and 0 < min(values) < max(values) / 2:
        axes.set_yscale("log")
    axes.set_xlabel("step of the optimiser")
    axes.set_ylabel("loss, smoothed")
    axes.grid()
    figure.legend(loc="outside right upper", frameon=False)
    return figure
