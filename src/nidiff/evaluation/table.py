"""The table of quality by run, sampler and number of steps, in Markdown, LaTeX, CSV, HTML and plain text."""

import csv
import html
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from nidiff.aligned import aligned
from nidiff.evaluation.results import NOT_MEASURED, Measured, Result, one_line
from nidiff.evaluation.seeds import Comparison, PairedTest
from nidiff.model.card import escaped
from nidiff.recipe import fits

HEAD = ("run", "sampler", "num_steps", "spacing", "options", "seeds", "clip")  # of the CSV
MOST_CLASSES, MOST_TABLES = 20, 8  # columns of a table, and tables of spectra
FEW = 10  # trainings
LOWEST = 0.9  # the share of independent items below which it is said how many they are


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
    parts = []
    for title, rows, remarks in _blocks(results, paired, MARKDOWN):
        head, *body = rows
        lines = [head, ["---", "---"] + ["---:"] * (len(head) - 2), *body]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts += [f"## {title}", table, *remarks] if title else [table, *remarks]
    return "\n\n".join(parts) + "\n"


def latex(results: Sequence[Result], paired: Sequence[Comparison] = ()) -> str:
    """The table in LaTeX, which needs no packages: a float with its caption, the best values in bold."""
    lines = []
    for title, rows, remarks in _blocks(results, paired, LATEX):
        head, *body = rows
        caption = " ".join([f"{title or 'Quality of samples by number of steps'}.", *remarks])
        lines += [r"\begin{table}\centering", rf"\caption{{{caption}}}"]
        lines += [rf"\begin{{tabular}}{{ll{'r' * (len(head) - 2)}}}\hline", " & ".join(head) + r" \\"]
        for line in body:
            lines += [r"\hline"] * bool(line[0] or line[1]) + [" & ".join(line) + r" \\"]
        lines += [r"\hline", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*lines, ""])


def text(results: Sequence[Result], paired: Sequence[Comparison] = ()) -> str:
    """The table for a terminal, in ASCII."""
    parts = []
    for title, rows, remarks in _blocks(results, paired, PLAIN):
        parts += [*(["", title] if title else []), aligned(rows), *remarks]
    return "\n".join(parts)


def detailed_text(result: Result) -> str:
    """One result for a terminal: of fields, the metrics beside those of real data, and the tables of the spectra."""
    floor, bands = result.details.get("floor", {}), result.details.get("bands")
    if bands is None:
        return text([result])
    items = result.details.get("items", {})  # of a result of an older version there are none
    settings = "" if result.sampler == "-" else f", {result.sampler_text} {result.num_steps}"
    rows = [[PLAIN.escape(f"{result.run}{settings}"), "generated", "real"]]
    for name, metric in result.metrics.items():
        rows.append([PLAIN.escape(name), number(metric, PLAIN), _stored_number(floor.get(name), PLAIN)])
    against = result.details.get("floor_of", "other real data")
    best = "0 is best, but of precision and recall 1"
    parts = [aligned(rows), f"{best}; real: the same of {against} in place of samples."]
    if alike := [f"{n} {name} items count as about {m:.0f}" for name, (n, m) in items.items() if m < LOWEST * n]:
        parts.append(f"Neighbouring items are alike: {' and '.join(alike)} independent ones in the errors.")
    parts += [_band_table(table) for table in bands[:MOST_TABLES]]
    if len(bands) > MOST_TABLES:
        parts.append(f"and {len(bands) - MOST_TABLES} more tables, which --json prints.")
    if result.provenance.get("split") == "train":
        parts.append("The real data are those that the model was trained on: hold a part out for an honest comparison.")
    return "\n\n".join([*parts, *notes([result], PLAIN)])


def _band_table(table: Mapping[str, Any]) -> str:
    """A spectrum of one channel, or the coherence of two."""
    is_spectrum, rows, inside = "spectrum" in table, [], 0
    for band in table["bands"]:
        low, high, z = int(band["low"]), int(band["high"]), band["z"]
        sides = [number(Measured(band[side], band[f"{side}_error"]), PLAIN) for side in ("real", "generated")]
        numbers = [*([(band["ratio"], ".3g")] if is_spectrum else []), (z, ".1f")]
        shown = [PLAIN.missing if x is None else f"{x:{form}}" for x, form in numbers]
        rows.append([f"{low}" if low == high else f"{low}-{high}", *sides, *shown])
        inside += z is not None and abs(z) <= 2
    kind, of = ("Spectrum", "channel") if is_spectrum else ("Coherence", "channels")
    title = f"{kind} over {table[kind.lower()]} of {table[of]}"
    share = f"{inside} of {len(rows)} bands are within 2 standard errors of the real data"
    head = ["k", "real", "generated", *(["ratio"] if is_spectrum else []), "z"]
    return "\n".join([f"{PLAIN.escape(title)}: {share}", aligned([head, *rows])])


