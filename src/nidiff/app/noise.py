"""The tab *Noise*: choose a field, see what N(0, Σ) looks like, and copy the call that makes it."""

import math
from inspect import signature
from typing import Any, NamedTuple

import gradio as gr
from matplotlib.figure import Figure
from torch import Tensor

from nidiff.app.layout import HIDDEN_PROGRESS, LARGEST_SEED, Page, code
from nidiff.app.work import check_between, with_user_errors
from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.fields import ALIASES, COVARIANCES
from nidiff.covariance.summary import Summary, lag_correlation, summary
from nidiff.covariance.waves import BOUNDARIES
from nidiff.errors import one_of
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_whole
from nidiff.report.noise import draw_grid, draw_spectra, planes
from nidiff.report.page import plot, table
from nidiff.style import BLUE, dark_page, drawn, ink

DRAWS = 5
DIGITS = 4  # after the point, of a slider's number
SHAPES = {
    "256": (256,),
    "1024": (1024,),
    "32 × 32": (32, 32),
    "64 × 64": (64, 64),
    "128 × 128": (128, 128),
    "64 × 128": (64, 128),
    "16 × 16 × 16": (16, 16, 16),
    "32 × 32 × 32": (32, 32, 32),
}
USUAL = "64 × 64"
SMALL = tuple(name for name, shape in SHAPES.items() if math.prod(shape) <= 1024)  # Σ is a matrix there
LINES = tuple(name for name in SMALL if len(SHAPES[name]) == 1)


class Knob(NamedTuple):
    """A number of a field, and its slider."""

    key: str
    label: str
    low: float
    high: float
    step: float
    usual: float


class Field(NamedTuple):
    """A field that can be chosen: its label, its numbers and the shapes it can have."""

    label: str
    knobs: tuple[Knob, ...] = ()
    shapes: tuple[str, ...] = tuple(SHAPES)


CHOICES = {
    "white": Field("White noise"),
    "gff": Field("Gaussian free field", (Knob("gamma", "γ", 0, 2, 0.05, 1),)),
    "power_law": Field("Power law", (Knob("exponent", "Exponent", -2, 4, 0.1, 2),)),
    "matern": Field(
        "Matérn field",
        (
            Knob("length_scale", "Length scale ℓ (pixels)", 0.5, 16, 0.5, 4),
            Knob("smoothness", "Smoothness ν", 0.25, 2.5, 0.25, 1.5),
        ),
    ),
    "offset": Field("Offset noise", (Knob("strength", "Strength", 0, 1, 0.01, 0.1),)),
    "pyramid": Field("Pyramid noise", (Knob("discount", "Discount", 0.1, 1, 0.05, 0.9),), SMALL),
    "ar1": Field("Autoregression", (Knob("rho", "ρ", -0.95, 0.99, 0.01, 0.9),), LINES),
    "ou": Field("Ornstein–Uhlenbeck process", (Knob("scale", "Scale (steps)", 1, 64, 1, 16),), LINES),
    "brownian_bridge": Field("Brownian bridge", (), LINES),
}
KNOBS = [(name, knob) for name, field in CHOICES.items() for knob in field.knobs]


class Call(NamedTuple):
    """The call that makes a Σ, which can be written as a spec, in Python, and as a command."""

    field: str
    shape: tuple[int, ...]
    arguments: dict[str, float | str]

    @property
    def spec(self) -> str:
        values = {key: value if isinstance(value, str) else f"{value:g}" for key, value in self.arguments.items()}
        return ":".join(filter(None, [self.field, ",".join(f"{key}={value}" for key, value in values.items())]))

    @property
    def python(self) -> str:
        first = f"range({self.shape[0]})" if "times" in _parameters(self.field) else repr(self.shape)
        words = ", ".join([first, *(f"{key}={value!r}" for key, value in self.arguments.items())])
        return f"nidiff.{ALIASES.get(self.field, self.field)}({words})"

    def command(self, seed: int) -> str:
        return f"nidiff noise {self.spec} --shape {' '.join(map(str, self.shape))} --num-images {DRAWS} --seed {seed}"

    def covariance(self) -> Covariance:
        return as_covariance(self.spec, self.shape)


