"""The documentation says what the code does: generated pages are current, public names are there, the site builds."""

import ast
import importlib
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nidiff.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def public_names() -> dict[str, str]:
    """Each public name and the module it comes from, as the stub of the package lists them."""
    stub = ast.parse((ROOT / "src/nidiff/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: f"nidiff.{node.module}" for node in imports for alias in node.names}


def documented_names() -> dict[str, str]:
    """Each name in the ``members`` of an API page, and the module it is shown under."""
    found = {}
    for page in (DOCS / "api").glob("*.md"):
        for module, members in re.findall(r"^::: (\S+)\n(?:    .*\n)*?      members: \[(.*)\]", page.read_text(), re.M):
            found |= {name.strip(): module for name in members.split(",")}
    return found


def test_the_command_line_page_is_what_the_code_gives():
    script = runpy.run_path(str(ROOT / "scripts/cli_reference.py"))
    assert (DOCS / "cli.md").read_text() == script["page"](), "run: python scripts/cli_reference.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_page_has_every_flag_that_help_shows(command, capsys):
    from nidiff.cli import main

    main([command, "--help"])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    shown = set(re.findall(r"^[│| ] (--[a-z][a-z-]*)", plain, re.M))
    section = (DOCS / "cli.md").read_text().partition(f"\n## nidiff {command}\n")[2].partition("\n## ")[0]
    assert section
    assert shown == set(re.findall(r"^\| `(--[a-z][a-z-]*)", section, re.M))


def test_every_public_name_has_its_place_in_the_api_pages():
    shown = documented_names()
    assert {name: shown.get(name) for name in public_names()} == public_names()
    for name, module in shown.items():
        assert hasattr(importlib.import_module(module), name)


def test_nidiff_testing_needs_no_import_of_its_own_and_is_documented():
    """In a new process, since another test may have imported it; ``import nidiff`` alone stays quick."""
    command = "import sys, nidiff; assert 'torch' not in sys.modules; print(*nidiff.testing.__all__)"
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert run.stdout.split(), run.stderr
    assert set(run.stdout.split()) <= documented_names().keys()


def test_every_page_is_in_the_navigation():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))


class Fetched(HTMLParser):
    """What a browser gets from elsewhere when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.formulas = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.formulas += tag == "math"
        address = given.get("src") or (given.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", address):
            self.addresses.append(address)


def test_the_site_builds_without_warnings_and_fetches_nothing(tmp_path):
    for module in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(module, reason='pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert build.returncode == 0, build.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = Fetched()
        fetched.feed(page.read_text())
        assert fetched.addresses == [], page
        assert page.name != "maths.html" or fetched.formulas > 100
        assert "arithmatex" not in page.read_text(), page
