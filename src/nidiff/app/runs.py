"""The tab *Runs*: what the runs are, their losses, their samples over training, and what was measured."""

from functools import lru_cache, partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from nidiff.app.layout import HIDDEN_PROGRESS, Page, labelled
from nidiff.app.shelf import MOST as MOST_RUNS
from nidiff.app.shelf import Shelf
from nidiff.app.work import QUICK, check_between, with_user_errors
from nidiff.errors import InputError
from nidiff.report.html import described_grid, grid_figure, run_log, run_metrics, sample_grids
from nidiff.report.loss import losses_figure
from nidiff.report.page import plot, table
from nidiff.style import dark_page
from nidiff.training.run import RunDirectory

MOST, FIRST = 12, 6  # curves in one figure, and at first
EVERY = 10  # seconds between two looks at runs that are being watched
HEAD = ("run", "data", "noise Σ", "schedule", "steps", "loss")
NO_RUNS = (
    "<p>There are no runs here yet. Start one with <code>nidiff train --out runs/try</code>, then press Refresh.</p>"
)


def runs_table(shelf: Shelf) -> str:
    """The settings and the progress of every run, in HTML."""
    rows = [_row(name, path) for name, path in shelf.runs().items()]
    return table(HEAD, rows) if rows else NO_RUNS


def _row(name: str, path: Path) -> tuple[str, ...]:
    files = (path / "experiment.json", path / "log.jsonl", path / "model")
    changed = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists()]
    return (escape(name), *_settings_and_progress(path, tuple(changed)))


@lru_cache(2 * MOST_RUNS)
def _settings_and_progress(path: Path, changed: tuple[tuple[int, int], ...]) -> tuple[str, ...]:
    """The rest of the row of a run, read again when its files have ``changed``: many logs take seconds to read."""
    try:
        run = RunDirectory.open(path)
        experiment, log = run.experiment, run_log(run)
    except InputError as error:  # it may be being written, or be damaged
        return (escape(str(error)), "", "", "", "")
    done = f"{max(log['step'], default=0):,.0f} of {experiment.steps:,}" + ("" if run.has_model else ", training")
    loss = f"{log['loss'][-1]:.4g}" if log["loss"] else ""
    settings = (experiment.data.source, experiment.covariance, experiment.schedule)
    return (*(escape(setting[:60]) for setting in settings), done, loss)


def losses(shelf: Shelf, names: list[str], is_dark: bool) -> str:
    """The losses of the runs, in HTML."""
    if not isinstance(names, list) or len(names) > MOST:
        raise InputError("runs", None, "are too many for one figure", f"choose at most {MOST}")
    logs = {name: log for name in names if (log := run_log(shelf.run(name)))["step"]}
    if not logs:
        return "<p>None of the chosen runs has logged a loss yet.</p>" if shelf.runs() else ""
    with dark_page(is_dark):
        return plot(losses_figure(logs), f"Loss by step of {', '.join(logs)}")


def samples_at(shelf: Shelf, name: str | None, share: float) -> str:
    """The samples that were drawn when this share of the training was over, in HTML."""
    if name is None:
        return ""
    share, run = check_between("progress", share, 0, 1), shelf.run(name)
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
    compared = gr.Dropdown(
        labelled(names), value=names[:FIRST], multiselect=True, max_choices=MOST, label="Runs to compare",
        elem_id="runs-chosen",
    )  # fmt: skip
    curves = gr.HTML(elem_id="runs-losses", padding=False)
    detailed = gr.Dropdown(
        labelled(names), value=next(iter(names), None), label="One run in detail", elem_id="runs-one"
    )
    progress = gr.Slider(0, 1, 1, step=0.01, label="Samples at this share of the training", elem_id="runs-progress")
    pictures = gr.HTML(elem_id="runs-samples", padding=False)
    measured = gr.HTML(elem_id="runs-metrics", padding=False)

    @with_user_errors
    def render_all(names: Any, name: Any, share: Any, dark: Any) -> list[Any]:
        known = newest(shelf)
        names = [run for run in names or known[:FIRST] if run in known]
        name = name if name in known else next(iter(known), None)
        menus = [gr.update(choices=labelled(known), value=value) for value in (names, name)]
        figures = losses(shelf, names, dark), samples_at(shelf, name, share), metrics(shelf, name, dark)
        return [runs_table(shelf), *menus, *figures]

    @with_user_errors
    def render_run(name: Any, share: Any, dark: Any) -> tuple[str, str]:
        return samples_at(shelf, name, share), metrics(shelf, name, dark)

    everything = [compared, detailed, progress, page.dark], [overview, compared, detailed, curves, pictures, measured]
    page.ready.then(render_all, *everything, **HIDDEN_PROGRESS)
    refresh.click(render_all, *everything, show_progress="minimal", **QUICK)
    timer = gr.Timer(EVERY, active=False)
    timer.tick(render_all, *everything, **HIDDEN_PROGRESS)
    watch.change(lambda on: gr.Timer(active=bool(on)), watch, timer, **QUICK)
    compared.input(with_user_errors(partial(losses, shelf)), [compared, page.dark], curves, **QUICK)
    samples = with_user_errors(partial(samples_at, shelf))
    progress.input(samples, [detailed, progress], pictures, trigger_mode="always_last", **HIDDEN_PROGRESS)
    detailed.input(render_run, [detailed, progress, page.dark], [pictures, measured], **QUICK)