def _parameters(field: str) -> Any:
    return signature(COVARIANCES[ALIASES.get(field, field)]).parameters


def has_boundary(field: str) -> bool:
    return "boundary" in _parameters(field)


def checked_call(field: Any, shape: Any, boundary: Any, *numbers: Any) -> Call:
    """What a browser asks for; ``numbers`` are those of all `KNOBS`, and only those of the field count."""
    field = one_of("field", field, CHOICES)
    shape = one_of("shape", shape, CHOICES[field].shapes)
    arguments: dict[str, float | str] = {
        knob.key: round(check_between(knob.key, value, knob.low, knob.high), DIGITS)
        for (name, knob), value in zip(KNOBS, numbers, strict=True)
        if name == field
    }
    if has_boundary(field) and one_of("boundary", boundary, BOUNDARIES) != BOUNDARIES[0]:
        arguments["boundary"] = boundary
    return Call(field, SHAPES[shape], arguments)


def check_seed(seed: Any) -> int:
    return check_whole("seed", seed, 0, LARGEST_SEED)


def next_seed(seed: Any) -> int:
    """The first seed that is not drawn yet."""
    return (check_seed(seed) + DRAWS) % (LARGEST_SEED + 1)


def render(
    field: Any, shape: Any, boundary: Any, seed: Any, is_dark: Any, *numbers: Any
) -> tuple[str, str, str, str, str, str]:
    """Draws, spectrum, correlation and numbers of Σ as HTML, its Python line, and its command."""
    call, seed = checked_call(field, shape, boundary, *numbers), check_seed(seed)
    cov = call.covariance()
    eps = white_noise((DRAWS, *call.shape), generators_from_seeds(range(seed, seed + DRAWS)))
    draws = {"white": eps, call.field: cov.sqrt(eps)}  # one row if Σ is white
    about = summary(cov)
    with dark_page(is_dark is True):
        return (
            plot(_draws_figure(draws), f"Draws of N(0, Σ), {call.spec}", _caption(call, seed), ""),
            plot(_spectrum_figure(cov, draws[call.field]), "The power spectrum of Σ and of the draws", "", "drawn"),
            plot(_correlation_figure(cov, about), "The correlation of Σ against the lag", "", "drawn"),
            _numbers(cov, about),
            call.python,
            call.command(seed),
        )


def _caption(call: Call, seed: int) -> str:
    rows = "White noise eps" if call.field == "white" else "Above: white noise eps. Below: Σ^½ eps, with the same eps"
    scale = "one scale for all" if len(call.shape) == 1 else "grey from −3 (black) to 3 (white)"
    middle = ", the slice in the middle" if len(call.shape) == 3 else ""
    return f"{rows}. Seeds {seed} to {seed + DRAWS - 1}{middle}; {scale}."


@drawn
def _draws_figure(draws: dict[str, Tensor]) -> Figure:
    shape = planes(draws["white"]).shape[1:]
    ratio = 0.5 if len(shape) == 1 else shape[0] / shape[1]
    figure = Figure((8.0, 8.0 / DRAWS * ratio * len(draws)), dpi=120, layout="constrained")
    axes = figure.subplots()
    draw_grid(axes, {name: planes(events) for name, events in draws.items()})
    axes.set_yticks([])
    return figure


