"""What the numbers of a data set are: names and units of its channels, names and coordinates of its axes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nidiff.errors import FileError, InputError, printable
from nidiff.recipe import check_whole, fits

# The letters of a layout such as NCHW, without N for the items and C for the channels.
AXES = {"L": "position", "T": "time", "D": "depth", "H": "height", "W": "width", "X": "x", "Y": "y", "Z": "z"}
WHOLE_TYPES = ("uint8", "uint16")
USUAL = {1: ("position",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclass(frozen=True)
class Grid:
    """The axes and channels of items [C, *event], and the type of their numbers in files."""

    axes: tuple[str, ...]
    """A name for each axis of the event."""
    channels: tuple[str, ...] = ()
    """A name for each channel; nothing where the file has none."""
    units: tuple[str, ...] = ()
    """The unit of each channel, such as K; nothing where the file has none."""
    coordinates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers along an axis, by its name, such as degrees of latitude."""
    axis_units: Mapping[str, str] = field(default_factory=dict)
    """Their units, by the name of the axis."""
    dtype: str = "float32"
    """uint8 or uint16 if values are whole numbers from 0 to the largest; float64 where float32 would round away what
    they say, as of a large offset; else float32."""
    rate: int | None = None
    """Samples per second of a sound."""
    condition: "Grid | None" = None
    """The axes and channels of the numbers or fields that belong to each item, where a file gives them names."""

    def __post_init__(self) -> None:
        for name in ("axes", "channels", "units"):
            object.__setattr__(self, name, tuple(_clean(word) for word in getattr(self, name)))
        coordinates = {_clean(axis): tuple(values) for axis, values in self.coordinates.items()}
        object.__setattr__(self, "coordinates", coordinates)
        object.__setattr__(self, "axis_units", {_clean(axis): _clean(unit) for axis, unit in self.axis_units.items()})
        if len(self.axes) > 3 or len({*self.axes}) < len(self.axes):  # none: plain numbers, as conditions may be
            raise InputError("axes", self.axes, "are not those of a grid", "give one to three different names")
        if self.rate is not None:
            check_whole("rate", self.rate, 1, 2**31 - 1)

    @classmethod
    def usual(cls, shape: Sequence[int], dtype: str = "float32") -> "Grid":
        """The grid of items of ``shape`` [C, *event] that nothing else is known about."""
        return cls(USUAL[len(shape) - 1], dtype=dtype)

    @property
    def kind(self) -> str:
        """How items are drawn: signal, picture (whole numbers), field, volume or video."""
        if len(self.axes) == 2:
            return "picture" if self.dtype in WHOLE_TYPES else "field"
        return "signal" if len(self.axes) == 1 else "video" if self.axes[0] in ("time", "frame") else "volume"

    @property
    def floats(self) -> str:
        """The type that holds values which are not rounded."""
        return "float64" if self.dtype == "float64" else "float32"

    def check(self, shape: Sequence[int]) -> None:
        """Refuse items [C, *event] of another shape."""
        channels, *event = shape
        named = [len(words) for words in (self.channels, self.units) if words]
        along = {axis: len(values) for axis, values in self.coordinates.items()}
        sizes = dict(zip(self.axes, event, strict=False))
        if (
            len(event) != len(self.axes)
            or any(count != channels for count in named)
            or not along.items() <= sizes.items()
            or not self.axis_units.keys() <= sizes.keys()
        ):
            problem = f"are not those of items {tuple(shape)}"
            raise InputError("axes", self.axes, problem, "describe the axes, channels and coordinates of the items")

    def channel(self, index: int) -> str:
        """The name of a channel with its unit, for figures and tables."""
        name = self.channels[index] if self.channels else f"channel {index}"
        unit = self.units[index] if self.units else ""
        return f"{name} ({unit})" if unit else name

    def coarse(self, factor: int) -> "Grid":
        """The grid of means over blocks of ``factor`` points along each axis; the last has those that are left."""
        coordinates = {}
        for axis, values in self.coordinates.items():
            blocks = [values[first : first + factor] for first in range(0, len(values), factor)]
            coordinates[axis] = tuple(sum(block) / len(block) for block in blocks)
        rate = self.rate // factor if self.rate is not None and self.rate % factor == 0 else None
        return replace(self, coordinates=coordinates, rate=rate)

    def cropped(self, axes: Sequence[str]) -> "Grid":
        """The grid of parts of items, which may lie anywhere along ``axes``."""
        coordinates = {axis: values for axis, values in self.coordinates.items() if axis not in axes}
        condition = None if self.condition is None else self.condition.cropped(axes)
        return replace(self, coordinates=coordinates, condition=condition)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.condition is None:
            del values["condition"]
        return values

    @classmethod
    def from_json(cls, values: Any) -> "Grid":
        """The inverse of `to_json`, of a file that may be damaged."""
        condition = values.get("condition")
        grid = cls(**{**values, "condition": None if condition is None else cls.from_json(condition)})
        words = [values.get(name, []) for name in ("axes", "channels", "units")]
        words.append([*grid.axis_units.values()])
        numbers = [*grid.coordinates.values()]
        is_whole = fits(words, tuple[tuple[str, ...], ...]) and fits(numbers, tuple[tuple[float, ...], ...])
        if not is_whole or grid.dtype not in (*WHOLE_TYPES, "float32", "float64"):
            raise FileError("grid", values, "is not that of a model", "copy it again")
        return grid


def _clean(word: Any) -> Any:
    return printable(word) if isinstance(word, str) else word  # anything else is refused by `from_json`
