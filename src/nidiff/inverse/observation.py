"""An observation y = A(x0) + n, n ~ N(0, R), and several of them as one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import check_has_numbers
from nidiff.covariance.covariance import Covariance
from nidiff.errors import TENSOR, InputError, expect, shown
from nidiff.inverse.operators import Function, Operator, Part, mask, stack
from nidiff.recipe import plain


class Observation:
    """y = A(x0) + n of images x0, in the model's units.

    Args:
        y: one row per image [B, …], or one for all [1, …].
        operator: A, of `nidiff.operators`.
        noise: the standard deviation of n, a number of 0 or more; or one per entry of a row of y; or a `Covariance`
            over the last axes of y: then it is R itself.
    """

    parts: "tuple[Observation, ...]" = ()
    """Of a `joint` one: the observations that it consists of."""

    def __init__(self, y: Tensor, operator: Operator, noise: "float | Tensor | Covariance | Blocks" = 0.0) -> None:
        expect("y", y, Tensor, TENSOR)
        check_has_numbers("y", y)
        y = y.detach()
        if operator.observed is not None:  # entries that are not observed become 0
            y = operator.parts[0].apply(y)
        if y.is_complex() or not bool(y.isfinite().all()):
            problem = "is complex, or has NaN or infinite entries that no mask covers"
            raise InputError("y", None, problem, "use a mask that is false there, or Observation.missing(y)")
        self.y, self.operator, self.noise = y if y.is_floating_point() else y.float(), operator, _as_noise(noise, y)

    @classmethod
    def missing(cls, y: Tensor, noise: float | Tensor | Covariance = 0.0) -> "Observation":
        """Images with NaN where nothing was observed."""
        return cls(y, mask(~y.isnan()), noise)

    @property
    def is_exact(self) -> bool:
        """Whether some entry was observed without noise."""
        if isinstance(self.noise, Covariance | Blocks):
            return self.noise.is_singular
        return bool((torch.as_tensor(self.noise) == 0).any())

    @property
    def is_per_image(self) -> bool:
        """Whether some mask differs from image to image."""
        if self.parts:
            return any(part.is_per_image for part in self.parts)
        masks = [part.observed for part in self.operator.parts if part.observed is not None]
        return any(observed.ndim == self.y.ndim and len(observed) > 1 for observed in masks)

    def for_images(self, index: Tensor) -> "Observation":
        """The observation of some of the images, where there is one row for each."""
        if len(self.y) == 1:
            return self
        if self.parts:
            return joint([part.for_images(index) for part in self.parts])
        parts: list[Part] = []
        for part in self.operator.parts:
            observed = part.observed
            if observed is not None and observed.ndim == self.y.ndim and len(observed) > 1:  # one per image
                parts += mask(observed[index.cpu()]).parts
            else:
                parts.append(part)
        noise = self.noise
        if isinstance(noise, Tensor) and noise.ndim == self.y.ndim and len(noise) > 1:  # one per image
            noise = noise[index.to(noise.device)].squeeze(0)
        return Observation(self.y[index.to(self.y.device)], Operator(*parts), noise)

    def check_images(self, x: Tensor) -> None:
        """Refuse images of another shape, and an operator that is not what it was declared to be."""
        y = self.operator(x)
        self.rows(y)
        self.variance(y)
        self.operator.check_transposes(x)

    def rows(self, like: Tensor) -> Tensor:
        """y, one row per image, for A(x) = ``like``."""
        y = self.y
        if y.shape[1:] != like.shape[1:] or not like.ndim or len(y) not in (1, len(like)):
            problem = f"has shape {tuple(y.shape)}, and operator={self.operator!r} makes {tuple(like.shape)}"
            raise InputError("y", None, problem, "give one row per image, or one for all, y[None]")
        return y.to(like).expand(like.shape)

    def variance(self, like: Tensor) -> Function:
        """v -> R v, for A(x) = ``like``; only between entries that are observed."""
        noise, observed = self.noise, self.operator.observed
        if isinstance(noise, Covariance):
            noise.check_trailing(tuple(like.shape[1:]), "noise")
            return lambda v: _where(observed, noise.matmul(_where(observed, v)))
        if isinstance(noise, Blocks):
            return noise.matmul
        if isinstance(noise, float):
            return lambda v: noise**2 * v
        squared = noise.to(like).square()
        return lambda v: squared * v

    def precision(self, like: Tensor) -> Function | None:
        """v -> R⁻¹ v, for A(x) = ``like``; None where some entry has no noise, or R is not diagonal."""
        if isinstance(self.noise, Covariance | Blocks) or self.is_exact:
            return None
        inverse = torch.as_tensor(self.noise).to(like).square().reciprocal()
        return lambda v: inverse.to(v) * v

    def draw_noise(self, like: Tensor, white: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """A draw of N(0, R) for A(x) = ``like``; ``white`` makes numbers of N(0, 1) of a shape."""
        noise, numbers = self.noise, white(tuple(like.shape)).to(like)
        if isinstance(noise, Covariance | Blocks):
            return _where(self.operator.observed, noise.sqrt(numbers))
        return _where(self.operator.observed, torch.as_tensor(noise).to(like) * numbers)

    def __repr__(self) -> str:
        return f"Observation(y {tuple(self.y.shape)}, {self.operator!r}, noise={shown(self.noise)})"


class Blocks:
    """R of several observations in a row [B, M], each with its own: a standard deviation, one per entry, or a
    covariance."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.observations = tuple(observations)
        self.sizes = [each.y[0].numel() for each in observations]
        self.is_singular = any(each.is_exact for each in observations)

    def matmul(self, v: Tensor) -> Tensor:
        """R v."""
        return self._apply(v, lambda each, part: each.variance(part)(part))

    def sqrt(self, v: Tensor) -> Tensor:
        """R^½ v."""

        def root(each: Observation, part: Tensor) -> Tensor:
            return each.draw_noise(part, lambda shape: part)

        return self._apply(v, root)

    def _apply(self, v: Tensor, function: Callable[[Observation, Tensor], Tensor]) -> Tensor:
        parts = v.split(self.sizes, 1)
        shaped = [part.reshape(len(v), *each.y.shape[1:]) for each, part in zip(self.observations, parts, strict=True)]
        every = [function(each, part).flatten(1) for each, part in zip(self.observations, shaped, strict=True)]
        return torch.cat(every, 1)


