"""What the documentation prints can be run as printed, top to bottom."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nidiff.cli import main
from nidiff.evaluation import metrics
from nidiff.sampling.sampler import SAMPLERS

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *(f"docs/{page.relative_to(ROOT / 'docs')}" for page in sorted((ROOT / "docs").rglob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SAMPLERS, "lazy", SAMPLERS["ddim"])  # so that what a page registers is taken back
    monkeypatch.setattr(metrics, "METRICS", dict(metrics.METRICS))
    torch.manual_seed(0)
    exec(compile("\n".join(blocks(page, "python")), page, "exec"), {})


def test_the_commands_of_the_readme_run(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path / "cache"))
    Path("my_images").mkdir()
    smooth = np.random.default_rng(0).uniform(0, 255, (40, 4, 4)).repeat(4, 1).repeat(4, 2)
    for number, pixels in enumerate(smooth + np.random.default_rng(1).normal(0, 9, smooth.shape)):
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(f"my_images/{number}.png")
    commands = [shlex.split(line, comments=True) for block in blocks("README.md", "sh") for line in block.splitlines()]
    assert {command[1] for command in commands} >= {"noise", "train", "calibrate", "sample", "evaluate", "table"}
    for program, *arguments in commands:
        assert program == "nidiff"
        assert main(arguments) == 0, capfd.readouterr().err
    written = ["matern.png", "fitted.png", "out/table/table.tex", "runs/try/report.html"]
    assert all(Path(name).stat().st_size > 100 for name in written)
    assert len(list(Path("runs/try/generated").glob("dpmpp_2m-10-*/png/*"))) == 64


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_to_fill_in(page):
    assert not re.findall(r"^[A-Z_]{6,}$|TO FILL|TODO", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"])
def test_local_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target
