"""What the documentation prints can be run as printed, top to bottom."""

import re
from pathlib import Path

import pytest
import torch

from nidiff.sampling.sampler import SAMPLERS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/concepts.md",
        "docs/diffusers.md",
        "docs/evaluation.md",
        "docs/extending.md",
        "docs/training.md",
    ],
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SAMPLERS, "lazy", SAMPLERS["ddim"])  # so that what a page registers is taken back
    torch.manual_seed(0)
    exec(compile("\n".join(blocks), page, "exec"), {})


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
)
def test_local_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert (ROOT / page).parent.joinpath(target).exists(), target
