"""The units of the data: what the network sees is x, and the data are scale · x + shift, or the exponential of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nidiff.diffusion.climatology import Climatology, Times
from nidiff.errors import InputError
from nidiff.precision import widest
from nidiff.recipe import is_number

SMALLEST = 1e-37  # float32 can divide by it
ENTRIES: dict[str, Callable[[Any], bool]] = {
    "scale": lambda value: is_number(value) and SMALLEST < abs(value) < 1 / SMALLEST,
    "shift": is_number,
    "log": lambda value: isinstance(value, bool),
}
SOUND_FIELDS: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda field: field.isfinite() & (field.abs() > SMALLEST) & (field.abs() < 1 / SMALLEST),
    "shift": torch.isfinite,
}
FIELDS = ("scale", "shift", "domain")  # what may be one for each point
Numbers = float | tuple[float, ...] | Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """data = scale · x + shift, with numbers for all channels, one number per channel of [N, C, *event], or one for
    each point, [C, *event].

    Where ``log`` is true (for all channels, or one per channel), that is the logarithm of the data.
    """

    scale: Numbers
    shift: Numbers = 0.0
    log: bool | tuple[bool, ...] = False
    climatology: Climatology | None = None
    """What is taken from the data and put back, where their times are known (`at_times`); else they are differences
    from it."""
    domain: Tensor | None = None
    """Where data exist, [C, *event]; elsewhere x is 0 and data are NaN. None: everywhere."""
    means: Tensor | None = None
    """What is added to each of N items, or to all, [N, C, *event]: the climatology `at_times`. It is never stored."""

    def __post_init__(self) -> None:
        channels = set()
        for name, is_sound in ENTRIES.items():
            value = getattr(self, name)
            if name in SOUND_FIELDS and getattr(value, "ndim", 0) > 1:
                field = torch.as_tensor(value).detach().cpu().double()
                if not bool(SOUND_FIELDS[name](field).all()):
                    raise InputError(name, None, "of the scaling is out of range at a point", "give finite numbers")
                object.__setattr__(self, name, field)
                continue
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
            value = tuple(value) if isinstance(value, list) else value  # as JSON has it
            object.__setattr__(self, name, value)
            entries = value if isinstance(value, tuple) else (value,)
            channels |= {len(value)} if isinstance(value, tuple) else set()
            if not entries or len(channels) > 1 or not all(map(is_sound, entries)):
                problem = "of the scaling is out of range, or for another number of channels"
                kind = "true or false" if name == "log" else "a finite number"
                raise InputError(name, value, problem, f"give {kind}, or one per channel")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scaling):
            return NotImplemented
        (mine, arrays), (its, others) = (scaling.to_json() for scaling in (self, other))
        return mine == its and all(_are_equal(array, others[name]) for name, array in arrays.items())

    def __hash__(self) -> int:
        return hash(str(self.to_json()[0]))

    def to_json(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The scaling as JSON, without what it has not, and the arrays that this names."""
        arrays = {name: value for name in FIELDS if isinstance(value := getattr(self, name), Tensor)}
        values = {name: {"tensor": name} if name in arrays else getattr(self, name) for name in ("scale", "shift")}
        if not self.is_linear:
            values["log"] = self.log
        if self.domain is not None:
            values["domain"] = {"tensor": "domain"}
        if self.climatology is not None:
            arrays["climatology"] = self.climatology.means
            values["climatology"] = {"by": self.climatology.by, "means": {"tensor": "climatology"}}
        return values, arrays

    @classmethod
    def from_json(cls, values: Mapping[str, Any], arrays: Mapping[str, Tensor] | None = None) -> "Scaling":
        """The inverse of `to_json`."""
        arrays = arrays or {}
        parts: dict[str, Any] = {
            name: arrays[value["tensor"]] if isinstance(value, Mapping) and "tensor" in value else value
            for name, value in values.items()
        }
        if parts.get("climatology") is not None:
            parts["climatology"] = Climatology.from_json(parts["climatology"], arrays)
        return cls(**parts)

    def to_model(self, data: Tensor) -> Tensor:
        """x = data / scale − shift / scale, as floats; of log data where ``log`` is true."""
        scale, shift = self._like(data)
        dtype, data = _floats(data), self._plus(self._inside(data, 1.0), -1)  # which has a logarithm
        x = (data / scale).sub_(shift / scale) if self.is_linear else ((self._logarithm(data) - shift) / scale)
        return self._inside(x.to(dtype), 0.0)

    def to_data(self, x: Tensor) -> Tensor:
        """scale · (x + shift / scale), the inverse of `to_model`."""
        scale, shift = self._like(x)
        data = scale * (x + shift / scale)
        data = data if self.is_linear else torch.where(self._logs(x), data.exp(), data)
        return self._inside(self._plus(data, 1), torch.nan)

    def log_volume(self, data: Tensor) -> Tensor:
        """log |dx / d data| of each item: what log p(x) needs to be a density in the units of the data."""
        scale, wide = self._like(data, widest(data.device))[0], widest(data.device)
        each = torch.as_tensor(scale, dtype=wide, device=data.device).abs().log().expand(data.shape)
        if not self.is_linear:
            each = each + torch.where(self._logs(data), self._logarithm(self._inside(data, 1.0)), 0.0)
        return -self._inside(each, 0.0).flatten(1).sum(1)

    @property
    def is_linear(self) -> bool:
        """Whether no channel has a logarithm."""
        return self.log is False or (isinstance(self.log, tuple) and not any(self.log))

    @property
    def is_per_pixel(self) -> bool:
        """Whether it differs from point to point, so that items cannot be moved, mirrored, or made on another grid."""
        fields = (self.scale, self.shift, self.domain)
        return self.climatology is not None or any(isinstance(field, Tensor) for field in fields)

    @property
    def anomalies(self) -> str:
        """What data without times are, in words; nothing where a scaling takes no climatology away."""
        return "" if self.climatology is None else f"differences from the {self.climatology.name}"

    def at_times(self, times: "Times | None") -> "Scaling":
        """The scaling of items of these times, in this order; without ``times``, that of differences from the
        climatology."""
        if self.climatology is None or times is None:
            return self
        return replace(self, climatology=None, means=self.climatology.at(times))

    def repeated(self, count: int) -> "Scaling":
        """The scaling where each item comes so many times, one after the other."""
        single = self.means is None or len(self.means) == 1
        return self if single else replace(self, means=self.means.repeat_interleave(count, 0))  # type: ignore[union-attr]

    def _logarithm(self, data: Tensor) -> Tensor:
        """The data, with the logarithm of the channels that have one, in float64 where there is."""
        logs, data = self._logs(data), data.to(widest(data.device))
        if bool(((data <= 0) & logs).any()):
            raise InputError("data", None, "has values of 0 or below, which have no logarithm", "use another scaling")
        return torch.where(logs, data.log(), data)

    def _logs(self, x: Tensor) -> Tensor:
        return _per_channel(torch.tensor(self.log, device=x.device), x)

    def _like(self, x: Tensor, dtype: torch.dtype | None = None) -> tuple[float | Tensor, float | Tensor]:
        def like(values: Numbers) -> float | Tensor:
            if isinstance(values, Tensor):
                return _per_point(values, x).to(x.device, dtype or _floats(x))
            if not isinstance(values, tuple):
                return values
            return _per_channel(torch.tensor(values, dtype=dtype or _floats(x), device=x.device), x)

        return like(self.scale), like(self.shift)

    def _plus(self, data: Tensor, sign: int) -> Tensor:
        """The data with the climatology of each item, or without it."""
        if self.means is None:
            return data
        if self.means.shape[1:] != data.shape[1:] or len(self.means) not in (1, len(data)):
            problem = f"has shape {tuple(data.shape)}, and the times are those of {tuple(self.means.shape)}"
            raise InputError("data", None, problem, "give a time for each item")
        return data + sign * self.means.to(data.device, data.dtype if data.is_floating_point() else widest(data.device))

    def _inside(self, x: Tensor, other: float) -> Tensor:
        return x if self.domain is None else torch.where(_per_point(self.domain, x).to(x.device), x, other)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel of x [N, C, ...], as something that multiplies x; a single value as it is."""
    if values.ndim and (x.ndim < 2 or x.shape[1] != len(values)):
        problem = f"has shape {tuple(x.shape)}, and the scaling is for {len(values)} channels"
        raise InputError("data", None, problem, "give [N, channels, *event]")
    return values.reshape(-1, *[1] * (x.ndim - 2)) if values.ndim else values


def _per_point(field: Tensor, x: Tensor) -> Tensor:
    """A field [C, *event] for items x [N, C, *event] on its grid."""
    if x.shape[1:] != field.shape:
        problem = f"has shape {tuple(x.shape)}, and the scaling has numbers for every point of {tuple(field.shape)}"
        raise InputError("data", None, problem, "give items on that grid")
    return field


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is one too


def _floats(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


PIXELS = Scaling(127.5, 127.5)
"""8-bit images: 0 … 255 is [−1, 1]."""