@drawn
def _spectrum_figure(cov: Covariance, draws: Tensor) -> Figure:
    figure = Figure((3.9, 3.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    draw_spectra(axes, [cov], {"Σ": draws})
    axes.set_title("")
    axes.minorticks_off()  # they take as long to draw as all the rest
    for line in axes.lines:
        line.set_color(BLUE)
    axes.legend([*axes.lines], ["Σ", "these draws"], frameon=False)
    return figure


@drawn
def _correlation_figure(cov: Covariance, numbers: Summary) -> Figure:
    figure = Figure((3.9, 3.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    values = lag_correlation(cov)
    axes.plot(values.numpy(), color=BLUE, marker="." if len(values) <= 40 else "")
    axes.axhline(math.exp(-1), color=ink(), linestyle="dashed", linewidth=0.8)
    axes.annotate("1/e", (1, math.exp(-1)), (-4, 3), ("axes fraction", "data"), "offset points", ha="right")
    if numbers.correlation_length is not None:
        axes.plot(numbers.correlation_length, math.exp(-1), "o", color=ink(), markersize=5)
    axes.set(xlabel="lag (pixels)", ylabel="correlation with the centre")
    axes.set_ylim(min(-0.05, values.min().item() - 0.05), 1.05)
    axes.grid()
    return figure


def _numbers(cov: Covariance, numbers: Summary) -> str:
    length, (low, high) = numbers.correlation_length, numbers.marginal_variance_range
    spread = "" if high - low < 1e-9 * high else f" (from {low:.3g} to {high:.3g})"
    rows = [
        ("Condition number", f"{numbers.condition_number:.4g}"),
        ("Effective rank", f"{numbers.effective_rank:.4g} of {cov.size}"),
        ("Marginal variance", f"{numbers.marginal_variance:.4g}{spread}"),
        ("Correlation length", "longer than the event" if length is None else f"{length:.3g} pixels"),
    ]
    return table((), rows)


def controls_of(field: Any, shape: Any) -> list[Any]:
    """The controls of a field: the shapes it can have, a boundary or none, and its sliders."""
    field = one_of("field", field, CHOICES)
    shapes = CHOICES[field].shapes
    if shape not in shapes:
        axes = len(SHAPES.get(str(shape), ()))
        shape = next((name for name in shapes if len(SHAPES[name]) == axes), shapes[0])
    return [
        gr.update(choices=list(shapes), value=shape),
        gr.update(visible=has_boundary(field)),
        *(gr.update(visible=name == field) for name, _ in KNOBS),
    ]


def noise_tab(page: Page) -> None:
    first = "gff"
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            fields = [(f"{choice.label} ({name})", name) for name, choice in CHOICES.items()]
            field = gr.Dropdown(fields, value=first, label="Field", elem_id="noise-field")
            sliders: list[Any] = [
                gr.Slider(
                    knob.low, knob.high, knob.usual, step=knob.step, label=knob.label, visible=name == first,
                    elem_id=f"noise-{name}-{knob.key}",
                )
                for name, knob in KNOBS
            ]  # fmt: skip
            shape = gr.Dropdown(list(SHAPES), value=USUAL, label="Shape", elem_id="noise-shape")
            boundary = gr.Radio(BOUNDARIES, value=BOUNDARIES[0], label="Boundary", elem_id="noise-boundary")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=LARGEST_SEED, elem_id="noise-seed")
            again = gr.Button("New draws", elem_id="noise-again")
        with gr.Column(scale=3, min_width=320):
            draws = gr.HTML(elem_id="noise-draws")
            with gr.Row():
                with gr.Column(min_width=300):
                    spectrum = gr.HTML(elem_id="noise-spectrum")
                with gr.Column(min_width=300):
                    correlation = gr.HTML(elem_id="noise-correlation")
            numbers = gr.HTML(elem_id="noise-numbers")
            python, command = code("Python", "noise-python", "python"), code("Command", "noise-command")
    event: dict[str, Any] = {
        "fn": with_user_errors(render),
        "inputs": [field, shape, boundary, seed, page.dark, *sliders],
        "outputs": [draws, spectrum, correlation, numbers, python, command],
        **HIDDEN_PROGRESS,
    }
    page.ready.then(**event)
    gr.on([control.change for control in (shape, boundary, seed, *sliders)], trigger_mode="always_last", **event)
    controls = field.change(
        with_user_errors(controls_of), [field, shape], [shape, boundary, *sliders], **HIDDEN_PROGRESS
    )
    controls.then(**event)
    again.click(with_user_errors(next_seed), seed, seed, **HIDDEN_PROGRESS)
