"""The tab *Noise* of nidiff explore: what it shows is the Σ that its lines make, and no request can break it."""

import json
import math
import shlex

import pytest
import torch
from problems import refused

pytest.importorskip("gradio", reason='pip install -e ".[app]"')

import nidiff
from nidiff.app.noise import (
    BOUNDARIES,
    CHOICES,
    DRAWS,
    KNOBS,
    SHAPES,
    checked_call,
    controls_of,
    has_boundary,
    next_seed,
    render,
)
from nidiff.cli import main
from nidiff.covariance.summary import lag_correlation, summary

USUAL = [knob.usual for _, knob in KNOBS]
HIGH = [knob.high for _, knob in KNOBS]
LOW = [knob.low for _, knob in KNOBS]


def same(a, b):
    return torch.equal(a.eigenvalues, b.eigenvalues) and a.event_shape == b.event_shape


@pytest.mark.parametrize("field", CHOICES)
def test_the_python_line_and_the_text_make_the_same_covariance(field):
    shape = CHOICES[field].shapes[0]
    for boundary in BOUNDARIES if has_boundary(field) else BOUNDARIES[:1]:
        call = checked_call(field, shape, boundary, *LOW)
        made = eval(call.python, {"nidiff": nidiff})
        assert same(made, call.covariance())
        assert made.boundary == (boundary,) or not has_boundary(field)
        if CHOICES[field].knobs:
            assert not same(made, checked_call(field, shape, boundary, *HIGH).covariance())


def test_the_command_draws_that_covariance_with_these_seeds(tmp_path, capsys):
    *_, command = render("matern", "32 × 32", "reflecting", 7, False, *USUAL)
    words = shlex.split(command)
    assert main([*words[1:], "--json", "--out", str(tmp_path / "noise.png")]) == 0
    (drawn,) = json.loads(capsys.readouterr().out)["covariances"]
    expected = summary(nidiff.matern((32, 32), 4.0, 1.5, "reflecting"))
    assert drawn["effective_rank"] == pytest.approx(expected.effective_rank)
    assert words[-4:] == ["--num-images", str(DRAWS), "--seed", "7"]


@pytest.mark.parametrize("ends", [LOW, HIGH])
@pytest.mark.parametrize("field", [field for field in CHOICES if CHOICES[field].shapes == tuple(SHAPES)])
def test_every_end_of_every_slider_can_be_drawn(field, ends):
    for shape in ("1024", "64 × 128", "16 × 16 × 16"):
        covariance = checked_call(field, shape, "fixed", *ends).covariance()
        assert bool(torch.isfinite(covariance.sqrt(torch.ones(1, *SHAPES[shape]))).all())


def test_the_page_shows_the_numbers_of_white_noise_and_no_others():
    draws, spectrum, correlation, numbers, python, _ = render("white", "256", "periodic", 0, False, *USUAL)
    assert "<td>1</td>" in numbers
    assert "256 of 256" in numbers
    assert f"{1 - math.exp(-1):.3g} pixels" in numbers
    assert python == "nidiff.Identity((256,))"
    assert all("data:image/png" in html for html in (draws, spectrum, correlation))
    assert "256 of 256" not in render("gff", "256", "periodic", 0, False, *USUAL)[3]


def test_figures_follow_the_page_and_the_seed():
    light = render("ou", "256", "periodic", 0, False, *USUAL)
    assert render("ou", "256", "periodic", 0, True, *USUAL)[0] != light[0]
    assert render("ou", "256", "periodic", next_seed(0), False, *USUAL)[0] != light[0]
    assert next_seed(2**31 - 1) < 2**31


@pytest.mark.parametrize(
    ("name", "place", "values"),
    [
        ("field", 0, (None, "<b>", "/etc/passwd", "from_data", [])),
        ("shape", 1, ("4096 × 4096", math.nan)),
        ("boundary", 2, (None, "open", ["periodic"])),
        ("seed", 3, (None, -1, 2**31, 0.5, "0")),
        ("gamma", 5, (None, math.nan, 1e300, -0.1, "1")),
    ],
)
def test_what_no_control_can_send_is_refused(name, place, values):
    usual = ["gff", "256", "periodic", 0, False, *USUAL]
    for value in values:
        with refused(name):
            render(*usual[:place], value, *usual[place + 1 :])


def test_a_field_that_is_a_matrix_has_small_shapes_alone():
    with refused("shape"):
        render("pyramid", "64 × 64", "periodic", 0, False, *USUAL)
    shape, boundary, *sliders = controls_of("pyramid", "64 × 64")
    assert shape["value"] == "32 × 32"
    assert not boundary["visible"]
    assert [name for (name, _), slider in zip(KNOBS, sliders, strict=True) if slider["visible"]] == ["pyramid"]
    assert controls_of("ou", "64 × 64")[0]["value"] == "256"
    assert controls_of("matern", "128 × 128")[0]["value"] == "128 × 128"


def test_the_correlation_of_an_autoregression_is_a_power_of_the_lag():
    correlation = lag_correlation(nidiff.ar1(65, 0.8))
    torch.testing.assert_close(correlation, 0.8 ** torch.arange(33, dtype=torch.float64))
