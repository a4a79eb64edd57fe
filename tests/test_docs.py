"""The documentation does what it says: pages run from top to bottom, generated pages are current, the site builds."""

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAMESPACES = (
    *("covariance", "schedules", "design", "inverse", "sampling", "metrics", "interop"),
    *("data", "generation", "testing"),
)


def public_names() -> set[str]:
    """The names at the top, and those of the public namespaces, without modules and registries."""
    spaces = [nidiff, *(importlib.import_module(f"nidiff.{name}") for name in NAMESPACES)]
    public = {name: getattr(space, name) for space in spaces for name in getattr(space, "__all__", dir(space))}
    ours = {name: value for name, value in public.items() if str(getattr(value, "__module__", "")).startswith("nidiff")}
    return {name for name, value in ours.items() if callable(value) and not name.startswith("_")}


def documented_names() -> dict[str, str]:
    """Each name in the ``members`` of an API page, and the module it is shown under."""
    documented = {}
    for page in (DOCS / "api").glob("*.md"):
        for module, members in re.findall(r"^::: (\S+)\n(?:    .*\n)*?      members: \[(.*)\]", page.read_text(), re.M):
            documented |= {name.strip(): module for name in members.split(",")}
    return documented


def test_every_row_of_a_table_has_as_many_cells_as_its_head():
    for page in (*DOCS.glob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("benchmarks/*.md")):
        width = 0
        for number, line in enumerate(page.read_text().splitlines(), 1):
            bars = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line))) if line.startswith("|") else 0
            assert bars in (width, 0) or not width, f"{page.name}, line {number}"
            width = bars


def test_every_public_name_has_its_place_in_the_api_pages():
    documented = documented_names()
    assert public_names() - documented.keys() == set()
    for name, module in documented.items():
        assert hasattr(importlib.import_module(module), name), name


def test_the_command_line_page_is_what_the_code_gives():
    script = runpy.run_path(str(ROOT / "scripts/cli_reference.py"))
    assert (DOCS / "cli.md").read_text() == script["page"](), "run: python scripts/cli_reference.py"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_page_has_every_flag_that_help_shows(command, capsys):
    main([command, "--help"])
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    flags = set(re.findall(r"^[│| ] (--[a-z][a-z-]*)", plain, re.M))
    section = (DOCS / "cli.md").read_text().partition(f"\n## nidiff {command}\n")[2].partition("\n## ")[0]
    assert section
    assert flags == set(re.findall(r"^\| `(--[a-z][a-z-]*)", section, re.M))


def test_each_row_of_the_extending_page_has_a_section_that_registers_what_it_defines():
    text = (DOCS / "extending.md").read_text()
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\) \|.*?\| (?:`(\w+)` in `(.*?)`|nothing)", text, re.M)
    assert len(rows) == text.count("\n| [") >= 11
    sections = {section.partition("\n")[0].strip(): section for section in text.split("\n## ")[1:]}
    for thing, anchor, registry, module in rows:
        title = thing[0].upper() + thing[1:]
        assert anchor == title.lower().replace(" ", "-")
        code = "\n".join(re.findall(r"```python\n(.*?)```", sections[title], re.DOTALL))
        if registry:
            assert f"{registry}[" in code, title
            assert isinstance(getattr(importlib.import_module(module), registry), dict), title


# Imports what most pages need once, then runs each page in a child process, so that pages do not affect each other.
RUN_PAGES = """
import json, os, sys, traceback
import diffusers, torch
import nidiff, nidiff.cli, nidiff.model.network, nidiff.sampling.sampler
torch.set_num_threads(1)
failed = {}
for page, program in json.load(sys.stdin).items():
    folder = page.replace("/", "-")
    os.mkdir(folder)
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        try:
            torch.manual_seed(0)
            exec(compile(program, page, "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
        except BaseException:
            open("failure", "w").write(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed[page] = open(f"{folder}/failure").read() if os.path.exists(f"{folder}/failure") else "it was killed"
print(json.dumps(failed), file=sys.stderr)
"""

CONTROLS = {  # the first two must fail; the third must not see what the first did
    "warns": "import torch, warnings\ntorch.secret = 1\nwarnings.warn('old')",
    "fails": "import torch\nassert hasattr(torch, 'secret')",
    "runs": "import torch\nassert not hasattr(torch, 'secret')",
}


@pytest.mark.slow
def test_the_python_of_each_page_runs(tmp_path):
    """From top to bottom, with warnings as errors. The snippet of the README runs in test_readme.py."""
    pages = {str(page.relative_to(DOCS)): page.read_text() for page in DOCS.rglob("*.md")}
    code = {name: "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) for name, text in pages.items()}
    programs = {name: program for name, program in code.items() if program}
    assert len(programs) >= 15
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", RUN_PAGES]
    run = subprocess.run(command, cwd=tmp_path, input=json.dumps(CONTROLS | programs), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    failed = json.loads(run.stderr.splitlines()[-1])
    assert "UserWarning: old" in failed.pop("warns")
    assert "AssertionError" in failed.pop("fails")
    assert failed == {}


LESS = {"train": ["--steps", "4", "--cooldown", "2", "--warmup", "1", "--widths", "8", "8"]}


@pytest.mark.slow
def test_the_commands_of_the_readme_make_samples_of_a_folder_of_images(tmp_path, monkeypatch, capfd, with_report):
    """As printed, but for flags that make the training short and the network small."""
    monkeypatch.chdir(tmp_path)
    Path("my_images").mkdir()
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (40, 40, 36), np.uint8)):
        Image.fromarray(pixels).save(f"my_images/{number}.png")
    lines = re.findall(r"^    nidiff (?!explore)(.*)$", (ROOT / "README.md").read_text(), re.M)
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [command[0] for command in commands] == ["sample", "train", "sample"]
    for command in commands:
        assert main([*command, *LESS.get(command[0], [])]) == 0, capfd.readouterr().err
    (pixels,) = (np.load(file)["arr_0"] for file in Path("runs/mine/generated").glob("*/samples.npz"))
    assert pixels.shape == (16, 32, 32, 1)
    assert Path("runs/mine/report.html").stat().st_size > 1000


def test_every_page_is_in_the_navigation():
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))


class Fetched(HTMLParser):
    """What a browser fetches from elsewhere when it opens a page, and how many formulas the page has."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.formulas = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.formulas += tag == "math"
        address = attributes.get("src") or (attributes.get("href") if tag == "link" else None) or ""
        if re.match(r"(https?:)?//", address):
            self.addresses.append(address)


@pytest.mark.slow
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


def test_a_basis_of_two_methods_is_enough():
    class Reversed(nidiff.covariance.Basis):
        event_shape = (4,)

        def analyse(self, x):
            return x.flip(-1)

        def synthesise(self, coefficients):
            return coefficients.flip(-1)

    cov = nidiff.Covariance(torch.linspace(0.5, 1.5, 4), Reversed())
    torch.testing.assert_close(cov.dense(), torch.linspace(1.5, 0.5, 4, dtype=torch.float64).diag())
    assert "Reversed(shape=(4,))" in repr(cov)
    with pytest.raises(nidiff.InputError) as caught:
        cov.to_config()  # it cannot be saved without `arguments` and a name in BASES
    assert caught.value.argument == "basis"
