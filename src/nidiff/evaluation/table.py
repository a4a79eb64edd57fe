"""The table of quality by run, sampler and number of steps, in Markdown, LaTeX, CSV, HTML and plain text."""

import csv
import html
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from nidiff.aligned import aligned
from nidiff.evaluation.results import NOT_MEASURED, Measured, Result, one_line
from nidiff.evaluation.seeds import Comparison, PairedTest
from nidiff.model.card import escaped
from nidiff.recipe import fits

HEAD = ("run", "sampler", "num_steps", "spacing", "options", "seeds", "clip")  # of the CSV
PAIRED, BY_CLASS = "Paired over seeds", "By class"
MOST_CLASSES = 20  # in a table
FEW = 10  # trainings
OVER_SEEDS = (
    "a ± b (samples ± c): mean a and standard deviation b over trainings that differ only in the seed; c is the mean "
    "error of one training over its samples."
)
RIGHT_CLASS = (
    "right class: the share of samples that a small classifier, trained on the real images, gives the class asked for; "
    "of real images that it was not trained on, {}."
)


class Style(NamedTuple):
    """How a format writes the parts of a cell."""

    escape: Callable[[str], str]
    best: str
    plus_minus: str = "±"
    missing: str = "–"
    lower: str = "↓"
    higher: str = "↑"


def markdown(results: Sequence[Result], paired: Sequence[Comparison] = ()) -> str:
    """The table in Markdown: the best value of each metric and number of steps in bold."""
    parts = [_markdown(cells(results, MARKDOWN)), *notes(results, MARKDOWN)]
    for rows in class_cells(results, MARKDOWN):
        parts += [f"## {BY_CLASS}: {rows[0][0]}", _markdown(rows[1:])]
    if paired:
        parts += [f"## {PAIRED}", _markdown(paired_cells(paired, MARKDOWN)), *paired_notes(paired, MARKDOWN)]
    return "\n\n".join(parts) + "\n"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---", "---"] + ["---:"] * (len(head) - 2), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def latex(results: Sequence[Result], paired: Sequence[Comparison] = ()) -> str:
    """The table in LaTeX, which needs no packages: a float with its caption, the best values in bold."""
    caption = f"Quality of samples by number of steps. {' '.join(notes(results, LATEX))}"
    found = _latex(cells(results, LATEX), caption)
    for rows in class_cells(results, LATEX):
        found += _latex(rows[1:], f"{BY_CLASS}: {rows[0][0]}.")
    if paired:
        found += _latex(paired_cells(paired, LATEX), f"{PAIRED}. {' '.join(paired_notes(paired, LATEX))}")
    return found


def _latex(rows: Sequence[Sequence[str]], caption: str) -> str:
    head, *body = rows
    lines = [
        r"\begin{table}\centering",
        rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}\hline",
        " & ".join(head) + r" \\",
    ]
    for line in body:
        lines += [r"\hline"] * bool(line[0] or line[1]) + [" & ".join(line) + r" \\"]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""])


def text(results: Sequence[Result], paired: Sequence[Comparison] = ()) -> str:
    """The table for a terminal, in ASCII."""
    parts = [aligned(cells(results, PLAIN)), *notes(results, PLAIN)]
    for rows in class_cells(results, PLAIN):
        parts += ["", f"{BY_CLASS}: {rows[0][0]}", aligned(rows[1:])]
    if paired:
        parts += ["", PAIRED, aligned(paired_cells(paired, PLAIN)), *paired_notes(paired, PLAIN)]
    return "\n".join(parts)


