"""The units of the data: what the network sees is x, and the data are scale · x + shift, or the exponential of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.precision import widest
from nidiff.recipe import is_number

SMALLEST = 1e-37  # float32 can divide by it
ENTRIES: dict[str, Callable[[Any], bool]] = {
    "scale": lambda value: is_number(value) and SMALLEST < abs(value) < 1 / SMALLEST,
    "shift": is_number,
    "log": lambda value: isinstance(value, bool),
}
Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class Scaling:
    """data = scale · x + shift, with numbers for all channels or one number per channel of [N, C, *event].

    Where ``log`` is true (for all channels, or one per channel), that is the logarithm of the data.
    """

    scale: Numbers
    shift: Numbers = 0.0
    log: bool | tuple[bool, ...] = False

    def __post_init__(self) -> None:
        channels = set()
        for name in ("scale", "shift", "log"):
            value = getattr(self, name)
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
            value = tuple(value) if isinstance(value, list) else value  # as JSON has it
            object.__setattr__(self, name, value)
            entries = value if isinstance(value, tuple) else (value,)
            channels |= {len(value)} if isinstance(value, tuple) else set()
            if not entries or len(channels) > 1 or not all(map(ENTRIES[name], entries)):
                problem = "of the scaling is out of range, or for another number of channels"
                kind = "true or false" if name == "log" else "a finite number"
                raise InputError(name, value, problem, f"give {kind}, or one per channel")

    def to_model(self, data: Tensor) -> Tensor:
        """x = data / scale − shift / scale, as floats; of log data where ``log`` is true."""
        scale, shift = self._like(data)
        if self.is_linear:
            return (data / scale).sub_(shift / scale)
        return ((self._logarithm(data) - shift) / scale).to(_floats(data))

    def to_data(self, x: Tensor) -> Tensor:
        """scale · (x + shift / scale), the inverse of `to_model`."""
        scale, shift = self._like(x)
        data = scale * (x + shift / scale)
        if self.is_linear:
            return data
        return torch.where(self._logs(x), data.exp(), data)

    def log_volume(self, data: Tensor) -> Tensor:
        """log |dx / d data| of each item: what log p(x) needs to be a density in the units of the data."""
        scale, _ = self._like(data)
        each = torch.as_tensor(scale, dtype=widest(data.device), device=data.device).abs().log().expand(data.shape)
        if not self.is_linear:
            each = each + torch.where(self._logs(data), self._logarithm(data), 0.0)
        return -each.flatten(1).sum(1)

    @property
    def is_linear(self) -> bool:
        """Whether no channel has a logarithm."""
        return self.log is False or (isinstance(self.log, tuple) and not any(self.log))

    def _logarithm(self, data: Tensor) -> Tensor:
        """The data, with the logarithm of the channels that have one, in float64 where there is."""
        logs, data = self._logs(data), data.to(widest(data.device))
        if bool(((data <= 0) & logs).any()):
            raise InputError("data", None, "has values of 0 or below, which have no logarithm", "use another scaling")
        return torch.where(logs, data.log(), data)

    def _logs(self, x: Tensor) -> Tensor:
        return _per_channel(torch.tensor(self.log, device=x.device), x)

    def _like(self, x: Tensor) -> tuple[float | Tensor, float | Tensor]:
        def like(values: Numbers) -> float | Tensor:
            if not isinstance(values, tuple):
                return values
            return _per_channel(torch.tensor(values, dtype=_floats(x), device=x.device), x)

        return like(self.scale), like(self.shift)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """One value per channel of x [N, C, ...], as something that multiplies x; a single value as it is."""
    if values.ndim and (x.ndim < 2 or x.shape[1] != len(values)):
        problem = f"has shape {tuple(x.shape)}, and the scaling is for {len(values)} channels"
        raise InputError("data", None, problem, "give [N, channels, *event]")
    return values.reshape(-1, *[1] * (x.ndim - 2)) if values.ndim else values


def _floats(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


PIXELS = Scaling(127.5, 127.5)
"""8-bit images: 0 … 255 is [−1, 1]."""
