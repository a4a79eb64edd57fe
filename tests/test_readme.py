"""The README keeps its promises, and what any page names exists. Whether whole pages run is in test_docs.py."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
ROOMS = ["CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md", "space/README.md"]
PAGES = [README, *DOCS, *(ROOT / name for name in ROOMS)]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@functools.cache
def source(file: str) -> str:
    return (ROOT / file).read_text()


def test_the_readme_has_at_most_7000_bytes():
    assert README.stat().st_size <= 7000


def test_the_snippet_of_the_readme_is_short_and_runs_but_for_the_number_of_its_steps():
    (snippet,) = blocks(README.read_text(), "python")
    assert len(snippet.splitlines()) <= 14
    names: dict = {}
    exec(compile(snippet.replace("range(100)", "range(1)"), "README.md", "exec"), names)
    assert names["samples"].shape == (16, 1, 8, 8)
    assert all(p.grad is not None for p in names["denoiser"].parameters())


# What a page must not tell people to type: nidiff is on no package index, so pip needs a path or a wheel.
BY_NAME = re.compile(r"""pip install (?:-\S+ +(?:[\w.]+ +)?)*["']?nidiff(?![\w-]*-\S*\.whl)""")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_installs_nidiff_by_its_name(page):
    assert not BY_NAME.findall(page.read_text())


def test_installing_by_name_is_noticed_and_a_path_or_a_wheel_is_not():
    for line in ("pip install nidiff", 'pip install -q "nidiff[all]"', "pip install -c constraints.txt nidiff"):
        assert BY_NAME.search(line), line
    for line in ('pip install -c constraints.txt -e ".[all]"', "pip install nidiff-0.3.0-py3-none-any.whl"):
        assert not BY_NAME.search(line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_python_compiles_and_tests_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert "://" in target or page.parent.joinpath(target).exists(), target
    for block in blocks(text, "python"):
        compile(block, str(page), "exec")
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {test}(" in source(file) or not test, (file, test)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.name)
def test_the_flags_a_page_shows_exist(page):
    sections = dict(re.findall(r"^## nidiff (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/cli.md").read_text(), re.M | re.S))
    sections["sweep"] += sections["train"]  # a sweep takes the flags of train
    for command, flags in re.findall(r"(?:^ {4,}|`|^)nidiff ([a-z]+) ([^`\n]*)", page.read_text(), re.M):
        for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", flags.partition("#")[0]):
            assert flag == "--help" or f"| `{flag}" in sections[command], (command, flag)
