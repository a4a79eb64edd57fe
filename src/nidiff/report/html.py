"""``report.html``: a run in one file, which opens from disk and fetches nothing."""

import math
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import nidiff
from nidiff.covariance.families import Identity
from nidiff.covariance.modes import Modes
from nidiff.covariance.summary import summary
from nidiff.data.dataset import as_stored
from nidiff.data.figures import samples_figure
from nidiff.data.grid import Grid
from nidiff.data.load import load_dataset
from nidiff.data.pictures import grid_image
from nidiff.diffusion.choice import choices_text
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import InputError
from nidiff.evaluation.results import known_results
from nidiff.evaluation.table import HTML, cells, notes
from nidiff.files import as_path, replace_text, writing
from nidiff.model.folder import image_shape, load_model, read_grid
from nidiff.model.manifest import model_sha256
from nidiff.model.sampling import SAMPLING, read_choices
from nidiff.randomness import generators_from_seeds
from nidiff.recipe import fits
from nidiff.report.denoising import denoise_levels
from nidiff.report.loss import LOGGED, losses_figure, read_log
from nidiff.report.noise import noise_figure, summary_rows
from nidiff.report.page import figure, image, page, picture, plot, table
from nidiff.report.quality import quality_figure
from nidiff.report.restored import item_picture
from nidiff.sampling.sampler import sample
from nidiff.training.baseline import LAWS, baseline_text
from nidiff.training.experiment import Experiment
from nidiff.training.run import RunDirectory

MOST_GRIDS, MOST_PIXELS, MOST_AXES = 12, 2**25, 8  # of samples, of one of them, of an image
MOST_DRAWS = 36
MOST_FIGURES, FIGURE_SIZE = 4, (1100, 200_000)  # of samples that are no pictures: a figure may have more letters
GRID_SIDE, GRID_LIMIT = 480, 80_000  # a grid of samples that is written in more letters is made smaller
TILE_SIDE, TILE_LIMIT = 192, 27_000  # the same for one denoised image
ABOUT_BASELINE = (
    "<p>N(μ, C) has the mean and the spectrum of the data: what is better in the model it learnt beyond.</p>"
)
DENOISING = "Denoising one image"
ABOUT_DENOISING = """<p>x = signal · x0 + sigma · Σ^½ eps, with the same eps at every level, is shown divided by
√(signal² + sigma²). Denoised is x̂0; error is the root mean square of x̂0 − x0, {units}.</p>"""
OF_PICTURES, OF_OTHERS = "pixels from −1 to 1", "in the units of the model; of volumes and video the middle is shown"


def write_report(run_folder: Path, x0: Tensor | None = None, out: Path | None = None) -> Path:
    """Write RUN/report.html, or ``out``, from what the run directory holds now; the old page stays until the new one is
    whole.

    ``x0`` [C, *event] in the units of the model is the item to denoise, such as the first of the training data. Nothing
    outside the run directory is read: the run may be a stranger's, and its experiment.json can name any folder.
    """
    run_folder = as_path("run", run_folder)
    run, out = RunDirectory.open(run_folder), run_folder / "report.html" if out is None else out
    sections = SECTIONS | {DENOISING: partial(_denoising, x0=x0)}
    body = f"<h1>{escape(run.name)}</h1>\n" + "".join(run_section(run, *section) for section in sections.items())
    with writing("report", out, "write it with nidiff report"):
        replace_text(out, page(f"{run.name}: nidiff report", body, f"Written by nidiff {nidiff.__version__}."))
    return out


def run_section(run: RunDirectory, heading: str, section: Callable[[RunDirectory], str] | None = None) -> str:
    """A section of the page, by default one of `SECTIONS`; what is missing or cannot be read is said in its place."""
    try:
        shown = (section or SECTIONS[heading])(run)
    except InputError as error:
        shown = _missing(str(error))
    return f"<section>\n<h2>{heading}</h2>\n{shown}\n</section>\n"


def _missing(sentence: str) -> str:
    return f'<p class="missing">Not shown: {escape(sentence)}</p>\n'


def _experiment(run: RunDirectory) -> str:
    experiment, facts, default = run.experiment, run.facts, Experiment().settings()
    done = max(run_log(run)["step"], default=0)
    about = {
        "data": experiment.data.source,
        "images": _count(facts.get("images")),
        "image": _shape(run),
        "parameters": _count(facts.get("parameters")),
        "training": f"{done:,.0f} of {experiment.steps:,} steps" + ("" if run.has_model else ", not ended"),
    }
    if run.has_model and (choices := read_choices(run.model / SAMPLING, model_sha256(run.model))):
        about["samplers for few evaluations"] = choices_text(choices)
    rows = [(name, _value(value), _value(default[name])) for name, value in experiment.settings().items()]
    changed = [row for row in rows if row[1] != row[2]]
    same = [row[:2] for row in rows if row[1] == row[2]]
    others = table(("setting", "value", "default"), changed) if changed else "<p>None.</p>\n"
    usual = f"<summary>The {len(same)} other settings</summary>\n{table(('setting', 'value'), same)}"
    return f"{_facts(about)}<h3>Settings that are not the default</h3>\n{others}<details>\n{usual}</details>"


