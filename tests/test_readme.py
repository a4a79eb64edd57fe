"""What the documentation prints can be run as printed, top to bottom."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from PIL import Image

import nidiff
from nidiff.cli import main

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.relative_to(ROOT / 'docs')}" for page in sorted((ROOT / "docs").rglob("*.md")))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def page_blocks(page: str, language: str) -> list[str]:
    return blocks((ROOT / page).read_text(), language)


# Imports what most pages need once, then runs each page in a child: what it registers or seeds is gone with it.
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


def test_the_python_of_each_page_runs(tmp_path):
    """A warning is an error, as here."""
    programs = {page: "\n".join(found) for page in PAGES if (found := page_blocks(page, "python"))}
    assert len(programs) > 15
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", RUN_PAGES]
    given = json.dumps(CONTROLS | programs)
    run = subprocess.run(command, cwd=tmp_path, input=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    failed = json.loads(run.stderr.splitlines()[-1])
    assert "UserWarning: old" in failed.pop("warns")
    assert "AssertionError" in failed.pop("fails")
    assert failed == {}


def test_each_row_of_the_extending_page_has_a_section_that_is_run():
    text = (ROOT / "docs/extending.md").read_text()
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\) \|.*?\| (?:`(\w+)` in `(.*?)`|nothing)", text, re.M)
    assert len(rows) == text.count("\n| [") >= 11
    sections = {section.partition("\n")[0].strip(): section for section in text.split("\n## ")[1:]}
    for thing, anchor, registry, module in rows:
        title = thing[0].upper() + thing[1:]
        assert anchor == title.lower().replace(" ", "-")
        code = "\n".join(blocks(sections[title], "python"))
        compile(code, title, "exec")
        if registry:  # the block registers what it defines, in the registry the row names
            assert f"{registry}[" in code, title
            assert re.search(rf"^{registry}\b.*=", (ROOT / "src/nidiff" / module).read_text(), re.M), module


LESS = {"train": ["--batch-size", "16", "--num-samples", "4"]}  # flags that only make a command quicker


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capfd):
    """As printed, but for flags that only make them quicker, and on small data of ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path / "cache"))
    Path("my_images").mkdir()
    smooth = np.random.default_rng(0).uniform(0, 255, (40, 4, 4)).repeat(4, 1).repeat(4, 2)
    for number, pixels in enumerate(smooth + np.random.default_rng(1).normal(0, 9, smooth.shape)):
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(f"my_images/{number}.png")
    field = nidiff.gaussian_free_field((8, 16), boundary=("reflecting", "periodic"))
    maps = field.sample((2, 20, 8, 16), torch.Generator().manual_seed(0)).numpy()
    axes = ("time", "lat", "lon")
    fields = {"t2m": (axes, 280 + 9 * maps[0], {"units": "K"}), "u10": (axes, 4 * maps[1], {"units": "m/s"})}
    xarray.Dataset(fields, {"lat": np.linspace(-60, 60, 8)}).to_netcdf("fields.nc", engine="h5netcdf")
    lines = [line for block in page_blocks("README.md", "sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert {command[1] for command in commands} >= {"noise", "train", "calibrate", "sample", "evaluate", "table"}
    for program, *arguments in commands:
        assert program == "nidiff"
        assert main([*arguments, *LESS.get(arguments[0], [])]) == 0, capfd.readouterr().err
    written = ["out/noise.png", "out/fitted.png", "out/calibration.png", "out/table/table.tex", "runs/try/report.html"]
    written += [
        "runs/fields/report.html",
        "out/video.png",
        *map(str, Path("runs/fields/generated").glob("*/samples.nc")),
    ]
    assert len(written) == 8
    assert all(Path(name).stat().st_size > 100 for name in written)
    assert len(list(Path("runs/try/generated").glob("dpmpp_2m-10-*/png/*"))) == 64


COMMAND_PAGES = [page for page in [*PAGES, "examples/README.md", "benchmarks/README.md"] if page != "docs/cli.md"]


@pytest.mark.parametrize("page", COMMAND_PAGES)
def test_the_flags_a_page_shows_exist(page):
    known = (ROOT / "docs/cli.md").read_text()
    for line in re.findall(r"(?:^ {4,}|`|^)nidiff ([a-z]+ [^`\n]*)", (ROOT / page).read_text(), re.M):
        command, _, flags = line.partition(" ")
        commands = ("sweep", "train") if command == "sweep" else (command,)  # a sweep takes the flags of train
        section = "".join(known.partition(f"\n## nidiff {each}\n")[2].partition("\n## ")[0] for each in commands)
        assert section, line
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", flags.partition("#")[0]):
            assert flag == "--help" or f"| `{flag}" in section, line


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in(page):
    assert not re.findall(r"^[A-Z_]{6,}$|TO FILL|TODO", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"])
def test_local_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target
