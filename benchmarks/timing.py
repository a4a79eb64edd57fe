"""What the benchmarks share: things timed side by side in one process, and the median of their ratio."""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

Times = dict[str, list[float]]


class Row(NamedTuple):
    """One line of the result: what was measured, beside what, and the quartiles of the ratio over the rounds."""

    measured: str
    peer: str
    ratio: float
    low: float
    high: float
    bound: float | None = None
    milliseconds: float | None = None
    note: str = ""


def parse(parser: argparse.ArgumentParser, rounds: int, what: str, least: int = 3) -> argparse.Namespace:
    """The arguments of a benchmark: its own, --rounds of ``what``, --threads and --json. Sets the number of threads."""
    parser.add_argument("--rounds", type=int, default=rounds, help=what)
    parser.add_argument("--threads", type=int, default=None, help="torch threads (default: torch's own choice)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args()
    if arguments.rounds < least:
        parser.error(f"--rounds must be at least {least}: the quartiles of fewer say nothing")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    warn_if_busy()
    return arguments


def interleave(calls: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Seconds of each call in each round. The rounds run in turn forwards and backwards, after two rounds unmeasured.

    What else the machine does then falls on all calls alike, and the ratio within a round stays what it is.
    """
    times: Times = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for number in range(-2, rounds):
            for name in list(calls) if number % 2 == 0 else reversed(calls):
                start = time.perf_counter()
                calls[name]()
                if number >= 0:
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def compare(
    times: Times, measured: str, peer: str, *, bound: float | None = None, scale: float = 1.0, note: str = ""
) -> Row:
    """The row of ``measured`` / ``peer``; ``scale`` is for a call that does only a part of the work of its peer."""
    ratios = [scale * own / other for own, other in zip(times[measured], times[peer], strict=True)]
    milliseconds = 1e3 * scale * statistics.median(times[measured])
    return summary(measured, peer, ratios, bound=bound, milliseconds=milliseconds, note=note)


def summary(
    measured: str,
    peer: str,
    ratios: list[float],
    *,
    bound: float | None = None,
    milliseconds: float | None = None,
    note: str = "",
) -> Row:
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Row(measured, peer, median, low, high, bound, milliseconds, note)


def report(sections: dict[str, list[Row]], *, as_json: bool) -> None:
    """The result on stdout: a table to read, or JSON."""
    if as_json:
        found = {title: [row._asdict() for row in rows] for title, rows in sections.items()}
        print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "sections": found}, indent=2))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; ratio: median over rounds [quartiles]")
    for title, rows in sections.items():
        print(f"\n{title}")
        for row in rows:
            print(_line(row))


def _line(row: Row) -> str:
    ratio = f"{_number(row.ratio):>8} [{_number(row.low)}, {_number(row.high)}]"
    bound = "" if row.bound is None else f"at most {row.bound:g}"
    cost = "" if row.milliseconds is None else f"{_number(row.milliseconds)} ms"
    return f"  {row.measured:<44} / {row.peer:<22} {ratio:<28} {bound:<13} {cost:<12} {row.note}".rstrip()


def _number(x: float) -> str:
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}" if abs(x) >= 10 else f"{x:.3f}" if abs(x) >= 0.01 else f"{x:.2g}"


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def warn_if_busy() -> None:
    """Code on several threads waits for its slowest one: beside other work its ratio to serial code is too high."""
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        log(f"the machine is busy (load {os.getloadavg()[0]:.1f}): ratios of threaded to serial code will be too high")


def at_shape(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape))
