"""The tab *Noise* of nidiff explore: what it shows is the Σ that its lines make, and no request can break it."""

import json
import math
import shlex

import pytest
import torch
from problems import refused

pytest.importorskip("gradio", reason='pip install -e ".[app]"')

import nidiff
from nidiff.app.noise import DRAWS, FIELDS, KNOBS, SHAPES, checked_call, controls_of, next_seed, render
from nidiff.cli import main
from nidiff.covariance.config import as_covariance
from nidiff.covariance.summary import lag_correlation, summary

USUAL = [knob.usual for _, knob in KNOBS]
HIGH = [knob.high for _, knob in KNOBS]
LOW = [knob.low for _, knob in KNOBS]


def same(a, b):
    return torch.equal(a.eigenvalues, b.eigenvalues) and a.basis == b.basis


@pytest.mark.parametrize("field", FIELDS)
def test_the_python_line_and_the_spec_make_the_same_covariance_at_every_end_of_every_slider(field):
    for shape, boundary in (("1024", "periodic"), ("64 × 128", "fixed"), ("16 × 16 × 16", "reflecting")):
        calls = [checked_call(field, shape, boundary, *ends) for ends in (LOW, HIGH)]
        for call in calls:
            made = eval(call.python, {"nidiff": nidiff})
            assert same(made, as_covariance(call.spec, call.shape))
            assert bool(torch.isfinite(made.sqrt(torch.ones(1, *SHAPES[shape]))).all())
        assert (calls[0].spec != calls[1].spec) == (field != "white")


def test_the_command_draws_that_covariance_with_these_seeds(tmp_path, capsys):
    *_, command = render("matern", "32 × 32", "reflecting", 7, False, *USUAL)
    words = shlex.split(command)
    assert main([*words[1:], "--json", "--out", str(tmp_path / "noise.png")]) == 0
    (drawn,) = json.loads(capsys.readouterr().out)["covariances"]
    expected = summary(nidiff.matern((32, 32), 4.0, 1.5, "reflecting"))
    assert drawn["effective_rank"] == pytest.approx(expected.effective_rank)
    assert words[-4:] == ["--num-images", str(DRAWS), "--seed", "7"]


def test_the_page_shows_the_numbers_of_white_noise_and_no_others():
    draws, correlation, numbers, python, _ = render("white", "256", "periodic", 0, False, *USUAL)
    assert "<td>1</td>" in numbers
    assert "256 of 256" in numbers
    assert f"{1 - math.exp(-1):.3g} pixels" in numbers
    assert python == "nidiff.Identity((256,))"
    assert all("data:image/png" in html for html in (draws, correlation))
    assert "256 of 256" not in render("gff", "256", "periodic", 0, False, *USUAL)[2]


def test_figures_follow_the_page_and_the_seed():
    light = render("offset", "256", "periodic", 0, False, *USUAL)
    assert render("offset", "256", "periodic", 0, True, *USUAL)[0] != light[0]
    assert render("offset", "256", "periodic", next_seed(0), False, *USUAL)[0] != light[0]
    assert next_seed(2**31 - 1) < 2**31


def test_what_no_control_can_send_is_refused():
    usual = ["gff", "256", "periodic", 0, False, *USUAL]
    hostile = {
        "field": (0, (None, "<b>", "/etc/passwd", "from_data", [])),
        "shape": (1, ("4096 × 4096", math.nan)),
        "boundary": (2, (None, "open", ["periodic"])),
        "seed": (3, (None, -1, 2**31, 0.5, "0")),
        "gamma": (5, (None, math.nan, 1e300, -0.1, "1")),
    }
    for name, (place, values) in hostile.items():
        for value in values:
            with refused(name):
                render(*usual[:place], value, *usual[place + 1 :])


def test_a_field_has_its_own_sliders_and_a_boundary_or_none():
    for field, has_boundary in (("matern", True), ("offset", False)):
        boundary, *sliders = controls_of(field)
        assert boundary["visible"] == has_boundary
        visible = {name for (name, _), slider in zip(KNOBS, sliders, strict=True) if slider["visible"]}
        assert visible == {field}


def test_the_correlation_of_an_autoregression_is_a_power_of_the_lag():
    correlation = lag_correlation(nidiff.ar1(65, 0.8))
    torch.testing.assert_close(correlation, 0.8 ** torch.arange(33, dtype=torch.float64))
