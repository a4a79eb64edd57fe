"""The tab *Forward* of nidiff explore: one eps for both noises, honest maps, and pictures that are read with care."""

import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused
from visitor import claimed_png

pytest.importorskip("gradio", reason='pip install -e ".[app]"')

import nidiff
from nidiff.app.forward import (
    DIGIT,
    NOISES,
    SCHEDULES,
    SIDE,
    UPLOAD,
    digit_subject,
    noisy,
    read_upload,
    render,
    scene,
    turbulence_subject,
)
from nidiff.app.uploads import WIDEST
from nidiff.design.candidates import band_logsnr
from nidiff.errors import InputError

ASKED = [DIGIT, 3, None, "gff:gamma=1", "ddpm_linear", 0.3, 0, False]


@pytest.fixture
def grey(tmp_path):
    pixels = np.tile(np.arange(256, dtype=np.uint8).reshape(4, 64), (16, 1))
    Image.fromarray(pixels).save(tmp_path / "grey.png")
    return read_upload(str(tmp_path / "grey.png"))


@pytest.mark.parametrize("schedule", SCHEDULES[-2:])
def test_both_noises_are_made_of_one_eps_at_one_level(schedule):
    prepared = scene(digit_subject(3), "matern:length_scale=2", schedule)
    level = prepared.schedule.level(700)
    for name, x in noisy(prepared, 700, seed=5).items():
        noise = (x * math.hypot(level.signal, level.sigma) - level.signal * prepared.subject.x0) / level.sigma
        eps = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(prepared.processes[name].covariance.inv_sqrt(noise), eps, rtol=1e-3, atol=1e-3)


def test_noise_with_the_spectrum_of_the_data_covers_all_scales_at_once():
    prepared = scene(digit_subject(0), "from_data:shrinkage=0", "ddpm_linear")
    spread = {
        name: band_logsnr(prepared.schedule, prepared.gaussian, process.covariance)[50].std().item()
        for name, process in prepared.processes.items()
    }
    assert spread["from_data:shrinkage=0"] < 0.3
    assert spread["white"] > 1.0


def test_the_spectrum_of_a_picture_is_its_own(grey):
    prepared = scene(grey, "gff:gamma=1", "flow")
    assert prepared.gaussian.covariance.eigenvalues.mean().item() == pytest.approx(
        prepared.subject.x0.double().square().mean().item(), rel=1e-6
    )
    assert (grey.x0.min(), grey.x0.max()) == (-1, 1)


def test_a_level_moves_the_line_in_the_maps_and_draws_nothing_else_anew():
    before = render(*ASKED)
    misses = scene.cache_info().misses
    after = render(*ASKED[:5], 0.8, *ASKED[6:])
    assert scene.cache_info().misses == misses
    assert after[0] != before[0]
    assert after[2] == before[2]
    places = [[float(place) for place in re.findall(r"left:([\d.]+)%", html)] for html in (before[1], after[1])]
    (first, second), (later, latest) = places
    assert latest - second == pytest.approx(later - first, abs=0.02)
    assert 0 < first < later < second < latest < 100


def test_turbulence_comes_from_the_shipped_model():
    item = turbulence_subject()
    assert item.x0.shape == (1, 64, 64)
    assert item.data.var().item() == pytest.approx(1.0, abs=0.1)
    smooth = nidiff.fit_gaussian(item.data, average="radial").covariance.eigenvalues.flatten()
    assert smooth.max() > 1e4 * smooth.min()  # a steep spectrum


def test_every_noise_and_every_source_is_drawn(grey, tmp_path):
    for noise in NOISES:
        assert [*noisy(scene(digit_subject(1), noise, "flow"), 500, 0)] == [*dict.fromkeys(("white", noise))]
    assert render(UPLOAD, None, tmp_path / "grey.png", "white", "flow", 0, 0, False)[0].count("<img") == 2
    assert "<img" not in render(UPLOAD, None, None, "white", "flow", 0, 0, False)[0]  # it asks for a picture


def test_the_middle_of_a_picture_is_read_in_its_colours(tmp_path):
    pixels = np.zeros((300, 100, 3), np.uint8)
    pixels[90:210] = (255, 0, 0)
    for suffix in ("png", "webp"):
        Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", lossless=True)
        x0 = read_upload(str(tmp_path / f"a.{suffix}")).x0
        assert torch.equal(x0, torch.tensor([1.0, -1, -1])[:, None, None].expand(3, SIDE, SIDE))
    for suffix, channels in (("gif", 3), ("jpg", 1)):  # a palette has colours
        Image.fromarray(pixels[..., 0]).save(tmp_path / f"grey.{suffix}")
        assert len(read_upload(str(tmp_path / f"grey.{suffix}")).x0) == channels


def test_a_picture_that_claims_too_many_pixels_is_not_decoded(tmp_path):
    file = tmp_path / "bomb.png"
    for size in ((WIDEST + 1, 16), (2**31 - 1, 16), (20_000, 20_000)):
        file.write_bytes(claimed_png(*size))
        with refused("picture"):
            read_upload(str(file))


def test_other_files_are_refused_in_a_sentence_without_their_names(tmp_path):
    cut, words, deep = (tmp_path / name for name in ("cut.png", "<b>.png", "deep.png"))
    Image.new("L", (800, 800)).save(cut)
    cut.write_bytes(cut.read_bytes()[:60])
    words.write_text("<script>")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(deep)
    for path in (cut, words, deep, tmp_path, tmp_path / "missing", 7, "\0"):
        with pytest.raises(InputError) as caught:
            read_upload(str(path))
        assert caught.value.argument == "picture"
        assert "<b>" not in str(caught.value)


def test_what_no_control_can_send_is_refused():
    hostile = {
        "source": (0, (None, "<b>", 3)),
        "digit": (1, (None, "3", 10, -1, math.nan)),
        "covariance": (3, (None, "", "<img src=x>", "./saved", "/etc", "gff:gamma=7", ["white"])),
        "schedule": (4, (None, "heat", "ddpm_linear:num_levels=9000000")),
        "level": (5, (None, math.nan, 1.01, -1e-9, "0.5")),
        "seed": (6, (None, -1, 2**63, 0.5)),
    }
    for name, (place, values) in hostile.items():
        for value in values:
            with refused(name):
                render(*ASKED[:place], value, *ASKED[place + 1 :])
