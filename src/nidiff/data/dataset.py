"""A data set [N, C, *event] that gives batches as the network sees them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from nidiff.data.grid import Grid
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.errors import InputError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.data.crops import Crops
    from nidiff.diffusion.climatology import Times

Values: TypeAlias = "Tensor | Source | Crops"
Window: TypeAlias = tuple[slice, ...]
Along: TypeAlias = "tuple[str, NDArray[Any]]"
LARGEST = {"uint8": 255, "uint16": 65535}
WHOLE = {"uint8": PIXELS, "uint16": Scaling(32767.5, 32767.5)}  # the range of the type is [−1, 1]


@dataclass(frozen=True, eq=False)
class Source:
    """Values [N, C, *event] that are read when they are needed, through the interface of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Tensor], Tensor]
    """From rows [B], in any order and perhaps repeated, to their items."""
    read_part: "Callable[[int, Window], Tensor] | None" = None
    """From a row and a slice of each axis of the event to that part of the item, where it can be read by itself."""

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """The items of ``index``, as `torch.Tensor.index_select` along ``dim`` = 0."""
        return self.read(index)

    def take(self, rows: Tensor) -> "Source":
        """Some of the items."""
        part = self.read_part
        known = None if part is None else lambda row, window: part(int(rows[row]), window)
        return Source((len(rows), *self.shape[1:]), self.dtype, lambda index: self.read(rows[index]), known)


@dataclass(frozen=True, eq=False)
class Dataset:
    """N items [C, *event], kept as they are stored and turned into float32 in the model's units a batch at a time."""

    values: "Values"
    """[N, C, *event]: uint8, uint16, float32, or float64 where float32 would lose something, in the units of the
    data."""
    labels: Tensor | None = None
    """[N] of int64, where the data has them."""
    skipped: list[str] = field(default_factory=list)
    """The names of the corrupt items that were left out."""
    scaling: Scaling = None  # type: ignore[assignment]
    """From the units of the model to those of the data; by default whole numbers become [−1, 1], and floats stay."""
    grid: Grid = None  # type: ignore[assignment]
    """Names, units and coordinates."""
    along: "Along | None" = None
    """The name and the coordinates [N] of the sample axis, where there are any: the times, or the names of files."""
    conditions: "Tensor | Crops | None" = None
    """[N, P], numbers, or [N, C', *event], fields: float32 of mean 0 and standard deviation 1."""
    condition_scaling: Scaling | None = None
    """Between the units of the conditions and those of the model."""
    condition_cells: tuple[int, ...] = ()
    """How many points along each axis a value of a condition on a coarser grid is for."""
    class_names: tuple[str, ...] = ()
    """What the classes 0, 1, … are called, where they have names."""
    in_range: bool = False
    """Whether whole numbers were scaled from the part of their type's range that they use to [−1, 1]."""
    num_classes: int | None = None
    """How many classes all of the data have, also where these are a part of them. By default, as the labels say."""
    lengths: Tensor | None = None
    """[N], of sounds: how many samples are sound; those after them are silence that was added."""

    def __post_init__(self) -> None:
        dtype = type_name(self.values)
        if self.scaling is None:
            object.__setattr__(self, "scaling", WHOLE.get(dtype, Scaling(1.0)))
        if self.grid is None:
            object.__setattr__(
                self, "grid", Grid.usual(self.shape, dtype if dtype in (*WHOLE, "float64") else "float32")
            )
        object.__setattr__(self, "class_names", tuple(map(printable, self.class_names)))
        if self.num_classes is None and self.labels is not None and len(self.labels):
            object.__setattr__(self, "num_classes", len(self.class_names) or int(self.labels.max()) + 1)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> tuple[int, ...]:
        """(C, *event)."""
        return tuple(self.values.shape[1:])

    @property
    def times(self) -> "Times | None":
        """When each item was, where the sample axis says it."""
        return None if self.along is None or self.along[1].dtype.kind != "M" else self.along[1]

    def scaling_of(self, index: Tensor) -> Scaling:
        """The scaling of the items of ``index``, by their times."""
        return self.scaling.at_times(None if self.times is None else self.times[index.cpu().numpy()])

    @property
    def has_known_range(self) -> bool:
        """Whether the model sees [−1, 1], the range of the whole numbers that the data are, or that they use."""
        return self.in_range or WHOLE.get(self.grid.dtype) == self.scaling

    def take(self, rows: Tensor) -> "Dataset":
        """The data set of some rows."""
        known, along = self.conditions, self.along
        values = self.values[rows] if isinstance(self.values, Tensor) else self.values.take(rows)
        conditions = known[rows] if isinstance(known, Tensor) else None if known is None else known.take(rows)
        labels, lengths = (None if each is None else each[rows] for each in (self.labels, self.lengths))
        along = None if along is None else (along[0], along[1][rows.numpy()])
        return replace(self, values=values, labels=labels, conditions=conditions, lengths=lengths, along=along)

    def all(self) -> Tensor:
        """All items as float32 [N, C, *event], as the model sees them."""
        return self.batch(torch.arange(len(self)))

    def stored(self, index: Tensor) -> Tensor:
        """The items of ``index`` [B] in the units of the data."""
        return self.values.index_select(0, index.cpu())

    def compared(self, index: Tensor) -> Tensor:
        """The items of ``index`` [B] in the units of the data, as samples without times are: differences from the
        climatology where the scaling takes one away, and NaN outside of the domain."""
        values = self.stored(index)
        if self.scaling.climatology is not None:
            values = self.scaling.to_data(self.scaling_of(index).to_model(values.double()))
        elif self.scaling.domain is not None:
            values = torch.where(self.scaling.domain, values, torch.nan)
        return values

    def batch(self, index: Tensor, flip: Tensor | None = None, places: Tensor | None = None) -> Tensor:
        """The items of ``index`` [B] as the model sees them; where ``flip`` [B] is true, the last axis is mirrored. Of
        crops, those at ``places`` [B, axes], by default their own."""
        values = self.stored(index) if places is None else cut(self.values, index, places)
        if self.scaling == Scaling(1.0):
            x = values.float()
        else:
            scaling = self.scaling_of(index)
            x = scaling.to_model(values if values.dtype == torch.uint8 else values.double()).float()
        if flip is not None:
            flip = flip.cpu()
            x[flip] = x[flip].flip(-1)
        return x

    def prefetch(self, draws: Iterable[tuple[Tensor, Tensor | None, Tensor | None]]) -> Iterator[Tensor]:
        """``batch(index, flip, places)`` of each of ``draws``; a thread makes the next one while the last one is in
        use."""
        with ThreadPoolExecutor(1) as pool:
            ahead = None
            for draw in draws:
                behind, ahead = ahead, pool.submit(self.batch, *draw)
                if behind is not None:
                    yield behind.result()
            if ahead is not None:
                yield ahead.result()


