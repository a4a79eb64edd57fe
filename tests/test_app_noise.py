"""The tab *Noise* of nidiff explore: what it shows is the Σ that its lines make, and no request can break it."""

import json
import math
import shlex

import pytest
import torch

pytest.importorskip("gradio", reason='pip install -e ".[app]"')

import nidiff
from nidiff.app.noise import (
    BOUNDARIES,
    DRAWS,
    FIELDS,
    KNOBS,
    SHAPES,
    checked_call,
    controls_of,
    has_boundary,
    looked_at,
    next_seed,
)
from nidiff.cli import main
from nidiff.covariance.summary import lag_correlation, summary
from nidiff.errors import InputError

USUAL = [knob.usual for _, knob in KNOBS]
HIGH = [knob.high for _, knob in KNOBS]
LOW = [knob.low for _, knob in KNOBS]


def same(a, b):
    return torch.equal(a.eigenvalues, b.eigenvalues) and a.event_shape == b.event_shape


@pytest.mark.parametrize("field", FIELDS)
def test_the_python_line_and_the_text_make_the_same_covariance(field):
    shape = FIELDS[field].shapes[0]
    for boundary in BOUNDARIES if has_boundary(field) else BOUNDARIES[:1]:
        call = checked_call(field, shape, boundary, *LOW)
        made = eval(call.python, {"nidiff": nidiff})
        assert same(made, call.covariance())
        assert made.boundary == (boundary,) or not has_boundary(field)
        if FIELDS[field].knobs:
            assert not same(made, checked_call(field, shape, boundary, *HIGH).covariance())


def test_the_command_draws_that_covariance_with_these_seeds(tmp_path, capsys):
    *_, command = looked_at("matern", "32 × 32", "reflecting", 7, False, *USUAL)
    words = shlex.split(command)
    assert main([*words[1:], "--json", "--out", str(tmp_path / "noise.png")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["covariances"]
    expected = summary(nidiff.matern((32, 32), 4.0, 1.5, "reflecting"))
    assert found["effective_rank"] == pytest.approx(expected.effective_rank)
    assert words[-4:] == ["--num-images", str(DRAWS), "--seed", "7"]


@pytest.mark.parametrize("ends", [LOW, HIGH])
@pytest.mark.parametrize("field", [field for field in FIELDS if FIELDS[field].shapes == tuple(SHAPES)])
def test_every_end_of_every_slider_can_be_drawn(field, ends):
    for shape in SHAPES:
        covariance = checked_call(field, shape, "fixed", *ends).covariance()
        assert bool(torch.isfinite(covariance.sqrt(torch.ones(1, *SHAPES[shape]))).all())


def test_the_page_shows_the_numbers_of_white_noise_and_no_others():
    draws, spectrum, correlation, numbers, python, _ = looked_at("white", "256", "periodic", 0, False, *USUAL)
    assert "<td>1</td>" in numbers
    assert "256 of 256" in numbers
    assert f"{1 - math.exp(-1):.3g} pixels" in numbers
    assert python == "nidiff.Identity((256,))"
    assert all('alt="' in one and "data:image/png" in one for one in (draws, spectrum, correlation))
    assert "256 of 256" not in looked_at("gff", "256", "periodic", 0, False, *USUAL)[3]


def test_figures_follow_the_page_and_the_seed():
    light = looked_at("ou", "256", "periodic", 0, False, *USUAL)
    assert looked_at("ou", "256", "periodic", 0, True, *USUAL)[0] != light[0]
    assert looked_at("ou", "256", "periodic", next_seed(0), False, *USUAL)[0] != light[0]
    assert next_seed(2**31 - 1) < 2**31


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *(("field", 0, value) for value in (None, "<b>", "/etc/passwd", "from_data", [])),
        *(("shape", 1, value) for value in ("4096 × 4096", (64, 64), math.nan)),
        *(("boundary", 2, value) for value in (None, "open", ["periodic"])),
        *(("seed", 3, value) for value in (None, -1, 2**31, 0.5, "0", math.inf, True)),
        *(("gamma", 5, value) for value in (None, math.nan, math.inf, 1e300, -0.1, "1", True, 10**400)),
    ],
)
def test_what_no_control_can_send_is_refused(name, place, value):
    asked = ["gff", "256", "periodic", 0, False, *USUAL]
    asked[place] = value
    with pytest.raises(InputError, match=name):
        looked_at(*asked)


def test_a_field_that_is_a_matrix_has_small_shapes_alone():
    with pytest.raises(InputError, match="shape"):
        looked_at("pyramid", "64 × 64", "periodic", 0, False, *USUAL)
    shape, boundary, *sliders = controls_of("pyramid", "64 × 64")
    assert shape["value"] == "32 × 32"
    assert not boundary["visible"]
    assert [of for (of, _), one in zip(KNOBS, sliders, strict=True) if one["visible"]] == ["pyramid"]
    assert controls_of("ou", "64 × 64")[0]["value"] == "256"
    assert controls_of("matern", "128 × 128")[0]["value"] == "128 × 128"


def test_the_correlation_of_an_autoregression_is_a_power_of_the_lag():
    found = lag_correlation(nidiff.ar1(65, 0.8))
    torch.testing.assert_close(found, 0.8 ** torch.arange(33, dtype=torch.float64))
