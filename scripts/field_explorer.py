"""Take docs/images/field_explorer.png again, with Chromium: python scripts/field_explorer.py"""

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = "field=matern&length_scale=5&smoothness=1.5&boundary=periodic&size=128"


def main() -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1240, "height": 870}, device_scale_factor=1.5)
        page.goto(f"{(DOCS / 'explorer/fields.html').as_uri()}#{SETTINGS}")
        page.evaluate("for (let i = 1; i < 20; i++) next()")
        page.screenshot(path=DOCS / "images/field_explorer.png")
        browser.close()


if __name__ == "__main__":
    main()
