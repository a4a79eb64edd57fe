"""The tab *Runs*: the losses of several runs; the settings of one, its samples over training, and what was measured."""

from functools import partial
from typing import Any

import gradio as gr

from nidiff.app.layout import Tab, labelled
from nidiff.app.shelf import Shelf
from nidiff.report.html import run_log, run_section
from nidiff.report.loss import losses_figure
from nidiff.report.page import plot
from nidiff.style import dark_page

MOST, FIRST = 12, 6  # curves in one figure, and at first
SECTIONS = ("Experiment", "Samples over training", "Quality")
NO_RUNS = "<p>Start a run with <code>nidiff train --out runs/try</code>, then press Refresh.</p>"


def losses(shelf: Shelf, names: list[str] | None, is_dark: bool) -> str:
    """The losses of the runs, in HTML."""
    logs = {name: log for name in list(names or ())[:MOST] if (log := run_log(shelf.run(name)))["step"]}
    if not logs:
        return "<p>None of the chosen runs has logged a loss yet.</p>" if shelf.runs() else NO_RUNS
    with dark_page(is_dark):
        return plot(losses_figure(logs), f"Loss by step of {', '.join(logs)}")


def details(shelf: Shelf, name: str | None, is_dark: bool) -> str:
    """Sections of the report of a run."""
    if name is None:
        return ""
    run = shelf.run(name)
    with dark_page(is_dark):
        return "".join(run_section(run, heading) for heading in SECTIONS)


def newest(shelf: Shelf) -> list[str]:
    """The names of all runs; the one that began last is the first."""
    runs = shelf.runs()
    return sorted(runs, key=lambda name: -(runs[name] / "experiment.json").stat().st_mtime)


def runs_tab(tab: Tab) -> None:
    shelf = tab.shelf
    names = newest(shelf)
    compared = gr.Dropdown(
        labelled(names), value=names[:FIRST], multiselect=True, max_choices=MOST, label="Runs to compare",
        elem_id="runs-chosen",
    )  # fmt: skip
    tab.status.render()
    curves = gr.HTML(NO_RUNS if not names else "", elem_id="runs-losses", padding=False)
    detailed = gr.Dropdown(labelled(names), value=next(iter(names), None), label="One run", elem_id="runs-one")
    refresh = gr.Button("Refresh", size="sm", elem_id="runs-refresh")
    detail = gr.HTML(elem_id="runs-detail", padding=False)

    def render(names: Any, name: Any, dark: Any) -> list[Any]:
        known = newest(shelf)
        names = [run for run in names or known[:FIRST] if run in known]
        name = name if name in known else next(iter(known), None)
        menus = [gr.update(choices=labelled(known), value=value) for value in (names, name)]
        return [*menus, losses(shelf, names, dark), details(shelf, name, dark)]

    for event in (tab.ready.then, refresh.click):
        tab.on(event, render, [compared, detailed, tab.dark], [compared, detailed, curves, detail])
    tab.on(compared.input, partial(losses, shelf), [compared, tab.dark], [curves])
    tab.on(detailed.input, partial(details, shelf), [detailed, tab.dark], [detail])
