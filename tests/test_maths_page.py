"""docs/maths.md is true: the functions it names exist, and the tests beside them call them.

The tests that the page names run in a process of their own, where a plugin of pytest watches what they call.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import problems
import pytest

import nidiff
from nidiff.diffusion.target import TARGETS, Target
from nidiff.sampling.sampler import SAMPLERS

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/maths.md"
# Rows that are not true: the tests exist, but call other functions, or with other arguments.
POSTERIOR = "tests/test_errata.py::test_e16_the_posterior_variance_has_the_cumulative_product"
LOSS = "tests/test_objective.py::test_it_is_the_squared_error_of_white_eps"
WRONG = f"""
| one | `Process.flow` | `{POSTERIOR}` |
| two | `denoising_loss(weighting="target")` | `{LOSS}` |
| three | `jump_variances`, `ddim` | `{POSTERIOR}` |
| four | `denoising_loss` | `{LOSS}`, `{POSTERIOR}` |
"""


class Row(NamedTuple):
    name: str
    functions: list[str]
    tests: list[str]


def rows(page: str) -> list[Row]:
    """The rows of the tables whose last two columns are functions and tests."""
    found = []
    for line in page.splitlines():
        if line.startswith("|") and "`tests/" in line:
            name, *_, functions, tests = line.strip("| ").split(" | ")
            found.append(Row(name, re.findall("`([^`]+)`", functions), re.findall("`([^`]+)`", tests)))
    return found


class Claim(NamedTuple):
    """That a function is called: a method of ``owner`` or a subclass, or ``code``; with the arguments ``given``."""

    function: str
    owner: type | None
    code: CodeType | None
    given: dict[str, Any]

    def holds(self, frame: FrameType) -> bool:
        got = frame.f_locals
        if not (isinstance(got.get("self"), self.owner) if self.owner else frame.f_code is self.code):
            return False
        return all(
            key in got and (got[key] is not None if value is ... else got[key] == value)
            for key, value in self.given.items()
        )


def mathematics() -> dict[str, Any]:
    """Every name of the mathematical packages. Samplers and targets are known by their names in quotes."""
    found: dict[str, Any] = {f'"{name}"': entry for name, entry in {**TARGETS, **SAMPLERS}.items()}
    for package in ("covariance", "diffusion", "sampling", "design", "inverse"):
        for module in pkgutil.iter_modules([str(Path(nidiff.__file__).parent / package)], f"nidiff.{package}."):
            found |= vars(importlib.import_module(module.name))
    return found | {"Unconditional": problems.Unconditional}  # a network of the paper that serves tests alone


def claims(function: str, known: dict[str, Any]) -> list[tuple[str, Claim]]:
    """What shows that ``function`` was called, by the name of the code to look out for."""
    call = ast.parse(function.replace("…", "..."), mode="eval").body
    given = {word.arg: ast.literal_eval(word.value) for word in getattr(call, "keywords", ())}
    name, _, method = function.partition("(")[0].partition(".")
    found = known[name]
    if isinstance(found, type):
        assert hasattr(found, method or "__init__"), f"{function} does not exist"
        return [(method or "__init__", Claim(function, found, None, given))]
    parts = {Target: ("encode", "coefficients"), nidiff.sampling.Sampler: ("step",)}.get(type(found))
    plain = [inspect.unwrap(one) for one in ([getattr(found, part) for part in parts] if parts else [found])]
    return [(one.__name__, Claim(function, None, one.__code__, given)) for one in plain]


class Watch:
    """A plugin that notes which functions each test calls, and leaves a test when there is no more to learn from it."""

    def __init__(self, page: str) -> None:
        self.rows, known = rows(page), mathematics()
        self.called: dict[str, set[str]] = {test: set() for row in self.rows for test in row.tests}
        self.caches = [function for function in known.values() if hasattr(function, "cache_clear")]
        self.claims: dict[str, list[Claim]] = {}
        for function in {function for row in self.rows for function in row.functions}:
            for name, claim in claims(function, known):
                self.claims.setdefault(name, []).append(claim)

    def missing(self, row: Row) -> list[str]:
        """The functions that no test of the row calls."""
        return [function for function in row.functions if all(function not in self.called[test] for test in row.tests)]

    def idle(self, test: str, row: Row) -> bool:
        return bool(row.functions) and self.called[test].isdisjoint(row.functions)

    def complaints(self) -> list[str]:
        found = []
        for row in self.rows:
            found += [f"{row.name}: no test calls {function}" for function in self.missing(row)]
            found += [f"{row.name}: {test} calls none of its functions" for test in row.tests if self.idle(test, row)]
        return found

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.reverse()  # a third faster: the samplers that rows wait for stand last in the lists of cases

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        test = item.nodeid.partition("[")[0]

        def leave_if_done() -> None:
            if not any(self.missing(row) or self.idle(test, row) for row in self.rows if test in row.tests):
                pytest.skip("it calls what the page says")

        def watch(frame: FrameType, event: str, arg: object) -> None:
            found = {claim.function for claim in self.claims.get(frame.f_code.co_name, ()) if claim.holds(frame)}
            if not found <= self.called[test]:
                self.called[test] |= found
                leave_if_done()

        leave_if_done()
        for function in self.caches:
            function.cache_clear()
        sys.settrace(watch)
        try:
            return (yield)
        finally:
            sys.settrace(None)


def test_every_test_calls_the_functions_beside_it_and_wrong_rows_are_found(tmp_path):
    page, report = tmp_path / "maths.md", tmp_path / "complaints.json"
    page.write_text(PAGE.read_text() + WRONG)
    command = [sys.executable, __file__, str(page), str(report)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert json.loads(report.read_text()) == [
        "one: no test calls Process.flow",
        f"one: {POSTERIOR} calls none of its functions",
        'two: no test calls denoising_loss(weighting="target")',
        f"two: {LOSS} calls none of its functions",
        "three: no test calls ddim",
        f"four: {POSTERIOR} calls none of its functions",
    ]


def test_a_name_that_is_gone_is_found():
    watch = Watch(PAGE.read_text())
    assert len(watch.rows) > 100
    for function in ("Process.gone", "gone", '"gone"'):
        with pytest.raises((AssertionError, KeyError), match="gone"):
            Watch(f"| 1 | `{function}` | `tests/test_x.py::test_x` |")


if __name__ == "__main__":
    watch = Watch(Path(sys.argv[1]).read_text())
    status = pytest.main(["-p", "no:cacheprovider", *watch.called], plugins=[watch])
    Path(sys.argv[2]).write_text(json.dumps(watch.complaints()))
    sys.exit(status)
