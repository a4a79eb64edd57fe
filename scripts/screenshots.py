"""Take the screenshots of the documentation again, with Chromium: python scripts/screenshots.py

docs/images/explore_*.png: the page of `nidiff explore`, with the models that ship. docs/images/field_explorer.png: the
page docs/explorer/fields.html. Without a browser they stay as they are, which is said.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import smaller
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests"))
FIELD = "field=matern&length_scale=5&smoothness=1.5&boundary=periodic&size=128"
PATIENCE = 120_000  # ms
MARGIN = 24  # pixels


class Shot(NamedTuple):
    """A tab of the page, what to do there, and how the browser is."""

    tab: str
    act: Callable[[Any], None]
    width: int = 1280
    dark: bool = False


def look(page: Any, *places: str) -> None:
    """Wait until each of the elements shows a picture."""
    there = "ids => ids.every(id => document.querySelector(`#${id} img`))"
    page.wait_for_function(there, arg=list(places), timeout=PATIENCE)


def noise(page: Any) -> None:
    look(page, "noise-draws", "noise-correlation")


def forward(page: Any) -> None:
    look(page, "forward-pictures", "forward-maps", "forward-spectra")


def pressed(button: str) -> Callable[[Any], None]:
    """Press a button that begins work, and wait until it is done."""

    def act(page: Any) -> None:
        tab = button.partition("-")[0]
        look(page, f"{tab}-view")
        page.locator(f"#{button}").click()
        says(page, f"{tab}-status", "Done")

    return act


def says(page: Any, place: str, word: str) -> None:
    """Wait until an element has a word."""
    said = "([id, word]) => document.getElementById(id).innerText.includes(word)"
    page.wait_for_function(said, arg=[place, word], timeout=PATIENCE)


SHOTS = {
    "explore_forward.png": Shot("Forward", forward),
    "explore_noise.png": Shot("Noise", noise),
    "explore_sample.png": Shot("Sample", pressed("sample-draw")),
    "explore_compare.png": Shot("Compare", pressed("compare-compare")),
    "explore_restore.png": Shot("Restore", pressed("restore-restore")),
    "explore_dark.png": Shot("Noise", noise, dark=True),
    "explore_phone.png": Shot("Forward", forward, width=390),
}
NAMES = (*SHOTS, "field_explorer.png")


@contextmanager
def explore() -> Iterator[str]:
    """The address of the page, served by `nidiff explore` from an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "nidiff", "explore", "--port", "0"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                yield next((line.split()[0] for line in server.stderr if line.startswith("http")), "")
            finally:
                server.terminate()


def explorer(browser: Any, file: Path) -> None:
    page = browser.new_page(viewport={"width": 1240, "height": 870})
    page.goto(f"{(ROOT / 'docs/explorer/fields.html').as_uri()}#{FIELD}")
    page.evaluate("for (let i = 1; i < 20; i++) next()")
    page.screenshot(path=file)
    page.close()


def cropped(file: Path) -> None:
    """Without the empty rows at its end."""
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    pixels = np.asarray(picture)
    filled = np.flatnonzero((pixels != pixels[-1, 0]).any((1, 2)))
    picture.crop((0, 0, picture.width, min(picture.height, int(filled[-1]) + MARGIN))).save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them; all if none is given")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    names = [name if name.endswith(".png") else f"{name}.png" for name in options.names] or [*NAMES]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no screenshot {unknown[0]!r}: use {', '.join(NAMES)}.")
    try:
        import gradio  # noqa: F401
        from browser import ARGUMENTS, open_page
        from browser import NAMES as PROGRAMS
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        print(f'the screenshots stay as they are: {error}; pip install -e ".[dev]" has it.')
        return
    program = os.environ.get("NIDIFF_BROWSER") or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print("the screenshots stay as they are: there is no browser; install chromium.")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as driver, explore() as url:
        browser = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        for name in names:
            begin, file = time.perf_counter(), options.out / name
            if name not in SHOTS:
                explorer(browser, file)
            else:
                shot = SHOTS[name]
                with open_page(browser, url, shot.width, shot.dark) as page:
                    page.get_by_role("tab", name=shot.tab, exact=True).click(timeout=PATIENCE)
                    shot.act(page)
                    page.screenshot(path=file, full_page=True)
            cropped(file)
            smaller(file)
            print(f"{name:25} {time.perf_counter() - begin:.0f} s", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
