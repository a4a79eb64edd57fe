"""The quality of samples by run, sampler and number of steps: a table in several formats, and a plot."""

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from nidiff.errors import InputError
from nidiff.report.results import (
    HIGHER,
    Line,
    Result,
    best_values,
    find_sources,
    group_lines,
    metric_names,
    source_text,
    union,
)
from nidiff.report.table import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAD = ("run", "sampler", "steps", "spacing", "options", "seeds", "clip")  # of the CSV
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")  # Okabe and Ito
MARKERS = "osD^vPX*"


class Style(NamedTuple):
    """How a format writes the parts of a cell."""

    escape: Callable[[str], str]
    best: Callable[[str], str]
    plus_minus: str
    missing: str
    lower: str
    higher: str


def markdown(results: Sequence[Result]) -> str:
    """The table in Markdown: the best value of each metric and number of steps in bold."""
    head, *body = cells(results, MARKDOWN)
    lines = [head, ["---", "---"] + ["---:"] * (len(head) - 2), *body]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *notes(results, MARKDOWN)]) + "\n"


def latex(results: Sequence[Result]) -> str:
    """The table in LaTeX, which needs no packages: a float with its caption, the best values in bold."""
    head, *body = cells(results, LATEX)
    lines = [
        r"\begin{table}\centering",
        rf"\caption{{Quality of samples by number of steps. {' '.join(notes(results, LATEX))}}}",
        rf"\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}\hline",
        " & ".join(head) + r" \\",
    ]
    for line in body:
        lines += [r"\hline"] * bool(line[0] or line[1]) + [" & ".join(line) + r" \\"]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""])


def text(results: Sequence[Result]) -> str:
    """The table for a terminal, in ASCII."""
    return "\n".join([aligned(cells(results, PLAIN)), *notes(results, PLAIN)])


def csv_text(results: Sequence[Result]) -> str:
    """One line per result: its settings, value and error of each metric to the last digit, provenance."""
    metrics, provenance = metric_names(results), union(result["provenance"] for result in results)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEAD, *chain.from_iterable((name, f"{name} (error)") for name in metrics), *provenance])
    for result in results:
        own = {**result, "options": json.dumps(result.get("options") or {})}
        pairs = [result["metrics"].get(name) or {} for name in metrics]
        writer.writerow(
            [own.get(key) for key in HEAD]
            + [pair.get(key) for pair in pairs for key in ("value", "error")]
            + [result["provenance"].get(key) for key in provenance]
        )
    return out.getvalue()


def cells(results: Sequence[Result], style: Style) -> list[list[str]]:
    """The head and the rows, as the paper's table has them: by run and sampler, which are named once, then steps."""
    metrics, lines = metric_names(results), group_lines(results)
    best = best_values(lines, metrics)
    head = [f"{style.escape(name)} {style.higher if name in HIGHER else style.lower}".rstrip() for name in metrics]
    rows = [["run", "sampler", "steps", *head]]
    before = ""
    for line in lines:
        run = line.run + line.mark
        names = ["" if run == before else style.escape(run), style.escape(line.sampler)]
        for result in line.results:
            row = [*names, str(result["steps"])]
            for name in metrics:
                pair = result["metrics"].get(name) or {}
                value = pair.get("value")
                shown = number(value, pair.get("error"), style)
                is_best = value is not None and best.get((line.mark, result["steps"], name)) == value
                row.append(style.best(shown) if is_best else shown)
            rows.append(row)
            names = ["", ""]
        before = run
    return rows


def notes(results: Sequence[Result], style: Style) -> list[str]:
    """Where the numbers come from: one sentence if it is the same for all, else one for each mark in the table."""
    sources = find_sources(results)
    several = len(sources) > 1
    return [
        style.escape((f"[{index}] " if several else "") + source_text(source))
        for index, source in enumerate(sources, 1)
    ]


