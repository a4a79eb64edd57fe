"""What the numbers of a data set are: names and units of its channels, names and coordinates of its axes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nidiff.errors import InputError, shown
from nidiff.recipe import fits, is_number

# The letters of a layout such as NCHW, without N for the items and C for the channels.
AXES = {"L": "position", "T": "time", "D": "depth", "H": "height", "W": "width", "X": "x", "Y": "y", "Z": "z"}
USUAL = {1: ("position",), 2: ("height", "width"), 3: ("depth", "height", "width")}
STORED = ("uint8", "uint16", "float32")
MOST_COORDINATES = 10**6


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
    """uint8 or uint16 if values are whole numbers from 0 to the largest, else float32."""
    rate: int | None = None
    """Samples per second of a sound."""

    def __post_init__(self) -> None:
        for name in ("axes", "channels", "units"):
            words = tuple(getattr(self, name))
            object.__setattr__(self, name, words)
            if not all(isinstance(word, str) for word in words):
                raise InputError(f"{name}={shown(words)} of the grid must be words.")
        numbers = {axis: tuple(values) for axis, values in self.coordinates.items()}
        object.__setattr__(self, "coordinates", numbers)
        object.__setattr__(self, "axis_units", dict(self.axis_units))
        if not 1 <= len(self.axes) <= 3 or len({*self.axes}) < len(self.axes):
            raise InputError(f"axes={shown(self.axes)} of the grid must be one to three different names.")
        if self.dtype not in STORED:
            raise InputError(f"dtype={shown(self.dtype)} of the grid must be one of {', '.join(STORED)}.")
        if self.rate is not None and not (fits(self.rate, int) and 0 < self.rate < 2**31):
            raise InputError(f"rate={shown(self.rate)} of the grid must be a positive whole number.")
        for axis, values in numbers.items():
            if axis not in self.axes or len(values) > MOST_COORDINATES or not all(map(is_number, values)):
                raise InputError(f"coordinates of {shown(axis)} must be finite numbers along one of {self.axes}.")
        if not all(axis in self.axes and isinstance(unit, str) for axis, unit in self.axis_units.items()):
            raise InputError(f"axis_units={shown(self.axis_units)} of the grid must be words by the names of its axes.")

    @classmethod
    def usual(cls, shape: Sequence[int], dtype: str = "float32") -> "Grid":
        """The grid of items of ``shape`` [C, *event] that nothing else is known about."""
        return cls(USUAL[len(shape) - 1], dtype=dtype)

    @property
    def kind(self) -> str:
        """How items are drawn: signal, picture (whole numbers), field, volume or video."""
        if len(self.axes) == 2:
            return "field" if self.dtype == "float32" else "picture"
        return "signal" if len(self.axes) == 1 else "video" if self.axes[0] in ("time", "frame") else "volume"

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
        ):
            raise InputError(f"the grid of {self.axes} is not that of items {tuple(shape)}: describe their own axes.")

    def channel(self, index: int) -> str:
        """The name of a channel with its unit, for figures and tables."""
        name = self.channels[index] if self.channels else f"channel {index}"
        unit = self.units[index] if self.units else ""
        return f"{name} ({unit})" if unit else name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Grid":
        """The inverse of `to_json`, of a file that may be damaged."""
        kinds = {"axes": list, "channels": list, "units": list, "coordinates": dict, "axis_units": dict, "dtype": str}
        known = {one.name for one in fields(cls)}
        if not isinstance(values, Mapping) or not {"axes"} <= values.keys() <= known:
            raise InputError(f"the grid must have axes, and nothing but {', '.join(sorted(known))}.")
        for key, kind in kinds.items():
            if key in values and not isinstance(values[key], kind):
                raise InputError(f"{key}={shown(values[key])} of the grid has the wrong type.")
        if not all(isinstance(one, list) for one in values.get("coordinates", {}).values()):
            raise InputError("coordinates of the grid must be lists of numbers.")
        return cls(**values)