def _shape(run: RunDirectory) -> str:
    """The shape of an item and the names of its axes."""
    shape, grid = run.facts.get("image_shape"), described_grid(run)
    if not isinstance(shape, list) or len(shape) > MOST_AXES:
        return "not recorded"
    words = " × ".join(map(_count, shape))
    return words if grid is None else f"{words} ({', '.join(('channels', *grid.axes))})"


def described_grid(run: RunDirectory) -> Grid | None:
    """The grid of the data of a run; None if the run does not describe it."""
    shape = run.facts.get("image_shape")
    if not (isinstance(shape, list) and len(shape) in (2, 3, 4) and all(fits(size, int) for size in shape)):
        return None
    try:
        stored = run.stored()
        return read_grid(run.folder, shape, PIXELS if stored is None else stored.scaling)
    except InputError:
        return None


def _is_picture(grid: Grid | None) -> bool:
    return grid is None or grid.kind == "picture"


def _covariance(run: RunDirectory) -> str:
    covariance, name = run.covariance, run.experiment.covariance
    white = {} if name == "white" else {"white": Identity(covariance.event_shape)}
    alt = f"White noise beside N(0, Σ) for Σ = {name}: draws of each and their radial power spectra"
    drawn = plot(noise_figure({**white, name: covariance}, num_images=5), alt)
    return (
        f"<p>Σ = <code>{escape(name)}</code></p>\n{drawn}{_facts(summary_rows(summary(covariance), covariance.size))}"
    )


def _training(run: RunDirectory) -> str:
    log = run_log(run)
    if not log["step"]:
        return _missing("log.jsonl has no line yet.")
    speed = np.median(log["images_per_s"])
    words = f"Loss {log['loss'][-1]:.4g} at step {log['step'][-1]:,.0f}; {speed:,.0f} images per second (median)."
    return plot(losses_figure({"smoothed": log}), f"Loss by step. {words}", words)


def run_log(run: RunDirectory) -> dict[str, list[float]]:
    """What the run has logged so far."""
    return read_log(run.log_file) if _is_inside(run.folder, run.log_file) else {name: [] for name in LOGGED}


def sample_grids(run: RunDirectory) -> list[tuple[int, Path]]:
    """The steps at which grids of samples were drawn, and their files."""
    files = [file for file in run.folder.glob("samples/*.png") if file.stem.isdecimal() and len(file.stem) < 19]
    return sorted((int(file.stem), file) for file in files if _is_inside(run.folder, file))


def _samples(run: RunDirectory) -> str:
    grids = sample_grids(run)
    if not grids:
        return _missing("samples/ has no pictures yet.")
    wide = not _is_picture(described_grid(run))
    most = MOST_FIGURES if wide else MOST_GRIDS
    chosen = np.linspace(0, len(grids) - 1, min(most, len(grids))).round().astype(int)
    shown = "".join(grid_figure(*grids[index], wide=wide) for index in chosen)
    steps = "" if run.experiment.num_steps is None else f", {run.experiment.num_steps} steps"
    settings = f"{run.experiment.sampler}{steps}, the same seeds in every grid."
    return f"<p>{escape(settings)}</p>\n{_in_columns(shown, wide)}"


def _baseline(run: RunDirectory) -> str:
    stored = run.stored()
    gaussian = None if stored is None else stored.gaussian
    if stored is None or gaussian is None or not 2 <= len(gaussian.shape) <= 4:
        return "<p>This run did not fit a Gaussian to its data.</p>"
    count = min(run.experiment.num_samples, MOST_DRAWS)
    if count * math.prod(gaussian.shape) > MOST_PIXELS:
        return _missing("its images are too large to be drawn here.")
    grid = read_grid(run.folder, gaussian.shape, stored.scaling)
    drawn = gaussian.sample((count, *gaussian.shape), generators_from_seeds(range(count)))
    data, texts = as_stored(drawn, stored.scaling, grid.dtype), ("Grid of draws from the data's Gaussian", "N(μ, C)")
    if _is_picture(grid):
        shown = _in_columns(figure(picture(grid_image(data), GRID_SIDE, GRID_LIMIT), *texts), wide=False)
    else:
        shown = plot(samples_figure(data, grid), *texts)
    costs = [baseline_text(run.facts.get(law), law) for law in LAWS]
    cost = "; ".join(filter(None, costs)) or "not recorded"
    return f"{ABOUT_BASELINE}<p>{escape(cost)}.</p>\n{shown}"


def _in_columns(figures: str, wide: bool) -> str:
    """Grids of small pictures side by side; figures with axes have the whole width."""
    return figures if wide else f'<div class="grids">\n{figures}</div>'


def _is_inside(folder: Path, file: Path) -> bool:
    """Whether a file is a plain one in ``folder``: a link in a stranger's run can lead to any other file."""
    real = Path(os.path.realpath(file))
    return real.is_file() and real.is_relative_to(os.path.realpath(folder))