def number(value: float | None, error: float | None, style: Style) -> str:
    """value ± error; the error has one significant digit, or two if it begins with 1 or 2, and the value as many."""
    if value is None or not math.isfinite(value):
        return style.missing
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    leading, exponent = f"{error:.1e}".split("e")
    decimals = (1 if float(leading) < 3 else 0) - int(exponent)
    if not error or abs(value) >= 1e6 or decimals + math.log10(abs(value) or 1) > 8:
        return f"{value:.4g} {style.plus_minus} {error:.1g}"  # digits that nobody would read
    return f"{value:.{max(0, decimals)}f} {style.plus_minus} {error:.{max(0, decimals)}f}"


def quality_figure(results: Sequence[Result]) -> "Figure":
    """Quality against the number of steps: a panel per metric, a line with error bars per run and sampler."""
    from matplotlib.figure import Figure

    metrics, lines = metric_names(results), group_lines(results)
    if not metrics:
        raise InputError("results has no metrics: a plot needs at least one.")
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    labels = [_plain(f"{line.run}{line.mark}, {line.sampler}") for line in lines]
    width = max(5.0, 3.6 * columns)
    abreast = min(len(lines), max(1, int(width / (0.09 * max(map(len, labels)) + 0.6))))  # entries of the legend
    height = 3.0 * rows + 0.25 * math.ceil(len(lines) / abreast) + 0.2
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, metrics, strict=False):
        _draw_metric(axes, name, lines)
    for axes in panels[len(metrics) :]:
        axes.set_axis_off()
    handles = [panels[0].plot([], [], **_look(index))[0] for index in range(len(lines))]
    figure.legend(handles, labels, loc="outside lower center", ncols=abreast, frameon=False, fontsize=9)
    return figure


def _draw_metric(axes: "Axes", name: str, lines: Sequence[Line]) -> None:
    low, high = math.inf, 0.0
    ticks: set[int] = set()
    for index, line in enumerate(lines):
        points = [
            (result["steps"], pair["value"], pair.get("error") or 0.0)
            for result in line.results
            if (pair := result["metrics"].get(name)) and pair["value"] is not None and math.isfinite(pair["value"])
        ]
        if points:
            steps, values, errors = zip(*points, strict=True)
            aside = 1.03 ** (index - (len(lines) - 1) / 2)  # so that error bars do not cover each other
            axes.errorbar(
                [step * aside for step in steps], values, yerr=errors, capsize=2.5, elinewidth=1, **_look(index)
            )
            bottoms = [value - error for value, error in zip(values, errors, strict=True)]
            low, high, ticks = min(low, *bottoms), max(high, *values), ticks | {*steps}
    axes.set_xscale("log")
    if 0 < low < high / 8:
        axes.set_yscale("log")
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)], fontsize=8)
    axes.set_xticks([], minor=True)
    if len(ticks) == 1:
        axes.set_xlim(min(ticks) / 2, min(ticks) * 2)
    axes.set_xlabel("steps", fontsize=9)
    axes.set_title(f"{_plain(name)}: {'higher' if name in HIGHER else 'lower'} is better", fontsize=10)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _plain(label: str) -> str:
    """For matplotlib, where a dollar begins a formula and a label that begins with _ is left out."""
    return re.sub(r"^_", " _", label.replace("$", r"\$"))


def _look(index: int) -> dict[str, Any]:
    """Lines differ in colour and in marker, for eyes that do not tell all colours apart."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":")[index // len(COLOURS) % 3],
        "markersize": 5,
        "linewidth": 1.4,
    }


def _escape_latex(words: str) -> str:
    return "".join(SPECIAL.get(letter, letter) for letter in words)


SPECIAL = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "×": r"$\times$",
}
TYPED = str.maketrans("−–×", "--x")
MARKDOWN = Style(lambda s: re.sub(r"([\\|*<`\[\]])", r"\\\1", s), lambda s: f"**{s}**", "±", "–", "↓", "↑")
LATEX = Style(_escape_latex, lambda s: rf"\textbf{{{s}}}", r"$\pm$", "--", r"$\downarrow$", r"$\uparrow$")
PLAIN = Style(lambda s: s.translate(TYPED).encode("ascii", "replace").decode(), lambda s: s, "+-", "-", "", "")
HTML = Style(html.escape, lambda s: f"<strong>{s}</strong>", "±", "–", "↓", "↑")
