"""The table of quality by run, sampler and number of steps, in Markdown, LaTeX, CSV, HTML and plain text."""

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from nidiff.aligned import aligned
from nidiff.evaluation.results import (
    NOT_MEASURED,
    Measured,
    Result,
    best_values,
    find_metrics,
    find_sources,
    group_lines,
    source_text,
)

HEAD = ("run", "sampler", "num_steps", "spacing", "options", "seeds", "clip")  # of the CSV


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
    """One line per result: its settings, the value and error of each metric in full precision, its provenance."""
    metrics = find_metrics(results)
    provenance = dict.fromkeys(chain.from_iterable(result.provenance for result in results))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*HEAD, *chain.from_iterable((name, f"{name} (error)") for name in metrics), *provenance])
    for result in results:
        own = vars(result) | {"options": json.dumps(result.options)}
        writer.writerow(
            [own[key] for key in HEAD]
            + [entry for name in metrics for entry in result.metrics.get(name, NOT_MEASURED)[:2]]
            + [result.provenance.get(key) for key in provenance]
        )
    return out.getvalue()


def cells(results: Sequence[Result], style: Style) -> list[list[str]]:
    """The head and the rows as in the paper's table: by run and sampler, which are named once, then by steps."""
    metrics, lines = find_metrics(results), group_lines(results)
    best = best_values(lines, metrics)
    head = [f"{style.escape(name)} {style.higher if up else style.lower}".rstrip() for name, up in metrics.items()]
    rows = [["run", "sampler", "steps", *head]]
    before = ""
    for line in lines:
        run = line.run + line.mark
        names = ["" if run == before else style.escape(run), style.escape(line.sampler)]
        for result in line.results:
            row = [*names, str(result.num_steps)]
            for name in metrics:
                one = result.metrics.get(name, NOT_MEASURED)
                is_best = one.is_finite and best.get((line.mark, result.num_steps, name)) == one.value
                row.append(style.best(number(one, style)) if is_best else number(one, style))
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


def number(measured: Measured, style: Style) -> str:
    """value ± error; the error has one significant digit, or two if it begins with 1 or 2, and the value as many."""
    value, error, _ = measured
    if value is None or not measured.is_finite:
        return style.missing
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    leading, exponent = f"{error:.1e}".split("e")
    decimals = (1 if float(leading) < 3 else 0) - int(exponent)
    if not error or abs(value) >= 1e6 or decimals + math.log10(abs(value) or 1) > 8:
        return f"{value:.4g} {style.plus_minus} {error:.1g}"  # more digits than anybody would read
    return f"{value:.{max(0, decimals)}f} {style.plus_minus} {error:.{max(0, decimals)}f}"


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
