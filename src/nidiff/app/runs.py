"""The tab *Runs*: what the runs are, their losses, their samples over training, and what was measured."""

from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from nidiff.app.look import Page, labelled
from nidiff.app.shelf import MOST as MOST_RUNS
from nidiff.app.shelf import Shelf
from nidiff.app.work import QUICK, spoken
from nidiff.errors import InputError
from nidiff.report.html import described_grid, grid_figure, run_log, run_metrics, sample_grids
from nidiff.report.loss import losses_figure
from nidiff.report.page import plot, table
from nidiff.style import dark_page
from nidiff.training.run import RunDirectory

MOST, FIRST = 12, 6  # curves in one figure, and at first
EVERY = 10  # seconds between two looks at runs that are being watched
HEAD = ("run", "data", "noise Σ", "schedule", "steps", "loss")
NONE = "<p>There are no runs here yet. Start one with <code>nidiff train --out runs/try</code>, then press Refresh.</p>"


def runs_table(shelf: Shelf) -> str:
    """What each run is and how far it has come, in HTML."""
    rows = [_row(name, path) for name, path in shelf.runs().items()]
    return table(HEAD, rows) if rows else NONE


def _row(name: str, path: Path) -> tuple[str, ...]:
    files = (path / "experiment.json", path / "log.jsonl", path / "model")
    changed = [(at.stat().st_mtime_ns, at.stat().st_size) for at in files if at.exists()]
    return (escape(name), *_settings_and_progress(path, tuple(changed)))


@lru_cache(2 * MOST_RUNS)
def _settings_and_progress(path: Path, changed: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """The rest of the row of a run, whose files last ``changed`` then: many logs take seconds to read."""
    try:
        run = RunDirectory.open(path)
        experiment, log = run.experiment, run_log(run)
    except InputError as error:  # it may be being written, or be damaged
        return (escape(str(error)), "", "", "", "")
    done = f"{max(log['step'], default=0):,.0f} of {experiment.steps:,}" + ("" if run.has_model else ", training")
    loss = f"{log['loss'][-1]:.4g}" if log["loss"] else ""
    settings = (experiment.data, experiment.covariance, experiment.schedule)
    return (*(escape(one[:60]) for one in settings), done, loss)


def losses(shelf: Shelf, names: list[str], is_dark: bool) -> str:
    """The losses of the runs, in HTML."""
    if not isinstance(names, list) or len(names) > MOST:
        raise InputError(f"runs: choose at most {MOST} for one figure.")
    logs = {name: log for name in names if (log := run_log(shelf.run(name)))["step"]}
    if not logs:
        return "<p>None of the chosen runs has logged a loss yet.</p>" if shelf.runs() else ""
    with dark_page(is_dark):
        return plot(losses_figure(logs), f"Loss by step of {', '.join(logs)}")


def samples_at(shelf: Shelf, name: str | None, share: float) -> str:
    """The samples that were drawn when this share of the training was over, in HTML."""
    if name is None:
        return ""
    if not (isinstance(share, int | float) and 0 <= share <= 1):
        raise InputError("progress must be from 0 to 1.")
    run = shelf.run(name)
    grids = sample_grids(run)
    if not grids:
        return "<p>This run has drawn no samples yet.</p>"
    grid = described_grid(run)
    index = round(share * (len(grids) - 1))
    return grid_figure(*grids[index], wide=grid is not None and grid.kind != "picture")


def metrics(shelf: Shelf, name: str | None, is_dark: bool) -> str:
    """What was measured of a run, in HTML."""
    if name is None:
        return ""
    try:
        with dark_page(is_dark):
            return run_metrics(shelf.run(name))
    except InputError as error:
        return f"<p>{escape(str(error))}</p>"


def newest(shelf: Shelf) -> list[str]:
    """The names of all runs; the one that began last is the first."""
    runs = shelf.runs()
    return sorted(runs, key=lambda name: -(runs[name] / "experiment.json").stat().st_mtime)


def runs_tab(page: Page) -> None:
    shelf = page.shelf
    names = newest(shelf)
    overview = gr.HTML(runs_table(shelf), elem_id="runs-table", elem_classes="list", padding=False)
    with gr.Row():
        refresh = gr.Button("Refresh", size="sm", elem_id="runs-refresh")
        watch = gr.Checkbox(label=f"Refresh every {EVERY} s", container=False, elem_id="runs-watch")
    chosen = gr.Dropdown(
        labelled(names),
        value=names[:FIRST],
        multiselect=True,
        max_choices=MOST,
        label="Runs to compare",
        elem_id="runs-chosen",
    )
    curves = gr.HTML(elem_id="runs-losses", padding=False)
    one = gr.Dropdown(labelled(names), value=next(iter(names), None), label="One run in detail", elem_id="runs-one")
    progress = gr.Slider(0, 1, 1, step=0.01, label="Samples at this share of the training", elem_id="runs-progress")
    pictures = gr.HTML(elem_id="runs-samples", padding=False)
    measured = gr.HTML(elem_id="runs-metrics", padding=False)

    def look(names: Any, name: Any, share: Any, dark: Any) -> list[Any]:
        known = newest(shelf)
        kept = [each for each in names or known[:FIRST] if each in known]
        name = name if name in known else next(iter(known), None)
        shown = [
            runs_table(shelf),
            gr.update(choices=labelled(known), value=kept),
            gr.update(choices=labelled(known), value=name),
        ]
        return [*shown, losses(shelf, kept, dark), samples_at(shelf, name, share), metrics(shelf, name, dark)]

    everything = [chosen, one, progress, page.dark], [overview, chosen, one, curves, pictures, measured]
    page.ready.then(spoken(look), *everything, show_progress="hidden", **QUICK)
    refresh.click(spoken(look), *everything, show_progress="minimal", **QUICK)
    timer = gr.Timer(EVERY, active=False)
    timer.tick(spoken(look), *everything, show_progress="hidden", **QUICK)
    watch.change(lambda on: gr.Timer(active=bool(on)), watch, timer, **QUICK)
    chosen.input(spoken(lambda names, dark: losses(shelf, names, dark)), [chosen, page.dark], curves, **QUICK)
    progress.input(
        spoken(lambda name, share: samples_at(shelf, name, share)),
        [one, progress],
        pictures,
        trigger_mode="always_last",
        show_progress="hidden",
        **QUICK,
    )
    one.input(
        spoken(lambda name, share, dark: (samples_at(shelf, name, share), metrics(shelf, name, dark))),
        [one, progress, page.dark],
        [pictures, measured],
        **QUICK,
    )
