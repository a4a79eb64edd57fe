"""The page of `nidiff explore` in a real browser and under raw requests: `space/app.py`, served as a user would."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import open_page
from visitor import Visitor

from nidiff.model.zoo import zoo_models

APP = Path(__file__).parents[1] / "space" / "app.py"
HTML = "<img src=x onerror=alert(1)>"
TABS = ("Noise", "Forward", "Sample", "Restore", "Runs")
PATIENCE = 30_000  # ms
pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two models of the digits, one with a name that is HTML."""
    folder = tmp_path_factory.mktemp("given") / "runs"
    for name in ("digits", HTML):
        run = Path(shutil.copytree(zoo_models()["digits"], folder / name))
        (run / "zoo.json").unlink()
        lines = [{"step": step, "loss": 1 / step, "images_per_s": 10.0} for step in range(1, 20)]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "samples").mkdir()
        for step, other in ((10, "digits-ddpm"), (20, "digits")):
            shutil.copy(zoo_models()[other] / "samples.png", run / "samples" / f"{step:06d}.png")
    return folder


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    """The process that serves the page, and its address."""
    place = tmp_path_factory.mktemp("place")
    settings = {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": "0", "TMPDIR": str(place)}
    with (
        (place / "log").open("w") as log,
        subprocess.Popen([sys.executable, APP, runs], stderr=subprocess.PIPE, stdout=log, text=True, cwd=place,
                         env=os.environ | settings) as process,
    ):  # fmt: skip
        assert process.stderr is not None
        found = re.match(r"http://127\.0\.0\.1:\d+", process.stderr.readline())
        assert found
        yield process, found[0]
        process.terminate()
        assert "Traceback" not in process.stderr.read()  # whatever visitors did


@pytest.fixture
def url(server):
    return server[1]


def tab(page, name):
    page.get_by_role("tab", name=name, exact=True).click(timeout=PATIENCE)
    return page.locator(f"[id^={name.lower()}-]:visible").first.wait_for(timeout=PATIENCE)


def source(page, place):
    """The pictures in an element, once there are any."""
    image = page.locator(f"#{place} img").first
    image.wait_for(timeout=PATIENCE)
    return page.locator(f"#{place}").inner_html()


def changes(page, place, before):
    """Wait until an element shows something else than before."""
    page.wait_for_function(
        "([id, before]) => document.getElementById(id).innerHTML !== before", arg=[place, before], timeout=PATIENCE
    )
    return source(page, place)


def slide(page, place, keys):
    """Move a slider by keys, as one can without a mouse."""
    page.locator(f"#{place} input[type=range]").focus()
    for key in keys:
        page.keyboard.press(key)


@pytest.mark.parametrize("width, dark", [(1280, False), (390, True)])
def test_every_tab_fits_the_screen_and_follows_light_and_dark(browser, url, width, dark):
    with open_page(browser, url, width, dark) as page:
        for name in TABS:
            tab(page, name)
            over = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert over == 0, f"{name} is wider than a screen of {width}"
        paper = page.evaluate("getComputedStyle(document.querySelector('.gradio-container')).backgroundColor")
        levels = [int(level) for level in re.findall(r"\d+", paper)[:3]]
        assert (max(levels) < 64) == dark
        assert (min(levels) > 192) == (not dark)


def test_a_slider_of_the_noise_changes_its_pictures_numbers_and_command(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Noise")
        before = {place: source(page, place) for place in ("noise-draws", "noise-spectrum", "noise-correlation")}
        slide(page, "noise-gff-gamma", ["ArrowRight"] * 4)
        for place, shown in before.items():
            changes(page, place, shown)
        assert "gamma=1.2" in page.locator("#noise-command").inner_text()


def test_the_level_changes_what_is_seen_of_the_item(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Forward")
        place = page.locator("[id^=forward-]:visible:has(img)").first.get_attribute("id", timeout=PATIENCE)
        before = source(page, place)
        slide(page, "forward-level", ["ArrowRight"] * 3)
        changes(page, place, before)


def test_samples_are_drawn_before_ones_eyes_and_can_be_downloaded(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Sample")
        noise = source(page, "sample-view")
        page.locator("#sample-draw").click()
        page.wait_for_function("document.getElementById('sample-status').innerText.includes('Done')", timeout=PATIENCE)
        changes(page, "sample-view", noise)
        files = page.locator("#sample-files a[download]")
        names = [files.nth(row).get_attribute("download") for row in range(files.count())]
        with page.expect_download() as found:
            files.nth(next(row for row, name in enumerate(names) if name.endswith(".npy"))).click()
        assert np.load(found.value.path()).shape == (9, 8, 8, 1)
        assert page.locator("img[src=x]").count() == 0  # the name of the second model stayed text


def test_the_runs_show_their_samples_over_training(browser, url):
    with open_page(browser, url) as page:
        tab(page, "Runs")
        last = source(page, "runs-samples")
        slide(page, "runs-progress", ["Home"])
        changes(page, "runs-samples", last)
        assert page.locator("img[src=x]").count() == 0


# Raw requests --------------------------------------------------------------------------------------------------------


def test_nothing_outside_is_sent(url, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    visitor = Visitor(url)
    for path in (secret, "/etc/passwd", Path(__file__), f"../../{secret}", "file:///etc/passwd"):
        for place in ("/gradio_api/file=", "/file=", "/gradio_api/file/"):
            answer = visitor.http.get(f"{place}{path}")
            assert answer.status_code in (403, 404), f"{place}{path}"
            assert "secret" not in answer.text
    assert visitor.http.get("/").status_code == 200  # which the same visitor may see


HOSTILE = [None, float("nan"), 1e308, -1, "x" * 10_000, HTML, [], {}, {"path": "/etc/passwd"}, [["a"]], True]


def test_whatever_a_browser_sends_gets_an_answer_or_a_sentence(url, server):
    visitor = Visitor(url)
    said = {}
    for event in visitor.events:
        usual = visitor.usual(event)
        for place in range(len(usual)):
            for value in HOSTILE:
                answer = visitor.ask(event, [*usual[:place], value, *usual[place + 1 :]])
                said[event["id"], place, str(value)[:20]] = answer
    for asked, answer in said.items():
        assert answer.done or answer.error, asked
        assert "went wrong" not in answer.error, asked  # that would be a bug of ours
        assert "<" not in answer.error, (asked, answer.error)