def cut(values: "Values | None", index: Tensor, places: Tensor) -> Tensor:
    """The crops of the items of ``index`` at ``places``."""
    assert not isinstance(values, Tensor | Source | None)
    return values.cut(index.cpu(), places)


def is_small_part(low: float, high: float, dtype: str) -> bool:
    """Whether whole numbers from ``low`` to ``high`` use less than a quarter of the range of their type, as 12 bits in
    uint16 do."""
    return 0 < high - low < LARGEST[dtype] / 4


def type_name(values: "Values") -> str:
    """The name of a type, as numpy and a grid have it."""
    return str(values.dtype).removeprefix("torch.")


def natural_order(name: str) -> list[Any]:
    """A key by which 2 comes before 10."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)] + [name]


def numbered_classes(words: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """The names of the classes of items, in their natural order, and the number of each item's class."""
    names = sorted({*words}, key=natural_order)
    numbers = {name: number for number, name in enumerate(names)}
    return tuple(names), torch.tensor([numbers[word] for word in words])


def quantise(images: Tensor) -> Tensor:
    """Images in [-1, 1] as the uint8 of a saved file: clamped, 127.5 x + 127.5, rounded. uint8 stays."""
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not bool(torch.isfinite(images).all()):
        problem = f"has dtype {images.dtype}, or NaN or infinite pixels"
        raise InputError("images", None, problem, "give floats in [-1, 1] or uint8")
    return as_stored(images, PIXELS, "uint8")


def as_stored(x: Tensor, scaling: Scaling | None, dtype: str) -> Tensor:
    """Samples in the units of the data and the type of its files; whole numbers are clipped and rounded."""
    data = x.detach().to(torch.float64 if dtype == "float64" else torch.float32)
    data = data if scaling is None else scaling.to_data(data)
    if dtype not in LARGEST:
        return data
    return data.clamp(0, LARGEST[dtype]).round().to(getattr(torch, dtype))
