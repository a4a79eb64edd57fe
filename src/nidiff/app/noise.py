"""The tab *Noise*: choose a field, see what N(0, Σ) looks like, and copy the call that makes it."""

import math
from inspect import signature
from typing import Any, NamedTuple

import gradio as gr
from matplotlib.figure import Figure
from torch import Tensor

from nidiff.app.look import Page
from nidiff.app.work import QUICK, spoken
from nidiff.covariance.config import as_covariance
from nidiff.covariance.fields import ALIASES, COVARIANCES
from nidiff.covariance.operator import Covariance
from nidiff.covariance.summary import Summary, lag_correlation, summary
from nidiff.errors import InputError, one_of
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.report.noise import draw_grid, draw_spectra, planes
from nidiff.report.page import plot, table
from nidiff.style import BLUE, dark_page, drawn, ink

DRAWS = 5
LARGEST_SEED = 2**31 - 1
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
BOUNDARIES = ("periodic", "reflecting", "fixed")


class Knob(NamedTuple):
    """A number of a field, and its slider."""

    key: str
    label: str
    low: float
    high: float
    step: float
    usual: float

    def checked(self, value: Any) -> float:
        number = check_number(self.key, value)
        if not self.low <= number <= self.high:
            raise InputError(f"{self.key}={number:g} must be from {self.low:g} to {self.high:g}.")
        return round(number, DIGITS)


class Field(NamedTuple):
    """What can be chosen, under the name that a text has for it."""

    label: str
    knobs: tuple[Knob, ...] = ()
    shapes: tuple[str, ...] = tuple(SHAPES)


