"""Hostile trials. `make test-all` runs a few seeded cases of each class, `make hostile` thousands: NIDIFF_HOSTILE times
as many. The tally at the end says what was tried and what failed."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

CASES = int(os.environ.get("NIDIFF_HOSTILE", "1"))  # how many times the quick number of cases


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Callable[[str, int, int], None]:
    """Call it with the class of the trial, and how many cases were tried and failed."""

    def count(kind: str, tried: int, failed: int) -> None:
        record_property("hostile", (kind, tried, failed))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tried: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    reports = [report for group in terminalreporter.stats.values() for report in group if hasattr(report, "when")]
    for report in reports:
        for name, value in getattr(report, "user_properties", []) if report.when == "call" else []:
            if name == "hostile":
                tried[value[0]] += value[1]
                failed[value[0]] += value[2]
    if tried:
        terminalreporter.section("hostile trials")
        for kind in sorted(tried):
            terminalreporter.write_line(f"{kind:60} tried {tried[kind]:6}   failed {failed[kind]:6}")