def grid_figure(step: int, file: Path, *, wide: bool = False) -> str:
    """The grid of samples in a file, small enough for a page; in its place a sentence if it cannot be read."""
    # Pillow raises nearly anything when a file is broken; it may still be being written.
    with suppress(Exception), Image.open(file, formats=("PNG",)) as grid:  # which reads no pixels yet
        if grid.width * grid.height <= MOST_PIXELS:
            source = picture(grid, *(FIGURE_SIZE if wide else (GRID_SIDE, GRID_LIMIT)))
            return figure(source, f"Grid of samples after step {step}", f"step {step:,}", "wide" if wide else "")
    return _missing(f"{file.name} cannot be read.")


def _denoising(run: RunDirectory, x0: Tensor | None = None) -> str:
    denoiser = load_model(run.folder)
    shape, origin = image_shape(denoiser.net, denoiser.process.covariance), "an image of the data"
    if x0 is None:
        x0, origin = _image_to_denoise(run, denoiser, shape)
    if tuple(x0.shape) != shape:
        return _missing(f"x0 has shape {tuple(x0.shape)}, and images of the model {shape}.")
    grid = read_grid(run.folder, shape, denoiser.scaling)

    def shown(x: Tensor) -> Tensor:
        return as_stored(x[None].cpu(), denoiser.scaling, grid.dtype)[0].float() if _is_picture(grid) else x

    def tile(x: Tensor, alt: str) -> str:
        """x on the scale of x0."""
        return image(picture(item_picture(shown(x), shown(x0), grid), TILE_SIDE, TILE_LIMIT), alt, "tile")

    columns = [("", "noisy x", "denoised", "error")]
    for step in denoise_levels(denoiser, x0):
        level = f"signal {_number(step.level.signal)}, sigma {_number(step.level.sigma)}"
        tiles = tile(step.noisy, f"Noisy image at {level}"), tile(step.denoised, f"Denoised image at {level}")
        columns.append((level.replace(", ", "<br>"), *tiles, f"{step.error:.3f}"))
    head, *rows = zip(*columns, strict=True)
    about = ABOUT_DENOISING.format(units=OF_PICTURES if _is_picture(grid) else OF_OTHERS)
    return f"<p>{tile(x0, 'The clean image')} x0, {escape(origin)}.</p>\n{table(head, rows, 'tiles')}{about}"


def _image_to_denoise(run: RunDirectory, denoiser: Denoiser, shape: tuple[int, ...]) -> tuple[Tensor, str]:
    """The first of the digits, which are built in, or a sample: other data could be anything on this machine."""
    if run.experiment.data.source == "digits" and run.experiment.data.data_dir is None:
        first = load_dataset("digits").batch(torch.tensor([0]))[0]
        if first.shape == shape:
            return first, "the first image of the training data"
    with torch.inference_mode():
        drawn = sample(denoiser, (1, *shape), generator=[0], **run.experiment.sampling(denoiser.process.schedule))
    return drawn[0], "a sample of seed 0; nidiff report --data shows an image of the data instead"


def run_metrics(run: RunDirectory) -> str:
    results = known_results(run.folder) if _is_inside(run.folder, run.folder / "metrics.json") else []
    if not results:
        return _missing("there are no results of this model yet: measure it with nidiff evaluate.")
    head, *rows = cells(results, HTML)
    remarks = "".join(f"<p>{note}</p>\n" for note in notes(results, HTML))
    return table(head, rows, "numbers") + remarks + plot(quality_figure(results), "Each metric by steps")


def _repeat(run: RunDirectory) -> str:
    experiment, name, again = run.experiment, shlex.quote(run.name), shlex.quote(f"{run.name}-again")
    train = f"nidiff train --config {shlex.quote(f'{run.name}/experiment.json')} --out"
    steps = "" if experiment.num_steps is None else f"--num-steps {experiment.num_steps} "
    drawing = f"--sampler {shlex.quote(experiment.sampler)} {steps}--seeds 0-{experiment.num_samples - 1}"
    sampling = f"nidiff sample {name} {drawing} --out {shlex.quote(f'{run.name}-samples')}"
    commands = f"{train} {again}\n" + (sampling if run.has_model else f"{train} {name} --resume")
    return f"<p>In the folder that holds the run:</p>\n<pre><code>{escape(commands)}</code></pre>"


def _facts(rows: Mapping[str, str]) -> str:
    return table((), [(name, escape(value)) for name, value in rows.items()])


def _number(coefficient: Modes) -> str:
    """A number, or where modes differ the smallest and the largest."""
    if coefficient.basis is None:
        return f"{float(coefficient):.3g}"
    return f"{coefficient.values.min().item():.2g} … {coefficient.values.max().item():.2g}"


def _value(value: Any) -> str:
    words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"<code>{escape(words)}</code>" if words else ""


def _count(number: Any) -> str:
    return f"{number:,}" if isinstance(number, int) and not isinstance(number, bool) else "not recorded"


SECTIONS: dict[str, Callable[[RunDirectory], str]] = {
    "Experiment": _experiment,
    "Noise": _covariance,
    "Training": _training,
    "Samples over training": _samples,
    "Gaussian baseline": _baseline,
    DENOISING: _denoising,
    "Quality": run_metrics,
    "How to repeat it": _repeat,
}
