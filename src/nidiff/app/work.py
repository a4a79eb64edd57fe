"""Work that a visitor asked for: it shows its progress, can be stopped, and ends in time."""

import contextlib
import functools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from inspect import isgeneratorfunction
from typing import Any, TypeVar

import gradio as gr

from nidiff.errors import InputError

LONGEST = 120.0  # seconds that one request may take
PATIENCE = 10.0  # seconds after which a visitor who takes nothing has gone
OFTEN = 0.2  # seconds between two pictures of the same work
MOST_WORK = 2**23  # items × steps × numbers of an item

T = TypeVar("T")
R = TypeVar("R")
Show = Callable[[T], None]

closing = threading.Event()  # once it is set, all work ends at its next step


class Stopped(Exception):
    """The visitor has stopped the work, or gone."""


def watched(work: Callable[[Show[T]], R], render: Callable[[T], Any] = lambda frame: frame) -> Generator[Any, None, R]:
    """Do ``work(show)`` in a thread, yield the frames that it shows, each through ``render``, and return its result.

    ``work`` calls ``show`` at every step. That ends the work when the visitor stops it, which closes this generator,
    when nobody has asked the generator for a frame for `PATIENCE`, and when `LONGEST` has passed. Of frames that come
    faster than every `OFTEN` seconds, only the newest is yielded.
    """
    frames: queue.Queue[T] = queue.Queue(1)
    over, end = threading.Event(), time.monotonic() + LONGEST
    taken, put = time.monotonic(), 0.0

    def show(frame: T) -> None:
        nonlocal put
        now = time.monotonic()
        if over.is_set() or closing.is_set() or now - taken > PATIENCE:
            raise Stopped
        check_time(end)
        if now - put >= OFTEN:
            with contextlib.suppress(queue.Empty):
                frames.get_nowait()
            frames.put_nowait(frame)
            put = now

    worker = ThreadPoolExecutor(1)
    result = worker.submit(work, show)
    worker.shutdown(wait=False)
    try:
        while not result.done():
            taken = time.monotonic()
            with contextlib.suppress(queue.Empty):
                yield render(frames.get(timeout=0.05))
    finally:
        over.set()
    return result.result()


def with_messages(function: Callable[..., Any], count: int, speaks: bool) -> Callable[..., Any]:
    """An event of the page that has ``count`` outputs, of which the first is a message. Unless it ``speaks`` itself,
    that is empty; an error becomes one sentence there, and whatever else was shown stays."""

    def failed(error: Exception) -> tuple[Any, ...]:
        sentence = escape(" ".join(_sentence(error).split())[:600])
        return f'<p class="error" role="alert">{sentence}</p>', *[gr.skip()] * (count - 1)

    @functools.wraps(function)
    def answer(*values: Any) -> Any:
        try:
            result = function(*values)
        except Exception as error:
            return failed(error)
        others = result if isinstance(result, tuple | list) else [result]
        return result if speaks else ("", *others)

    @functools.wraps(function)
    def answers(*values: Any) -> Iterator[Any]:
        try:
            yield from function(*values)
        except Exception as error:
            yield failed(error)

    return answers if isgeneratorfunction(function) else answer


def _sentence(error: Exception) -> str:
    if isinstance(error, InputError):
        return str(error)
    if isinstance(error, Stopped):
        return "stopped."
    if isinstance(error, OSError):  # a run that is being written, or has gone
        return f"a file cannot be read ({error.strerror}): reload the page."
    if isinstance(error, MemoryError):
        return "there is not enough memory for this: ask for less at a time."
    traceback.print_exception(error, file=sys.stderr)
    return "something went wrong: see the terminal where nidiff explore is running."


def check_time(end: float) -> None:
    """Refuse to work on after ``end``, a time of the monotonic clock."""
    if time.monotonic() > end:
        raise InputError(None, None, "this takes longer than a request may take", "ask for fewer steps or samples")


def check_work(argument: str, count: int, steps: int, shape: tuple[int, ...]) -> None:
    """Refuse to draw so many items of a shape in so many steps if that is too much for a page."""
    if (work := count * steps * math.prod(shape)) > MOST_WORK:
        problem = f"× steps × size = {work:,} is more than the {MOST_WORK:,} of this page"
        raise InputError(argument, None, problem, "ask for fewer, or for fewer steps, or use the command line")