FIELDS = {
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
KNOBS = [(name, knob) for name, field in FIELDS.items() for knob in field.knobs]


class Call(NamedTuple):
    """The call that makes a Σ, in each of the languages in which it can be written."""

    field: str
    shape: tuple[int, ...]
    arguments: dict[str, float | str]

    @property
    def text(self) -> str:
        words = ",".join(
            f"{key}={value if isinstance(value, str) else f'{value:g}'}" for key, value in self.arguments.items()
        )
        return f"{self.field}:{words}" if words else self.field

    @property
    def python(self) -> str:
        first = f"range({self.shape[0]})" if "times" in _parameters(self.field) else repr(self.shape)
        words = ", ".join([first, *(f"{key}={value!r}" for key, value in self.arguments.items())])
        return f"nidiff.{ALIASES.get(self.field, self.field)}({words})"

    def command(self, seed: int) -> str:
        return f"nidiff noise {self.text} --shape {' '.join(map(str, self.shape))} --num-images {DRAWS} --seed {seed}"

    def covariance(self) -> Covariance:
        return as_covariance(self.text, self.shape)


def _parameters(field: str) -> Any:
    return signature(COVARIANCES[ALIASES.get(field, field)]).parameters


def has_boundary(field: str) -> bool:
    return "boundary" in _parameters(field)


def checked_call(field: Any, shape: Any, boundary: Any, *numbers: Any) -> Call:
    """What a browser asks for; ``numbers`` are those of all `KNOBS`, of which the field's own count."""
    name = one_of("field", field, FIELDS)
    size = one_of("shape", shape, SHAPES)
    if size not in FIELDS[name].shapes:
        raise InputError(f"shape={size!r} is not for {name}: choose one of {', '.join(FIELDS[name].shapes)}.")
    own = zip(KNOBS, numbers, strict=True)
    arguments: dict[str, float | str] = {knob.key: knob.checked(value) for (of, knob), value in own if of == name}
    if has_boundary(name) and one_of("boundary", boundary, BOUNDARIES) != BOUNDARIES[0]:
        arguments["boundary"] = boundary
    return Call(name, SHAPES[size], arguments)


def looked_at(
    field: Any, shape: Any, boundary: Any, seed: Any, is_dark: Any, *numbers: Any
) -> tuple[str, str, str, str, str, str]:
    """Draws, spectrum, correlation and numbers of Σ as HTML, its Python line, and its command."""
    call, seed = checked_call(field, shape, boundary, *numbers), check_whole("seed", seed, 0, LARGEST_SEED)
    covariance = call.covariance()
    eps = white_noise((DRAWS, *call.shape), generators_from_seeds(range(seed, seed + DRAWS)))
    draws = {"white": eps, call.field: covariance.sqrt(eps)}  # one row if Σ is white
    numbers_of = summary(covariance)
    with dark_page(is_dark is True):
        shown = (
            plot(_draws_figure(draws), f"Draws of N(0, Σ), {call.text}", _caption(call, seed), ""),
            plot(
                _spectrum_figure(covariance, draws[call.field]), "The power spectrum of Σ and of the draws", "", "drawn"
            ),
            plot(_correlation_figure(covariance, numbers_of), "The correlation of Σ against the lag", "", "drawn"),
        )
    return *shown, _numbers(covariance, numbers_of), call.python, call.command(seed)


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
def _spectrum_figure(covariance: Covariance, draws: Tensor) -> Figure:
    figure = Figure((3.9, 3.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    draw_spectra(axes, [covariance], {"Σ": draws})
    axes.set_title("")
    axes.minorticks_off()  # they take as long to draw as all the rest
    for line in axes.lines:
        line.set_color(BLUE)
    axes.legend([*axes.lines], ["Σ", "these draws"], frameon=False)
    return figure


@drawn
def _correlation_figure(covariance: Covariance, numbers: Summary) -> Figure:
    figure = Figure((3.9, 3.0), dpi=120, layout="constrained")
    axes = figure.subplots()
    values = lag_correlation(covariance)
    axes.plot(values.numpy(), color=BLUE, marker="." if len(values) <= 40 else "")
    axes.axhline(math.exp(-1), color=ink(), linestyle="dashed", linewidth=0.8)
    axes.annotate("1/e", (1, math.exp(-1)), (-4, 3), ("axes fraction", "data"), "offset points", ha="right")
    if numbers.correlation_length is not None:
        axes.plot(numbers.correlation_length, math.exp(-1), "o", color=ink(), markersize=5)
    axes.set(xlabel="lag (pixels)", ylabel="correlation with the centre")
    axes.set_ylim(min(-0.05, values.min().item() - 0.05), 1.05)
    axes.grid()
    return figure


def _numbers(covariance: Covariance, numbers: Summary) -> str:
    length, (low, high) = numbers.correlation_length, numbers.marginal_variance_range
    spread = "" if high - low < 1e-9 * high else f" (from {low:.3g} to {high:.3g})"
    return table(
        (),
        [
            ("Condition number", f"{numbers.condition_number:.4g}"),
            ("Effective rank", f"{numbers.effective_rank:.4g} of {covariance.size}"),
            ("Marginal variance", f"{numbers.marginal_variance:.4g}{spread}"),
            ("Correlation length", "longer than the event" if length is None else f"{length:.3g} pixels"),
        ],
    )


def controls_of(field: Any, shape: Any) -> list[Any]:
    """What a field needs: its sliders, a boundary or none, and the shapes it can have."""
    name = one_of("field", field, FIELDS)
    shapes = FIELDS[name].shapes
    alike = [each for each in shapes if shape in SHAPES and len(SHAPES[each]) == len(SHAPES[shape])]
    kept = shape if shape in shapes else [*alike, *shapes][0]
    return [
        gr.update(choices=list(shapes), value=kept),
        gr.update(visible=has_boundary(name)),
        *(gr.update(visible=of == name) for of, _ in KNOBS),
    ]


def noise_tab(page: Page) -> None:
    first = "gff"
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            field = gr.Dropdown(
                [(f"{one.label} ({name})" if name != "white" else one.label, name) for name, one in FIELDS.items()],
                value=first, label="Field", elem_id="noise-field",
            )  # fmt: skip
            sliders: list[Any] = [
                gr.Slider(
                    knob.low, knob.high, knob.usual, step=knob.step, label=knob.label, visible=of == first,
                    elem_id=f"noise-{of}-{knob.key}",
                )
                for of, knob in KNOBS
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
            python = gr.Code(
                language="python", label="Python", interactive=False, wrap_lines=True, elem_id="noise-python"
            )
            command = gr.Code(
                language="shell", label="Command", interactive=False, wrap_lines=True, elem_id="noise-command"
            )
    event: dict[str, Any] = {
        "fn": spoken(looked_at),
        "inputs": [field, shape, boundary, seed, page.dark, *sliders],
        "outputs": [draws, spectrum, correlation, numbers, python, command],
        "show_progress": "hidden",
        **QUICK,
    }
    page.ready.then(**event)
    gr.on([each.change for each in (shape, boundary, seed, *sliders)], trigger_mode="always_last", **event)
    field.change(
        spoken(controls_of), [field, shape], [shape, boundary, *sliders], show_progress="hidden", **QUICK
    ).then(**event)
    again.click(spoken(next_seed), seed, seed, show_progress="hidden", **QUICK)


def next_seed(seed: Any) -> int:
    """The first seed that is not drawn yet."""
    return (check_whole("seed", seed, 0, LARGEST_SEED) + DRAWS) % (LARGEST_SEED + 1)
