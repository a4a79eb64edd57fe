"""A real browser: Chromium without a window, in which a page fetches nothing from elsewhere and logs no error."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

PATIENCE = 60_000  # ms
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",  # root in a container has none
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
)


@pytest.fixture(scope="module")  # playwright holds an event loop: other modules may want their own
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    program = os.environ.get("NIDIFF_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no browser: install chromium, or say by NIDIFF_BROWSER=/path/to/chromium where it is")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield chromium
        chromium.close()


@contextmanager
def open_page(browser: Any, url: str, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A visitor of their own at ``url``. In the end nothing was fetched from elsewhere, and the console has no errors.

    Elsewhere is another origin; for a page from a disk, another file.
    """
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", reduced_motion="reduce"
    )
    page, fetched, errors = context.new_page(), [], []
    page.set_default_timeout(PATIENCE)
    page.on("request", lambda request: fetched.append(request.url))
    page.on("websocket", lambda socket: fetched.append(socket.url.replace("ws", "http", 1)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(url)
        yield page
        if not page.is_closed():
            page.evaluate("0")  # whatever happened before has been reported when this returns
        elsewhere = [address for address in fetched if _place(address) not in (_place(url), None)]
        assert elsewhere == [], f"fetched from elsewhere: {elsewhere}"
        assert errors == [], f"errors in the console: {errors}"
    finally:
        context.close()


def _place(url: str) -> tuple[str, str] | None:
    """Where an address is; None if it is in the page itself."""
    parts = urlsplit(url)
    if parts.scheme in ("about", "blob", "data"):
        return None
    return parts.scheme, parts.path if parts.scheme == "file" else parts.netloc