def joint(observations: Sequence[Observation]) -> Observation:
    """Several observations of the same images as one: its y [B, M] has their entries one after the other."""
    every = [*observations]
    if not every or not all(isinstance(each, Observation) for each in every):
        raise InputError("observation", None, "is not a list of observations", "give nidiff.Observation(y, operator)")
    if len(every) == 1:
        return every[0]
    rows = max(len(each.y) for each in every)
    if any(len(each.y) not in (1, rows) for each in every):
        counts = ", ".join(str(len(each.y)) for each in every)
        problem = f"consists of observations of {counts} images"
        raise InputError("observation", None, problem, "give one row per image, or one for all, in each")
    dtype = torch.promote_types(torch.float32, max((each.y.dtype for each in every), key=lambda kind: kind.itemsize))
    y = torch.cat([each.y.to(every[0].y.device, dtype).flatten(1).expand(rows, -1) for each in every], 1)
    operator = stack([each.operator for each in every])
    if any(each.operator.observed is not None for each in every):
        masks = [_observed(each) for each in every]
        count = max(map(len, masks))
        operator = mask(torch.cat([each.expand(count, -1) for each in masks], 1)) @ operator
    noise: Tensor | Blocks
    if any(isinstance(each.noise, Covariance | Blocks) for each in every):
        noise = Blocks(every)
    else:
        spread = [torch.as_tensor(each.noise).to(y).expand(each.y.shape).flatten(1) for each in every]
        same = not any(isinstance(each.noise, Tensor) and each.noise.ndim == each.y.ndim for each in every)
        noise = torch.cat([each[0] for each in spread] if same else [each.expand(rows, -1) for each in spread], -1)
    whole = Observation(y, operator, noise)
    whole.parts = tuple(every)
    return whole


def _observed(observation: Observation) -> Tensor:
    """Which entries of a flat y are observed: [1, M], or one row per image."""
    y, observed = observation.y, observation.operator.observed
    if observed is None:
        return torch.ones(1, y[0].numel(), dtype=torch.bool, device="cpu")
    count = len(observed) if observed.ndim == y.ndim else 1
    return observed.cpu().expand(count, *y.shape[1:]).flatten(1)


def _where(observed: Tensor | None, v: Tensor) -> Tensor:
    return v if observed is None else torch.where(observed.to(v.device), v, 0.0)


def _as_noise(noise: Any, y: Tensor) -> float | Tensor | Covariance | Blocks:
    if isinstance(noise, Covariance | Blocks):
        return noise
    deviations = torch.as_tensor(noise).detach()
    try:
        sound = bool((deviations.isfinite() & (deviations >= 0)).expand(y.shape).all())
    except RuntimeError:
        sound = False
    if not sound:
        remedy = "give a standard deviation of 0 or more, one per entry of a row of y, or a Covariance"
        raise InputError("noise", noise, f"does not fit y {tuple(y.shape)}, is negative or not finite", remedy)
    return deviations if deviations.ndim else float(plain(noise))
