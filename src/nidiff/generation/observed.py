"""What is seen of items, through masks, in means over blocks or blurred, and samples of what they were given that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import Scaling
from nidiff.errors import InputError
from nidiff.generation.opened import Model, boundaries
from nidiff.generation.restoration import Plan, Restoration, draw, seeded, to_model
from nidiff.inverse import operators as op
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator
from nidiff.inverse.posterior import posterior
from nidiff.randomness import white_noise
from nidiff.recipe import check_number, check_whole
from nidiff.sampling.sampler import Visit

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MASK, NOISE = 2, 3  # tell the randomness of one purpose from that of another


class View(NamedTuple):
    """How each item is seen: an operator for each and, of masks, which points, [N, C, *event]."""

    operators: Sequence[Operator]
    masks: Tensor | None = None


def through(masks: Tensor) -> View:
    return View([op.mask(one) for one in masks], masks)


def averaged(model: Model, factor: int, count: int) -> View:
    """Means over blocks of ``factor`` points along each axis."""
    coarse_event(model, factor)
    return View([op.pool(factor)] * count)


def blurred(model: Model, width: float, count: int) -> View:
    """Blurred by a Gaussian of the standard deviation ``width``, in pixels."""
    _require_linear("blur", model)
    if not 0 < check_number("blur", width) <= max(model.shape[1:]):
        raise InputError(f"blur={width} must be a width in pixels, above 0 and below the size of an item.")
    return View([op.blur(width, boundaries(model.denoiser, len(model.shape) - 1))] * count)


def coarse_event(model: Model, factor: int) -> tuple[int, ...]:
    """The event shape of means over blocks."""
    _require_linear("scale", model)
    factor, event = check_whole("scale", factor, 2), model.shape[1:]
    if any(size % factor for size in event):
        raise InputError(f"scale={factor} does not divide the model's {tuple(event)}: give a number that does.")
    return tuple(size // factor for size in event)


def _require_linear(argument: str, model: Model) -> None:
    if model.denoiser.scaling is not None and not model.denoiser.scaling.is_linear:
        raise InputError(f"{argument} has no meaning where the model sees the logarithm of the data: use mask=.")


@dataclass(frozen=True, eq=False)
class Observed:
    """``y`` [N, C, …] in the units of the model, of items seen through a ``view`` and with ``noise``; ``truth`` has the
    items themselves in the units of the data, where they are known."""

    model: Model
    y: Tensor
    view: View
    noise: float | Tensor
    truth: Tensor | None

    @property
    def data(self) -> Tensor:
        """y in the units of the data, NaN where nothing was seen."""
        y = (self.model.denoiser.scaling or Scaling(1.0)).to_data(self.y.cpu())
        return y if self.view.masks is None else torch.where(self.view.masks, y, torch.nan)

    def restored(self, x: Tensor, seeds: "NDArray[np.int64]") -> Restoration:
        """Samples x [N, S, C, *event] of what was observed."""
        hidden = None if self.view.masks is None else ~self.view.masks
        return Restoration(x, seeds, self.data, self.model.grid, self.model.denoiser.scaling, self.truth, hidden)


def observe(
    model: Model, items: Tensor, view: View, noise: Sequence[float], *, degrade: bool = False, seed: int = 0
) -> Observed:
    """``items`` [N, C, …] in the units of the data as they were observed, with ``noise`` in the units of the model per
    channel; or, to ``degrade``, clean ones as they will be, with noise of ``seed``."""
    y = to_model(_filled(items, view.masks, model.denoiser.scaling or Scaling(1.0)), model)
    deviation: Any = noise[0]
    if len({*noise}) > 1:
        deviation = torch.tensor(noise, device=y.device).reshape(-1, *[1] * (len(model.shape) - 1))
    if not degrade:
        return Observed(model, y, view, deviation, None)
    clean = torch.stack([view.operators[item](y[item : item + 1])[0] for item in range(len(y))])
    sources = [seeded(seed, item, NOISE) for item in range(len(y))]
    y = clean + deviation * white_noise(clean.shape, sources, device=y.device)
    return Observed(model, y, view, deviation, items.float())


def restore(
    seen: Observed, plan: Plan, method: str | None = None, watch: Callable[[Visit], None] | None = None
) -> Restoration:
    """Samples of each item given what was observed; ``method`` is that of `nidiff.posterior`."""
    denoiser = plan.denoiser(seen.model)
    given: dict[int, Denoiser] = {}

    def prepare(item: int, seeds: list[int]) -> tuple[Denoiser, dict[str, Any]]:
        if item not in given:
            given.clear()
            observation = Observation(seen.y[item : item + 1], seen.view.operators[item], seen.noise)
            given[item] = posterior(denoiser, observation, method)
        return given[item], {}

    return seen.restored(*draw(seen.model, plan, len(seen.y), prepare, "restoring", watch))


def _filled(items: Tensor, masks: Tensor | None, scaling: Scaling) -> Tensor:
    """What no mask sees may be NaN, or have no logarithm: there, the data that the model sees as 0."""
    if masks is None or not items.is_floating_point():
        return items
    return torch.where(masks, items, scaling.to_data(torch.zeros_like(items)))
