"""Work that a visitor asked for: it shows how far it is, can be stopped, and ends in time."""

import contextlib
import functools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from html import escape
from inspect import isgeneratorfunction
from typing import Any, TypeVar

import gradio as gr

from nidiff.errors import InputError

LONGEST = 120.0  # seconds that one request may take
PATIENCE = 10.0  # seconds after which a visitor who takes nothing has gone
OFTEN = 0.2  # seconds between two pictures of the same work

# Two workers on two cores: a long one never keeps the sliders waiting. Visitors beyond that wait in the queue.
QUICK: dict[str, Any] = {"concurrency_id": "quick", "concurrency_limit": 1, "api_visibility": "private"}
LONG: dict[str, Any] = {"concurrency_id": "long", "concurrency_limit": 1, "api_visibility": "private"}

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")
Show = Callable[[T], None]


_closing = threading.Event()


class Stopped(Exception):
    """The visitor has stopped the work, or gone."""


def watched(work: Callable[[Show[T]], R], seconds: float = LONGEST) -> Generator[T, None, R]:
    """Do ``work(show)`` in a thread of its own, yield what it shows on the way, and return its result.

    ``show`` is to be called at every step: it ends the work when the visitor stops it or has gone, which closes this
    generator or leaves it alone, and when ``seconds`` have passed. Of what is shown too fast, only the newest is seen.
    """
    shown: queue.Queue[T] = queue.Queue(1)
    over, end = threading.Event(), time.monotonic() + seconds
    taken, put, failed, result = time.monotonic(), 0.0, list[BaseException](), list[R]()

    def show(value: T) -> None:
        nonlocal put
        now = time.monotonic()
        if over.is_set() or _closing.is_set() or now - taken > PATIENCE:
            raise Stopped
        if now > end:
            raise InputError(
                f"this takes longer than the {seconds:g} s that a request may take: ask for fewer steps or samples."
            )
        if now - put >= OFTEN:
            with contextlib.suppress(queue.Empty):
                shown.get_nowait()
            shown.put_nowait(value)
            put = now

    def run() -> None:
        try:
            result.append(work(show))
        except BaseException as error:  # it is raised where the visitor waits
            failed.append(error)

    thread = threading.Thread(target=run)  # which Python waits for when it ends: torch would abort
    thread.start()
    try:
        while thread.is_alive():
            taken = time.monotonic()
            with contextlib.suppress(queue.Empty):
                yield shown.get(timeout=0.05)
    finally:
        over.set()
    if failed:
        raise failed[0]
    return result[0]


def shown_as(frames: Generator[T, None, R], page: Callable[[T], V]) -> Generator[V, None, R]:
    """What ``frames`` yields as the page shows it; what it returns."""
    while True:
        try:
            frame = next(frames)
        except StopIteration as end:
            return end.value
        yield page(frame)


def begin() -> None:
    """Work may be done, also after `end_all`."""
    _closing.clear()


def end_all() -> None:
    """End whatever is being worked on, at its next step."""
    _closing.set()


def spoken(function: Callable[..., Any]) -> Callable[..., Any]:
    """An event of the page whose errors reach the visitor as a sentence, in which nothing is HTML."""
    if isgeneratorfunction(function):

        @functools.wraps(function)
        def steps(*values: Any) -> Iterator[Any]:
            with _sentences():
                yield from function(*values)

        return steps

    @functools.wraps(function)
    def once(*values: Any) -> Any:
        with _sentences():
            return function(*values)

    return once


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise said(str(error)) from None
    except Stopped:
        raise said("stopped.") from None
    except OSError as error:  # a run that is being written, or has gone
        raise said(f"a file cannot be read ({error.strerror}): reload the page.") from None
    except MemoryError:
        raise said("there is not enough memory for this: ask for less at a time.") from None
    except gr.Error:
        raise
    except Exception:
        traceback.print_exc(file=sys.stderr)
        raise said("something went wrong: see the terminal where nidiff explore is running.") from None


def said(sentence: str) -> gr.Error:
    """What the visitor is told, on one line and of bounded length."""
    words = " ".join(sentence.split())
    return gr.Error(escape(words[:600]), duration=20, title="nidiff", print_exception=False)
