"""Values that are read when they are needed, from files that must not change meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nidiff.data.dataset import Source
from nidiff.data.spec import MEMORY_LIMIT
from nidiff.errors import FileError
from nidiff.files import blaming
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
BLOCK = 2**21  # numbers that are worked on at once


class Limits(NamedTuple):
    """How data are read, which does not change what is read."""

    memory_limit: int | None = MEMORY_LIMIT
    """Data of more bytes are read batch by batch. None: no limit."""
    progress: bool = False
    """Whether bars are shown on a terminal."""


def blocks(rows: Tensor, shape: tuple[int, ...], title: str, progress: bool, numbers: int = BLOCK) -> Iterator[Tensor]:
    """The rows of items of ``shape``, as many at a time as have so many ``numbers``, with a bar."""
    yield from with_bar(rows.split(max(1, numbers // max(1, prod(shape)))), title, progress)


def with_bar(parts: Sequence[T], title: str, progress: bool) -> Iterator[T]:
    """The same, with a bar on a terminal if it takes more than a second."""
    yield from tqdm(parts, title, delay=1, leave=False, disable=None if progress else True)


def spread_rows(count: int, most: int) -> Tensor:
    """At most so many of ``count`` rows, from the first to the last at equal distances."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).long()


def load_or_stream(source: Source, name: str, limits: Limits) -> Tensor | Source:
    """All values of a source in memory, if they are within the limit; else the source itself."""
    if 0 in source.shape:
        raise FileError("data", name, f"has shape {source.shape}", "give at least one item")
    size = prod(source.shape) * source.dtype.itemsize
    if limits.memory_limit is not None and size > limits.memory_limit:
        require_memory("data", name, 4.0 * size / len(source), f"give items smaller than {source.shape[1:]}")
        return source
    require_memory("data", name, 1.1 * size, "give fewer items, or a memory_limit")
    values = torch.empty(source.shape, dtype=source.dtype)
    for rows in blocks(torch.arange(len(source)), source.shape[1:], "reading", limits.progress, 8 * BLOCK):
        values[rows[0] : rows[-1] + 1] = source.read(rows)
    return values


def gather(index: Tensor, read: "Callable[[NDArray[Any]], NDArray[Any]]") -> Tensor:
    """The rows of ``index``, in any order and perhaps twice; ``read`` gives rising rows, as a file has them."""
    rows, back = np.unique(index.numpy(), return_inverse=True)
    return torch.from_numpy(read(rows)[back])


def slices_of(rows: "NDArray[Any]") -> "list[slice]":
    """Rising rows as slices of neighbours."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def watched(file: Path, read: Callable[..., Any]) -> Callable[..., Any]:
    """``read``, which is refused if ``file`` cannot be read, or has changed since now by the time it has been read."""

    def state() -> tuple[int, int, int]:
        now = file.stat()
        return now.st_size, now.st_mtime_ns, now.st_ino

    before = state()

    def read_unchanged(*args: Any) -> Any:
        with blaming(file, "leave it as it is until the end, and start again", "cannot be read any more", "data"):
            values = read(*args)
            if state() != before:
                raise ValueError("it has changed since it was opened")
            return values

    return read_unchanged
