"""The units of the data: what the network sees is x, and the data are scale · x + shift, or the exponential of it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.errors import InputError, shown
from nidiff.recipe import is_number

SMALLEST = 1e-37  # float32 can divide by it
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
        for name in ("scale", "shift", "log"):
            value = getattr(self, name)
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
            value = tuple(value) if isinstance(value, list) else value  # as JSON has it
            object.__setattr__(self, name, value)
            each = value if isinstance(value, tuple) else (value,)
            if name == "log":
                if not each or not all(isinstance(one, bool) for one in each):
                    raise InputError(f"log={shown(value)} of the scaling must be true or false, or one per channel.")
            elif not each or not all(map(is_number, each)):
                raise InputError(f"{name}={shown(value)} of the scaling must be a finite number, or one per channel.")
            if name == "scale" and not all(SMALLEST < abs(v) < 1 / SMALLEST for v in each):
                raise InputError(
                    f"scale={shown(value)} of the scaling must not be 0, or too small or large to divide by."
                )

        if len({len(value) for value in (self.scale, self.shift, self.log) if isinstance(value, tuple)}) > 1:
            raise InputError("scale, shift and log of the scaling are for different numbers of channels: give as many.")

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
        each = torch.as_tensor(scale, dtype=torch.float64, device=data.device).abs().log().expand(data.shape)
        if not self.is_linear:
            each = each + torch.where(self._logs(data), self._logarithm(data), 0.0)
        return -each.flatten(1).sum(1)

    @property
    def is_linear(self) -> bool:
        """Whether no channel has a logarithm."""
        return self.log is False or (isinstance(self.log, tuple) and not any(self.log))

    def _logarithm(self, data: Tensor) -> Tensor:
        """The data, with the logarithm of the channels that have one, in float64."""
        logs, data = self._logs(data), data.double()
        if bool(((data <= 0) & logs).any()):
            raise InputError("the data have values of 0 or below, which have no logarithm: choose another scaling.")
        return torch.where(logs, data.log(), data)

    def _logs(self, x: Tensor) -> Tensor:
        logs = torch.tensor(self.log, device=x.device)
        if logs.ndim and (x.ndim < 2 or x.shape[1] != len(logs)):
            raise InputError(f"the scaling has {len(logs)} channels, but the data have shape {tuple(x.shape)}.")
        return logs.reshape(-1, *[1] * (x.ndim - 2)) if logs.ndim else logs

    def _like(self, x: Tensor) -> tuple[float | Tensor, float | Tensor]:
        if not isinstance(x, Tensor) or x.is_complex():
            raise InputError(f"the data are a {type(x).__name__}: give a tensor of real numbers.")
        dtype = _floats(x)

        def per_channel(values: Numbers) -> float | Tensor:
            if not isinstance(values, tuple):
                return values
            if x.ndim < 2 or x.shape[1] != len(values):
                raise InputError(f"the scaling has {len(values)} channels, but the data have shape {tuple(x.shape)}.")
            return torch.tensor(values, dtype=dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 2))

        return per_channel(self.scale), per_channel(self.shift)


def _floats(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32


PIXELS = Scaling(127.5, 127.5)
"""8-bit images: 0 … 255 is [−1, 1]."""
