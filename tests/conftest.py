"""Small problems run faster on one thread, and the suite runs in two processes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from browser import browser  # noqa: F401  (a fixture for all)

torch.set_num_threads(1)
# Some virtual machines announce AMX and die of it. Read at the first product, by the processes that tests start too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in a browser is slow."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


@pytest.fixture(scope="module", autouse=True)
def no_report(request: pytest.FixtureRequest) -> Iterator[Callable[..., Path]]:
    """No report.html beside a run, unless the module has WITH_REPORT: its figures take longer than a short training."""
    from nidiff.report.html import write_report

    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "WITH_REPORT", False):
            patch.setattr("nidiff.report.html.write_report", lambda run, *_: run / "report.html")
        yield write_report


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: its exit code, and what it prints to stdout and stderr."""
    from nidiff.cli import main

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def with_report(no_report: Callable[..., Path]) -> Iterator[None]:
    """Commands write the report in this test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nidiff.report.html.write_report", no_report)
        yield
