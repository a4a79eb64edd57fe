"""The units of the data: what the network sees is x, and the data are scale · x + shift."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nidiff.errors import InputError, shown
from nidiff.recipe import is_number

SMALLEST = 1e-37  # float32 can divide by it
Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class Scaling:
    """data = scale · x + shift, with numbers for all channels or one number per channel of [N, C, *event]."""

    scale: Numbers
    shift: Numbers = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "shift"):
            value = getattr(self, name)
            value = value.tolist() if hasattr(value, "tolist") else value  # of numpy or torch
            value = tuple(value) if isinstance(value, list) else value  # as JSON has it
            object.__setattr__(self, name, value)
            each = value if isinstance(value, tuple) else (value,)
            if not each or not all(map(is_number, each)):
                raise InputError(f"{name}={shown(value)} of the scaling must be a finite number, or one per channel.")
            if name == "scale" and not all(SMALLEST < abs(v) < 1 / SMALLEST for v in each):
                raise InputError(
                    f"scale={shown(value)} of the scaling must not be 0, or too small or large to divide by."
                )

    def to_model(self, data: Tensor) -> Tensor:
        """x = data / scale − shift / scale, as floats."""
        scale, shift = self._like(data)
        return (data / scale).sub_(shift / scale)

    def to_data(self, x: Tensor) -> Tensor:
        """scale · (x + shift / scale), the inverse of `to_model`."""
        scale, shift = self._like(x)
        return scale * (x + shift / scale)

    def _like(self, x: Tensor) -> tuple[float | Tensor, float | Tensor]:
        if not isinstance(x, Tensor) or x.is_complex():
            raise InputError(f"the data are a {type(x).__name__}: give a tensor of real numbers.")
        dtype = x.dtype if x.is_floating_point() else torch.float32

        def per_channel(values: Numbers) -> float | Tensor:
            if not isinstance(values, tuple):
                return values
            if x.ndim < 2 or x.shape[1] != len(values):
                raise InputError(f"the scaling has {len(values)} channels, but the data have shape {tuple(x.shape)}.")
            return torch.tensor(values, dtype=dtype, device=x.device).reshape(-1, *[1] * (x.ndim - 2))

        return per_channel(self.scale), per_channel(self.shift)


PIXELS = Scaling(127.5, 127.5)
"""8-bit images: 0 … 255 is [−1, 1]."""