def _stored_number(values: Any, style: Style) -> str:
    """A metric in the details of a result."""
    return number(Measured(values["value"], values["error"]) if values else NOT_MEASURED, style)


def _blocks(
    results: Sequence[Result], paired: Sequence[Comparison], style: Style
) -> Iterator[tuple[str, list[list[str]], list[str]]]:
    """The tables, each with its title, its head and rows, and the notes below it."""
    yield "", cells(results, style), notes(results, style)
    for title, rows in class_cells(results, style).items():
        yield f"By class: {title}", rows, []
    if paired:
        yield "Paired over seeds", paired_cells(paired, style), paired_notes(paired, style)


def csv_text(results: Sequence[Result]) -> str:
    """One line per result: its settings, the value and error of each metric in full precision, its provenance.

    A line of a group has the mean as the value, and also the standard deviation over its trainings and their number.
    """
    rows = []
    for result in results:
        row = {key: getattr(result, key) for key in HEAD} | {"options": json.dumps(result.options)}
        for name, metric in result.metrics.items():
            row |= {name: metric.value, f"{name} (error)": metric.error}
            if metric.over is not None:
                row |= {"trainings": metric.over.n, f"{name} (std over trainings)": metric.over.deviation}
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
                metric = result.metrics.get(name, NOT_MEASURED)
                leader = best.get((result.source, result.num_steps, name))
                is_best = metric.finite is not None and leader == metric.value
                row.append((style.best if is_best else "{}").format(number(metric, style)))
            rows.append(row)
            names = ["", ""]
        before = run
    return rows


def notes(results: Sequence[Result], style: Style) -> list[str]:
    """Where the numbers come from: one sentence if it is the same for all, else one for each mark in the table."""
    sources = [f"{mark} {source}".lstrip() for source, mark in _marks(results).items()]
    accuracies: set[Any] = {share for result in results if fits(share := result.details.get("classifier"), float)}
    if accuracies:
        sources.append(
            "right class: the share of samples that a small classifier, trained on the real images, gives the class "
            "asked for; of real images that it was not trained on, "
            f"{', '.join(f'{share:.1%}' for share in sorted(accuracies))}."
        )
    sources += _real_against_real(results)
    if any(metric.over is not None for result in results for metric in result.metrics.values()):
        sources.append(
            "a ± b (samples ± c): mean a and standard deviation b over trainings that differ only in the seed; c is "
            "the mean error of one training over its samples."
        )
    return [style.escape(note) for note in sources]


def _real_against_real(results: Sequence[Result]) -> list[str]:
    """What real pictures have in place of generated ones, a sentence for each source, to be escaped."""
    sentences, marks = [], _marks(results)
    for result in results:
        if (floor := result.details.get("floor")) and "num_items" not in result.provenance:
            numbers = ", ".join(f"{name} {_stored_number(values, MARKDOWN)}" for name, values in floor.items())
            of = result.details.get("floor_of", "other real data")
            sentences.append(f"{marks[result.source]} {of} in place of samples: {numbers}.".lstrip())
    return list(dict.fromkeys(sentences))


def class_cells(results: Sequence[Result], style: Style) -> dict[str, list[list[str]]]:
    """The tables of the metrics that were measured of each class, by their names: a column per class."""
    by_class = [(result, metrics) for result in results if (metrics := result.details.get("by_class"))]
    classes = sorted({label for _, metrics in by_class for label in metrics}, key=int)
    names = dict.fromkeys(name for _, metrics in by_class for values in metrics.values() for name in values)
    tables = {}
    for name in names if len(classes) <= MOST_CLASSES else ():  # more are in JSON
        tables[style.escape(name)] = [["run", "sampler", "steps", *classes]]
        for result, metrics in by_class:
            row = [style.escape(result.run), style.escape(result.sampler_text), str(result.num_steps)]
            row += [_stored_number(metrics.get(label, {}).get(name), style) for label in classes]
            tables[style.escape(name)].append(row)
    return tables


