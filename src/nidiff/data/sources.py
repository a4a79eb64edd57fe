"""Sources: values that are read when they are needed, and files that must not change meanwhile."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nidiff.data.dataset import Dataset, Source
from nidiff.data.spec import MEMORY_LIMIT
from nidiff.errors import FileError, InputError, first_line
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 2**21  # numbers that are read at once


class Limits(NamedTuple):
    """How data are read, which does not change what is read."""

    memory_limit: int | None = MEMORY_LIMIT
    """Data of more bytes are read batch by batch. None: no limit."""
    progress: bool = False
    """Whether bars are shown on a terminal."""


class Rows:
    """Some rows of a source."""

    def __init__(self, values: Source, rows: Tensor) -> None:
        self.shape, self.dtype = (len(rows), *values.shape[1:]), values.dtype
        self._values, self._rows = values, rows

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        return self._values.index_select(dim, self._rows[index])


def take(data: Dataset, rows: Tensor) -> Dataset:
    """The data set of some rows."""
    chosen = data.values[rows] if isinstance(data.values, Tensor) else Rows(data.values, rows)
    along = None if data.along is None else (data.along[0], data.along[1][rows.numpy()])
    labels, conditions = (None if values is None else values[rows] for values in (data.labels, data.conditions))
    return replace(data, values=chosen, labels=labels, conditions=conditions, along=along)


def blocks(rows: Tensor, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """The rows of items of ``shape``, as many at a time as can be read at once."""
    yield from rows.split(max(1, BLOCK // max(1, prod(shape))))


def load_or_stream(source: Source, name: str, limits: Limits) -> Tensor | Source:
    """All values of a source in memory, if they are within the limit; else the source itself."""
    size = prod(source.shape) * source.dtype.itemsize
    if limits.memory_limit is not None and size > limits.memory_limit:
        require_memory("data", name, 4.0 * size / len(source), f"give items smaller than {source.shape[1:]}")
        return source
    require_memory("data", name, 1.1 * size, "give fewer items, or a memory_limit")
    values = torch.empty(source.shape, dtype=source.dtype)
    bar = tqdm(total=len(source), desc="reading", delay=1, leave=False, disable=None if limits.progress else True)
    with bar:
        for rows in blocks(torch.arange(len(source)), source.shape[1:]):
            values[rows[0] : rows[-1] + 1] = source.index_select(0, rows)
            bar.update(len(rows))
    return values


def gather(index: Tensor, total: int, read: "Callable[[NDArray[Any]], NDArray[Any]]") -> Tensor:
    """The rows of ``index``, in any order and perhaps twice; ``read`` gives rising rows, as a file has them."""
    rows, back = np.unique(index.numpy(), return_inverse=True)
    if len(rows) == 0 or rows[0] < 0 or rows[-1] >= total:
        raise IndexError(f"index has rows out of 0 to {total - 1}")
    values = read(rows)
    return torch.from_numpy(values if np.array_equal(back, np.arange(len(index))) else values[back])


def slices_of(rows: "NDArray[Any]") -> "list[slice]":
    """Rising rows as slices of neighbours."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


@dataclass(frozen=True)
class WatchedFile:
    """A file as it was when it was opened."""

    path: Path
    state: tuple[int, int, int]

    @classmethod
    def now(cls, path: Path) -> "WatchedFile":
        return cls(path, _state(path))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Refuse, in one sentence, a file that cannot be read, or that has changed by the time it has been read."""
        try:
            yield
            problem, cause = None if _state(self.path) == self.state else "has changed since it was opened", None
        except (InputError, MemoryError, IndexError):
            raise
        except Exception as error:  # each format has many of its own
            problem, cause = f"cannot be read any more ({first_line(error)})", error
        if problem is not None:
            raise FileError(
                "data", str(self.path), problem, "leave it as it is until the end, and start again"
            ) from cause


def _state(path: Path) -> tuple[int, int, int]:
    try:
        now = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return now.st_size, now.st_mtime_ns, now.st_ino