def csv_text(results: Sequence[Result]) -> str:
    """One line per result: its settings, the value and error of each metric in full precision, its provenance.

    A line of a group has the mean as the value, and also the standard deviation over its trainings and their number.
    """
    rows = []
    for result in results:
        row = {key: getattr(result, key) for key in HEAD} | {"options": json.dumps(result.options)}
        for name, one in result.metrics.items():
            row |= {name: one.value, f"{name} (error)": one.error}
            if one.over is not None:
                row |= {"trainings": one.over.n, f"{name} (std over trainings)": one.over.deviation}
        rows.append({key: _no_formula(value) for key, value in (row | dict(result.provenance)).items()})
    out = io.StringIO()
    writer = csv.DictWriter(out, list(dict.fromkeys(chain.from_iterable(rows))), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _no_formula(value: object) -> object:
    """Words that a spreadsheet would compute, such as the name of a stranger's run, get a mark that they are words."""
    risky = isinstance(value, str) and len(value) > 1 and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if risky else value


def cells(results: Sequence[Result], style: Style) -> list[list[str]]:
    """The head and the rows as in the paper's table: by run and sampler, which are named once, then by steps."""
    metrics, lines = find_metrics(results), group_lines(results)
    best = _best_values(chain.from_iterable(lines.values()), metrics)
    head = [f"{style.escape(name)} {style.higher if up else style.lower}".rstrip() for name, up in metrics.items()]
    rows, before = [["run", "sampler", "steps", *head]], ""
    for (run, sampler), line in lines.items():
        names = ["" if run == before else style.escape(run), style.escape(sampler)]
        for result in line:
            row = [*names, str(result.num_steps)]
            for name in metrics:
                one = result.metrics.get(name, NOT_MEASURED)
                is_best = one.finite is not None and best.get((result.source, result.num_steps, name)) == one.value
                row.append((style.best if is_best else "{}").format(number(one, style)))
            rows.append(row)
            names = ["", ""]
        before = run
    return rows


def notes(results: Sequence[Result], style: Style) -> list[str]:
    """Where the numbers come from: one sentence if it is the same for all, else one for each mark in the table."""
    found = [f"{mark} {source}".lstrip() for source, mark in _marks(results).items()]
    grouped = any(one.over is not None for result in results for one in result.metrics.values())
    known = {float(share) for share in (one.details.get("classifier", "") for one in results) if fits(share, float)}
    named = [RIGHT_CLASS.format(", ".join(f"{share:.1%}" for share in sorted(known)))] if known else []
    return [style.escape(note) for note in (*found, *named, *([OVER_SEEDS] if grouped else []))]


def class_cells(results: Sequence[Result], style: Style) -> list[list[list[str]]]:
    """A table for each metric that was measured of each class, with a column for each: its title, head and rows."""
    told = [result for result in results if isinstance(result.details.get("by_class"), Mapping)]
    classes = sorted({one for result in told for one in result.details["by_class"]}, key=int)
    metrics = dict.fromkeys(name for result in told for one in result.details["by_class"].values() for name in one)
    if not told or len(classes) > MOST_CLASSES:  # more are in JSON
        return []
    tables = []
    for metric in metrics:
        rows = [[style.escape(metric)], ["run", "sampler", "steps", *classes]]
        for result in told:
            row = [style.escape(result.run), style.escape(result.sampler_text), str(result.num_steps)]
            found = [result.details["by_class"].get(one, {}).get(metric) for one in classes]
            numbers = [NOT_MEASURED if one is None else Measured(one["value"], one["error"]) for one in found]
            rows.append([*row, *(number(one, style) for one in numbers)])
        tables.append(rows)
    return tables


def paired_cells(paired: Sequence[Comparison], style: Style) -> list[list[str]]:
    """The head and the rows of the paired tests: mean difference ± standard error (p) by groups, sampler and steps."""
    metrics, marks = list(dict.fromkeys(chain.from_iterable(one.tests for one in paired))), _marks(paired)
    rows, before = [["difference", "sampler", "steps", *map(style.escape, metrics)]], ("", "")
    order = list(dict.fromkeys((one.group, one.source, one.sampler) for one in paired))
    for one in sorted(paired, key=lambda one: (order.index((one.group, one.source, one.sampler)), -one.num_steps)):
        names = (one_line(f"{one.group} − {one.baseline} {marks[one.source]}"), one.sampler)
        shown = [style.escape(name) if name != old else "" for name, old in zip(names, before, strict=True)]
        rows.append([*shown, str(one.num_steps), *(_paired(one.tests.get(name), style) for name in metrics)])
        before = names
    return rows


def paired_notes(paired: Sequence[Comparison], style: Style) -> list[str]:
    """What the numbers of the paired tests are, and how far to trust them."""
    counts = sorted({len(one.seeds) for one in paired})
    trainings = " or ".join(map(str, counts))
    words = (
        "Mean ± standard error of the differences between two trainings of the same seed; p of the two-sided paired "
        f"t-test. It rests on n = {trainings} trainings of each group, assumes differences that are normally "
        "distributed, and is not corrected for the number of tests."
    )
    few = f"n = {trainings} is small: only differences that are large beside their spread are found, and p is rough."
    return [style.escape(note) for note in (words, *([few] if counts[0] < FEW else []))]


def _paired(test: PairedTest | None, style: Style) -> str:
    if test is None:
        return style.missing
    p = "no test" if test.p is None else "p < 0.0001" if test.p < 1e-4 else f"p = {test.p:.2g}"
    return f"{number(Measured(test.difference, test.error), style)} ({style.escape(p)})"


def find_metrics(results: Sequence[Result]) -> dict[str, bool]:
    """The metrics of all results in the order in which they first occur, and whether higher is better."""
    return {name: one.higher_is_better for result in results for name, one in result.metrics.items()}


def group_lines(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """Results by run (with the mark of its source) and sampler, as they first occur, from many steps to few."""
    marks, runs = _marks(results), [result.run for result in results]
    lines: dict[tuple[str, str], dict[int, Result]] = {}
    for result in sorted(results, key=lambda result: runs.index(result.run)):
        key = (one_line(f"{result.run} {marks[result.source]}"), result.sampler_text)
        lines.setdefault(key, {})[result.num_steps] = result  # of two results of one cell, the later counts
    return {key: [line[num_steps] for num_steps in sorted(line, reverse=True)] for key, line in lines.items()}


def _marks(results: Sequence[Result] | Sequence[Comparison]) -> dict[str, str]:
    """The sources of the results, and the mark of each; no marks if there is only one."""
    sources = list(dict.fromkeys(result.source for result in results))
    return {source: f"[{index}]" if len(sources) > 1 else "" for index, source in enumerate(sources, 1)}


def _best_values(results: Iterable[Result], metrics: Mapping[str, bool]) -> dict[tuple[str, int, str], float]:
    """The best value of each source, number of steps and metric for which there are two or more."""
    values: dict[tuple[str, int, str], list[float]] = {}
    for result in results:
        for name, one in result.metrics.items():
            if one.finite is not None:
                values.setdefault((result.source, result.num_steps, name), []).append(one.finite)
    return {key: (max if metrics[key[2]] else min)(found) for key, found in values.items() if len(found) > 1}


def number(measured: Measured, style: Style) -> str:
    """value ± error; the error has one significant digit, or two if it begins with 1 or 2, and the value as many.

    Of a group: mean ± standard deviation over trainings (samples ± error).
    """
    value, error, over = measured.finite, measured.error, measured.over
    if value is None:
        return style.missing
    if over is not None and over.deviation is not None:
        mean = number(Measured(value, over.deviation), style)
        return mean if error is None else f"{mean} (samples {style.plus_minus} {_rounded(error)})"
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    decimals = _decimals(error)
    if not error or abs(value) >= 1e6 or decimals + math.log10(abs(value) or 1) > 8:
        return f"{value:.4g} {style.plus_minus} {error:.1g}"  # more digits than anybody would read
    return f"{value:.{max(0, decimals)}f} {style.plus_minus} {error:.{max(0, decimals)}f}"


def _decimals(error: float) -> int:
    leading, exponent = f"{error:.1e}".split("e")
    return (1 if float(leading) < 3 else 0) - int(exponent)


def _rounded(error: float) -> str:
    readable = math.isfinite(error) and error and abs(_decimals(error)) < 8
    return f"{error:.{max(0, _decimals(error))}f}" if readable else f"{error:.1g}"


NAMED = zip("\\~^<>|", ("backslash", "asciitilde", "asciicircum", "less", "greater", "bar"), strict=True)
LETTERS = {letter: rf"\text{name}{{}}" for letter, name in NAMED} | {letter: f"\\{letter}" for letter in "&%$#_{}"}
IN_LATEX = str.maketrans(LETTERS | {"−": "$-$", "×": r"$\times$", "±": r"$\pm$"})
TYPED = str.maketrans({"−": "-", "–": "-", "×": "x", "±": "+-"})
MARKDOWN = Style(escaped, "**{}**")
LATEX = Style(lambda words: words.translate(IN_LATEX), r"\textbf{{{}}}", r"$\pm$", "--", r"$\downarrow$", r"$\uparrow$")
PLAIN = Style(lambda words: words.translate(TYPED).encode("ascii", "replace").decode(), "{}", "+-", "-", "", "")
HTML = Style(html.escape, "<strong>{}</strong>")