def paired_cells(paired: Sequence[Comparison], style: Style) -> list[list[str]]:
    """The head and the rows of the paired tests: mean difference ± standard error (p) by groups, sampler and steps."""
    metrics, marks = list(dict.fromkeys(chain.from_iterable(pair.tests for pair in paired))), _marks(paired)
    rows, before = [["difference", "sampler", "steps", *map(style.escape, metrics)]], ("", "")
    order = list(dict.fromkeys((pair.group, pair.source, pair.sampler) for pair in paired))
    for pair in sorted(
        paired, key=lambda pair: (order.index((pair.group, pair.source, pair.sampler)), -pair.num_steps)
    ):
        names = (one_line(f"{pair.group} − {pair.baseline} {marks[pair.source]}"), pair.sampler)
        shown = [style.escape(name) if name != old else "" for name, old in zip(names, before, strict=True)]
        rows.append([*shown, str(pair.num_steps), *(_paired(pair.tests.get(name), style) for name in metrics)])
        before = names
    return rows


def _paired(test: PairedTest | None, style: Style) -> str:
    if test is None:
        return style.missing
    p = "no test" if test.p is None else "p < 0.0001" if test.p < 1e-4 else f"p = {test.p:.2g}"
    return f"{number(Measured(test.difference, test.error), style)} ({style.escape(p)})"


def paired_notes(paired: Sequence[Comparison], style: Style) -> list[str]:
    """What the numbers of the paired tests are, and how far to trust them."""
    counts = sorted({len(pair.seeds) for pair in paired})
    words = (
        "Mean ± standard error of the differences between two trainings of the same seed; p of the two-sided paired "
        f"t-test. It rests on n = {' or '.join(map(str, counts))} trainings of each group, assumes differences that "
        "are normally distributed, and is not corrected for the number of tests."
    )
    few = " So few trainings show only differences that are large beside their spread, and p is rough."
    return [style.escape(words + (few if counts[0] < FEW else ""))]


def find_metrics(results: Sequence[Result]) -> dict[str, bool]:
    """The metrics of all results in the order in which they first occur, and whether higher is better."""
    return {name: metric.higher_is_better for result in results for name, metric in result.metrics.items()}


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
        for name, metric in result.metrics.items():
            if metric.finite is not None:
                values.setdefault((result.source, result.num_steps, name), []).append(metric.finite)
    return {key: (max if metrics[key[2]] else min)(numbers) for key, numbers in values.items() if len(numbers) > 1}


def number(measured: Measured, style: Style) -> str:
    """value ± error; the error has one significant digit, or two if it begins with 1 or 2, and the value as many.

    Of a group: mean ± standard deviation over trainings (samples ± error).
    """
    value, error, over = measured.finite, measured.error, measured.over
    if value is None:
        return style.missing
    if over is not None and over.deviation is not None:
        mean = number(Measured(value, over.deviation), style)
        return mean if error is None else f"{mean} (samples {style.plus_minus} {error:.2g})"
    if error is None or not math.isfinite(error):
        return f"{value:.4g}"
    leading, exponent = f"{error:.1e}".split("e")
    decimals = (1 if float(leading) < 3 else 0) - int(exponent)
    if not error or abs(value) >= 1e6 or decimals + math.log10(abs(value) or 1) > 8:
        return f"{value:.4g} {style.plus_minus} {error:.1g}"  # more digits than anybody would read
    return f"{value:.{max(0, decimals)}f} {style.plus_minus} {error:.{max(0, decimals)}f}"


NAMED = zip("\\~^<>|", ("backslash", "asciitilde", "asciicircum", "less", "greater", "bar"), strict=True)
LETTERS = {letter: rf"\text{name}{{}}" for letter, name in NAMED} | {letter: f"\\{letter}" for letter in "&%$#_{}"}
IN_LATEX = str.maketrans(LETTERS | {"−": "$-$", "×": r"$\times$", "±": r"$\pm$"})
TYPED = str.maketrans({"−": "-", "–": "-", "×": "x", "±": "+-"})
MARKDOWN = Style(escaped, "**{}**")
LATEX = Style(lambda words: words.translate(IN_LATEX), r"\textbf{{{}}}", r"$\pm$", "--", r"$\downarrow$", r"$\uparrow$")
PLAIN = Style(lambda words: words.translate(TYPED).encode("ascii", "replace").decode(), "{}", "+-", "-", "", "")
HTML = Style(html.escape, "<strong>{}</strong>")
