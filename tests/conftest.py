"""Small problems run faster on one thread, and the suite runs in two processes."""

from collections.abc import Iterator

import pytest
import torch
from browser import browser  # noqa: F401  (a fixture for all)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def no_report() -> Iterator[None]:
    """No report.html beside a run: its figures take longer than a short training. test_report.py has it, for every kind
    of data, and the commands of the README write it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nidiff.report.html.write_report", lambda run, *_: run / "report.html")
        yield
