"""The tab *Noise*: choose a field, see what N(0, Σ) looks like, and copy the call that makes it."""

import math
from inspect import signature
from typing import Any, NamedTuple

import gradio as gr
from matplotlib.figure import Figure

from nidiff.app.layout import LARGEST_SEED, Tab, code
from nidiff.covariance.config import as_covariance
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.covariance.fields import ALIASES, COVARIANCES
from nidiff.covariance.summary import Summary, lag_correlation, summary
from nidiff.covariance.waves import BOUNDARIES
from nidiff.errors import one_of
from nidiff.recipe import check_number, check_whole
from nidiff.report.noise import noise_figure, summary_rows
from nidiff.report.page import plot, table
from nidiff.style import BLUE, dark_page, drawn, ink

DRAWS = 5
DIGITS = 4  # after the point, of a slider's number
SIZES = ((256,), (1024,), (32, 32), (64, 64), (128, 128), (64, 128), (16, 16, 16), (32, 32, 32))
SHAPES = {" × ".join(map(str, shape)): shape for shape in SIZES}


class Knob(NamedTuple):
    """A number of a field, and its slider."""

    key: str
    label: str
    low: float
    high: float
    step: float
    usual: float


FIELDS = {
    "white": ("White noise", ()),
    "gff": ("Gaussian free field", (Knob("gamma", "γ", 0, 2, 0.05, 1),)),
    "power_law": ("Power law", (Knob("exponent", "Exponent", -2, 4, 0.1, 2),)),
    "matern": (
        "Matérn field",
        (
            Knob("length_scale", "Length scale ℓ (pixels)", 0.5, 16, 0.5, 4),
            Knob("smoothness", "Smoothness ν", 0.25, 2.5, 0.25, 1.5),
        ),
    ),
    "offset": ("Offset noise", (Knob("strength", "Strength", 0, 1, 0.01, 0.1),)),
}
KNOBS = [(name, knob) for name, (_, knobs) in FIELDS.items() for knob in knobs]


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
        words = ", ".join([repr(self.shape), *(f"{key}={value!r}" for key, value in self.arguments.items())])
        return f"nidiff.{ALIASES.get(self.field, self.field)}({words})"

    def command(self, seed: int) -> str:
        return f"nidiff noise {self.spec} --shape {' '.join(map(str, self.shape))} --num-images {DRAWS} --seed {seed}"


def has_boundary(field: str) -> bool:
    return "boundary" in signature(COVARIANCES[ALIASES.get(field, field)]).parameters


def checked_call(field: Any, shape: Any, boundary: Any, *numbers: Any) -> Call:
    """What a browser asks for; ``numbers`` are those of all `KNOBS`, and only those of the field count."""
    field, shape = one_of("field", field, FIELDS), one_of("shape", shape, SHAPES)
    arguments: dict[str, float | str] = {
        knob.key: round(check_number(knob.key, value, knob.low, knob.high), DIGITS)
        for (name, knob), value in zip(KNOBS, numbers, strict=True)
        if name == field
    }
    if has_boundary(field) and one_of("boundary", boundary, BOUNDARIES) != BOUNDARIES[0]:
        arguments["boundary"] = boundary
    return Call(field, SHAPES[shape], arguments)


def next_seed(seed: Any) -> int:
    """The first seed that is not drawn yet."""
    return (check_whole("seed", seed, 0, LARGEST_SEED) + DRAWS) % (LARGEST_SEED + 1)


def render(field: Any, shape: Any, boundary: Any, seed: Any, is_dark: Any, *numbers: Any) -> tuple[str, ...]:
    """Draws, correlation and numbers of Σ as HTML, its Python line, and its command."""
    call, seed = checked_call(field, shape, boundary, *numbers), check_whole("seed", seed, 0, LARGEST_SEED)
    cov = as_covariance(call.spec, call.shape)
    about, both = summary(cov), {"white": Identity(call.shape), call.spec: cov}
    with dark_page(is_dark is True):
        draws = noise_figure(both, num_images=DRAWS, seed=seed)
        return (
            plot(draws, f"Draws and spectra of N(0, I) and N(0, Σ), {call.spec}, from the same eps"),
            plot(_correlation_figure(cov, about), "The correlation of Σ against the lag", "", "drawn"),
            table((), summary_rows(about, cov.size).items()),
            call.python,
            call.command(seed),
        )


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


def controls_of(field: Any) -> list[Any]:
    """The controls of a field: a boundary or none, and its sliders."""
    field = one_of("field", field, FIELDS)
    return [gr.update(visible=has_boundary(field)), *(gr.update(visible=name == field) for name, _ in KNOBS)]


def noise_tab(tab: Tab) -> None:
    first = "gff"
    with gr.Row():
        with gr.Column(scale=1, min_width=260):
            fields = [(f"{label} ({name})", name) for name, (label, _) in FIELDS.items()]
            field = gr.Dropdown(fields, value=first, label="Field", elem_id="noise-field")
            sliders: list[Any] = [
                gr.Slider(
                    knob.low, knob.high, knob.usual, step=knob.step, label=knob.label, visible=name == first,
                    elem_id=f"noise-{name}-{knob.key}",
                )
                for name, knob in KNOBS
            ]  # fmt: skip
            shape = gr.Dropdown(list(SHAPES), value="64 × 64", label="Shape", elem_id="noise-shape")
            boundary = gr.Radio(BOUNDARIES, value=BOUNDARIES[0], label="Boundary", elem_id="noise-boundary")
            seed = tab.seed()
            again = gr.Button("New draws", elem_id="noise-again")
        with gr.Column(scale=3, min_width=320):
            tab.status.render()
            draws = gr.HTML(elem_id="noise-draws")
            with gr.Row():
                with gr.Column(min_width=300):
                    correlation = gr.HTML(elem_id="noise-correlation")
                with gr.Column(min_width=300):
                    numbers = gr.HTML(elem_id="noise-numbers")
            python, command = code("Python", "noise-python", "python"), code("Command", "noise-command")
    controls = tab.on(field.change, controls_of, [field], [boundary, *sliders])
    changes = [control.change for control in (shape, boundary, seed, *sliders)]
    inputs, outputs = [field, shape, boundary, seed, tab.dark, *sliders], [draws, correlation, numbers, python, command]
    tab.first(render, inputs, outputs)
    for event in (controls.then, changes):
        tab.on(event, render, inputs, outputs)
    tab.on(again.click, next_seed, [seed], [seed])
