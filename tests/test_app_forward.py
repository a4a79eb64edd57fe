"""The tab *Forward* of nidiff explore: one eps for both noises, honest maps, and pictures that are read with care."""

import math
import re
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("gradio", reason='pip install -e ".[app]"')

import nidiff
from nidiff.app.forward import (
    DIGIT,
    LONGEST,
    NOISES,
    OWN,
    SCHEDULES,
    SIDE,
    TURBULENCE,
    WIDEST,
    Upload,
    build_noise,
    looked_at,
    noisy,
    read_upload,
    scene,
    subject,
)
from nidiff.calibration.design import band_logsnr
from nidiff.errors import InputError

ASKED = [DIGIT, 3, None, "gff:gamma=1", "ddpm_linear", 0.3, 0, False]
DATA = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def grey():
    return Upload(1, bytes(range(256)) * (SIDE * SIDE // 256))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_noises_are_made_of_one_eps_at_one_level(schedule):
    found = scene(DIGIT, 3, None, "matern:length_scale=2", schedule)
    level = found.schedule.level(700)
    for name, x in noisy(found, 700, seed=5).items():
        noise = (x * math.hypot(level.signal, level.sigma) - level.signal * found.subject.x0) / level.sigma
        eps = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(found.processes[name].covariance.inv_sqrt(noise), eps, rtol=1e-3, atol=1e-3)


def test_noise_with_the_spectrum_of_the_data_covers_all_scales_at_once():
    found = scene(DIGIT, 0, None, "from_data:shrinkage=0", "ddpm_linear")
    spread = {
        name: band_logsnr(found.schedule, found.gaussian, process.covariance)[50].std().item()
        for name, process in found.processes.items()
    }
    assert spread["from_data:shrinkage=0"] < 0.3
    assert spread["white"] > 1.0


def test_the_spectrum_of_a_picture_is_its_own(grey):
    found = scene(OWN, 0, grey, "gff:gamma=1", "flow")
    assert found.gaussian.covariance.eigenvalues.mean().item() == pytest.approx(
        found.subject.x0.double().square().mean().item(), rel=1e-6
    )
    assert subject(OWN, 0, grey).x0.min() == -1
    assert subject(OWN, 0, grey).x0.max() == 1


def test_a_level_moves_the_line_in_the_maps_and_draws_nothing_else_anew():
    before = looked_at(*ASKED)
    misses = scene.cache_info().misses
    after = looked_at(*ASKED[:5], 0.8, *ASKED[6:])
    assert scene.cache_info().misses == misses
    assert after[0] != before[0]
    assert after[2] == before[2]
    places = [[float(one) for one in re.findall(r"left:([\d.]+)%", html)] for html in (before[1], after[1])]
    (first, second), (later, latest) = places
    assert latest - second == pytest.approx(later - first, abs=0.02)
    assert 0 < first < later < second < latest < 100


def test_turbulence_comes_from_the_shipped_model():
    found = subject(TURBULENCE, 0, None)
    assert found.x0.shape == (1, 64, 64)
    assert found.data.var().item() == pytest.approx(1.0, abs=0.1)
    smooth = nidiff.fit_gaussian(found.data, average="radial").covariance.eigenvalues.flatten()
    assert smooth.max() > 1e4 * smooth.min()  # a steep spectrum


def test_every_noise_and_every_source_is_drawn(grey):
    for noise in NOISES:
        assert [*noisy(scene(DIGIT, 1, None, noise, "flow"), 500, 0)] == ["white", noise]
    assert looked_at(OWN, None, grey, "white", "flow", 0, 0, False)[0].count("<img") == 2
    assert "<img" not in looked_at(OWN, None, None, "white", "flow", 0, 0, False)[0]  # it asks for a picture


def test_the_middle_of_a_picture_is_read_in_its_colours(tmp_path):
    pixels = np.zeros((300, 100, 3), np.uint8)
    pixels[90:210] = (255, 0, 0)
    for suffix in ("png", "webp"):
        Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", lossless=True)
        found = read_upload(str(tmp_path / f"a.{suffix}"))
        assert found == Upload(3, bytes([255] * SIDE**2 + [0] * 2 * SIDE**2))
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.gif")
    assert len(read_upload(tmp_path / "grey.gif").pixels) == 3 * SIDE**2  # a palette has colours
    Image.fromarray(pixels[..., 0]).save(tmp_path / "grey.jpg")
    assert read_upload(tmp_path / "grey.jpg").channels == 1
    assert read_upload(None) is None


def claimed(width, height):
    """The head of a PNG that claims a size, and nothing after it."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))


@pytest.mark.parametrize("side", [WIDEST + 1, 20_000, 2**31 - 1])
def test_a_picture_that_claims_too_many_pixels_is_not_decoded(tmp_path, side):
    file = tmp_path / "bomb.png"
    file.write_bytes(claimed(side, 16) + b"\0" * 64)
    with pytest.raises(InputError, match="pixels"):
        read_upload(file)
    file.write_bytes(claimed(side, side) + b"\0" * 64)
    with pytest.raises(InputError, match="picture"):
        read_upload(file)


def test_other_files_are_refused_in_a_sentence_without_their_names(tmp_path):
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(17 * 2**20)
    bitmap, cut, words, deep = (tmp_path / name for name in ("a.bmp", "cut.png", "<b>.png", "deep.png"))
    Image.new("L", (8, 8)).save(bitmap)
    Image.new("L", (800, 800)).save(cut)
    cut.write_bytes(cut.read_bytes()[:60])
    words.write_text("<script>")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(deep)
    for path in (large, bitmap, cut, words, deep, tmp_path, tmp_path / "missing", 7, math.nan, "\0"):
        with pytest.raises(InputError, match="the (picture|file)") as caught:
            read_upload(path)
        assert "<b>" not in str(caught.value)


def test_a_text_for_the_noise_opens_no_folder(tmp_path, monkeypatch):
    nidiff.gaussian_free_field((8, 8)).save(tmp_path / "saved")
    monkeypatch.chdir(tmp_path)
    for text in (str(tmp_path / "saved"), "./saved", "saved", "gff x ./saved", "./saved x gff"):
        with pytest.raises(InputError, match="covariance.*unknown"):
            build_noise(text, DATA)
    assert build_noise("gff", DATA).event_shape == (8, 8)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        *(("source", 0, value) for value in (None, "<b>", 3)),
        *(("digit", 1, value) for value in (None, "3", 10, -1, math.nan, True)),
        *(
            ("covariance", 3, value)
            for value in (None, 5, "", "<img src=x>", "g" * (LONGEST + 1), "gff x gff x ", "ou:scale=1")
        ),
        *(("gamma", 3, value) for value in ("gff:gamma=nan", "gff:gamma=1e308", "gff:gamma=<b>")),
        ("singular", 3, "gff:zero_mode=zero"),
        *(("schedule", 4, value) for value in (None, "heat", "ddpm_linear:num_levels=9000000")),
        *(("level", 5, value) for value in (None, math.nan, 1.01, -1e-9, "0.5", True)),
        *(("seed", 6, value) for value in (None, -1, 2**63, 0.5)),
    ],
)
def test_what_no_control_can_send_is_refused(name, place, value):
    asked = list(ASKED)
    asked[place] = value
    with pytest.raises(InputError, match=name):
        looked_at(*asked)


def test_a_picture_comes_from_the_reader_alone():
    assert "<img" not in looked_at(OWN, 3, {"path": "/etc/passwd"}, *ASKED[3:])[0]
