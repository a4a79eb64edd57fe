"""Observations of items: what a mask, means over blocks or a blur leave of them, with noise.

Items and noise come in the units of the data, and an `Observation` is in those of the model.
"""

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import as_numbers
from nidiff.data.arrays import read_array
from nidiff.data.dataset import LARGEST, as_stored
from nidiff.data.formats import KINDS
from nidiff.data.load import load_items
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, known_names, one_of, shown
from nidiff.files import as_path
from nidiff.generation.loaded_model import Model
from nidiff.inverse import operators
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator
from nidiff.randomness import mixed_seed, permutation, white_noise
from nidiff.recipe import check_number, check_whole

NOT, RANDOM = "not-", "random:"
WORDS = ("left", "right", "top", "bottom", "center")
TRUE = "make it true, 1 or white where items are observed, and false, 0 or black elsewhere"
UNITS = ("data", "model")
FAR, WIDE, NARROW = 6, 30, 0.02  # of the data's standard deviation: a mean, and spreads, that are not theirs
FEWEST = 16  # values, for a mean and a spread
ROUNDING = 12**-0.5  # the standard deviation of the error of rounding to whole numbers
VARIATION, MASK, NOISE, KRIGING = 1, 2, 3, 4  # tell the randomness of one purpose from that of another


def seeded(*numbers: int) -> torch.Generator:
    """A generator that is unrelated to those of other numbers, and to those of the samples."""
    return torch.Generator().manual_seed(mixed_seed(*numbers))


# Operators ----------------------------------------------------------------------------------------------------------


def as_mask(text: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Where items [C, *event] = ``shape`` are observed, as [*event] or ``shape``: the left, right, top or bottom half,
    the center, random:0.03 for that share of the points, or where a file has ones or is white. With not- before it,
    everywhere else."""
    event, word = shape[1:], text.removeprefix(NOT)
    if word in WORDS:
        observed = _named(word, event)
    elif (share := _share(word)) is not None:
        count = max(1, round(share * math.prod(event)))
        observed = (permutation(math.prod(event), generator) < count).reshape(event)
    else:
        observed = _from_file(word, shape)
    observed = observed if word == text else ~observed
    if not bool(observed.any()):
        raise InputError("mask", text, "observes nothing", TRUE)
    return observed.contiguous()


def _named(word: str, event: tuple[int, ...]) -> Tensor:
    """A half of the last two axes, or of an only one; or the middle half of both."""
    observed = torch.zeros(event, dtype=torch.bool)
    plane = observed if len(event) > 1 else observed[None]
    height, width = plane.shape[-2:]
    if word in ("left", "right"):
        plane[..., : (width + 1) // 2] = True
    elif word in ("top", "bottom"):
        plane[..., : (height + 1) // 2, :] = True
    else:
        plane[..., height // 4 : height - height // 4, width // 4 : width - width // 4] = True
    return ~observed if word in ("right", "bottom") else observed


def _share(word: str) -> float | None:
    """0.03 of random:0.03; None for anything else."""
    try:
        share = float(word.removeprefix(RANDOM))
    except ValueError:
        return None
    return share if word.startswith(RANDOM) and 0 < share <= 1 else None


def _from_file(text: str, shape: tuple[int, ...]) -> Tensor:
    file, event = as_path("mask", text), shape[1:]
    if not file.is_file():
        raise InputError("mask", text, "is neither a file nor a known word", known_names(text, [*WORDS, "random:0.03"]))
    if file.suffix.lower() in KINDS["images"]:
        picture = load_items(file, (1, *event), argument="mask")[0, 0]
        return picture.long() > LARGEST[str(picture.dtype).removeprefix("torch.")] // 2
    values = as_numbers(read_array(file, "mask"), "mask")
    if tuple(values.shape) not in (event, (1, *event), shape) or not bool(((values == 0) | (values == 1)).all()):
        problem = f"has shape {tuple(values.shape)}, or numbers other than 0 and 1"
        raise InputError("mask", file, problem, f"give zeros and ones of shape {event}")
    return values.bool().reshape(shape if tuple(values.shape) == shape else event)


def pooling(model: Model, factor: int) -> Operator:
    """Means over blocks of ``factor`` points along each axis; the last block has those that are left."""
    _require_linear("scale", model)
    return operators.pool(check_whole("scale", factor, 2, min(model.shape[1:])))


def blurring(model: Model, width: float) -> Operator:
    """The blur by a Gaussian of the standard deviation ``width``, in pixels."""
    _require_linear("blur", model)
    if not 0 < check_number("blur", width) <= max(model.shape[1:]):
        raise InputError("blur", width, "is not a width", "give pixels, above 0 and up to the size of an item")
    return operators.blur(width, model.boundary)


def seen_scaling(model: Model, operator: Operator) -> tuple[Scaling, Operator]:
    """The scaling of y = A(data) where a scaling is not the same at every point, or items have a climatology: that of
    its channels, with A of what is added to each item; and the operator on x that makes y in these units."""
    scaling = model.scaling
    if operator.is_mask or not (scaling.is_per_pixel or scaling.means is not None):
        return scaling, operator
    if scaling.domain is not None:
        outside = white_noise((1, *model.shape), 0, device="cpu") * ~scaling.domain
        if bool(operator(outside.double()).any()):
            problem = "mixes points that are outside of the domain of the model with others"
            raise InputError("scale", None, problem, "observe points, by `mask`")
        scaling = replace(scaling, domain=None)
    axes, zero = tuple(range(1, len(model.shape))), torch.zeros(1, *model.shape, dtype=torch.float64)
    each = torch.as_tensor(scaling.scale, dtype=torch.float64)
    each = each if each.ndim > 1 else each.reshape(-1, *[1] * (len(model.shape) - 1))
    each = each.expand(model.shape)
    whole = each.square().mean(axes, keepdim=True).sqrt()
    count = 1 if scaling.means is None else len(scaling.means)
    means = operator(scaling.to_data(zero.expand(count, *model.shape)))
    return Scaling(tuple(whole.flatten().tolist()), means=means), operator @ operators.weighted(each / whole)


def _require_linear(argument: str, model: Model) -> None:
    if not model.scaling.is_linear:
        problem = "in the units of the data has no meaning for a model of their logarithm"
        raise InputError(argument, None, problem, "use `mask`, and noise in `units` model")


# Observations -------------------------------------------------------------------------------------------------------


def observe(
    model: Model,
    items: Tensor,
    operator: Operator,
    noise: float | Tensor,
    *,
    units: str = "data",
    degrade: bool = False,
    seed: int = 0,
    first: int = 0,
) -> Observation:
    """The observation of ``items`` [N, C, …] through ``operator``, with white noise of this standard deviation, a
    number, or one per entry of y, [N, C, …] or [1, C, …].

    ``items`` are y itself; means and blurred values in whole numbers have the noise of rounding besides. To
    ``degrade``, ``items`` are clean, and y = A(items) + noise of ``seed`` for items that are numbered from ``first``.
    """
    seen, operator = seen_scaling(model, operator)
    if (mask := operator.observed) is not None and (operator.is_mask or not degrade):
        if seen.domain is not None and operator.is_mask:  # there is nothing to observe elsewhere
            operator = operators.mask(mask := mask & seen.domain)
        if items.is_floating_point():  # elsewhere may be NaN: the model sees 0
            items = torch.where(mask, items, seen.to_data(torch.zeros_like(items)))
    y = to_model(items, model) if degrade else as_seen(items, seen, model)
    deviations = in_units(1.0 if isinstance(noise, Tensor) else noise, model, seen, units)
    if not (operator.is_mask or degrade or items.is_floating_point()):
        rounding = in_units(ROUNDING, model, seen, "data")
    else:
        rounding = torch.zeros_like(deviations)
    if isinstance(noise, Tensor):
        deviations, rounding = (
            each if each.ndim > 1 else each.reshape(-1, *[1] * (noise.ndim - 2)) for each in (deviations, rounding)
        )
        deviations = noise * deviations
    deviations = deviations.hypot(rounding)
    deviation: Any = deviations.flatten()[0].item()
    if bool((deviations != deviation).any()):
        shape = deviations.shape if deviations.ndim > 1 else (-1, *[1] * (len(model.shape) - 1))
        deviation = deviations.reshape(shape).to(y.device, torch.float32)
    if degrade:
        clean = operator(y)
        sources = [seeded(seed, first + item, NOISE) for item in range(len(y))]
        y = clean + deviation * white_noise(clean.shape, sources, device=y.device)
    return Observation(y, operator, deviation)


def observed_data(model: Model, observation: Observation) -> Tensor:
    """y in the units of the data, NaN where nothing was observed."""
    y, mask = observation.y.cpu(), observation.operator.observed
    y = as_stored(y, y_scaling(model, observation), model.grid.floats)
    return y if mask is None else torch.where(mask.cpu(), y, torch.nan)


def y_scaling(model: Model, observation: Observation) -> Scaling:
    """The scaling of y, by masks, blocks or a blur."""
    return seen_scaling(model, Operator(*observation.operator.parts[:1]))[0]


def check_range(model: Model, items: Tensor, name: str | Path, noise: float = 0.0, units: str = "data") -> None:
    """Warn of items whose values are far from those of the model's Gaussian, with the ``noise`` that they have: most
    often they are in another unit than the file says, or than the model's where it says none."""
    gaussian, shape = model.denoiser.gaussian, model.shape
    if gaussian is None:
        return
    variance = gaussian.covariance.marginal_variance
    mean, variance = (values.cpu().double().expand(shape).flatten(1) for values in (gaussian.mean, variance))
    centres, sizes = mean.mean(1), (variance.mean(1) + mean.var(1, correction=0)).sqrt()
    noises = torch.zeros(shape[0])
    if noise:
        noises = in_units(noise, model, model.scaling, units).reshape(shape[0], -1).square().mean(1).sqrt()
    x = to_model(items, model).double().cpu().movedim(1, 0).flatten(1)
    for channel, (values, centre, size, noisy) in enumerate(zip(x, centres, sizes, noises, strict=True)):
        known = values[values.isfinite()]
        if len(known) < FEWEST:
            continue
        middle, spread, most = known.mean(), known.std(correction=0), math.hypot(size, float(noisy))
        if (middle - centre).abs() > FAR * most or spread > WIDE * most or 0 < spread < NARROW * size:
            scale, shift = _scale_and_shift(model, channel)
            pairs = ((middle, spread), (centre, size))
            here, there = (f"{mean * scale + shift:.4g} ± {width * abs(scale):.3g}" for mean, width in pairs)
            label = model.grid.channel(channel)
            problem = f"{label} is {here} (mean ± standard deviation), and the model's data {there}"
            warnings.warn(f"{shown(str(name))}: {problem}: make sure that its unit is the model's.", stacklevel=2)


def as_change(y: Tensor, scaling: Scaling) -> Tensor:
    """Numbers in the units of the model as differences from its zero in the units of the data, where these are linear;
    of a logarithm as they are."""
    y = y.cpu().double()
    return scaling.to_data(y) - scaling.to_data(torch.zeros_like(y)) if scaling.is_linear else y


def amplitude(model: Model) -> Tensor:
    """What a change by 1 in the model is in the units of the data, at each point [C, *event]; 1 for a logarithm."""
    if not model.scaling.is_linear:
        return torch.ones(model.shape, dtype=torch.float64)
    scale = torch.as_tensor(model.scaling.scale, dtype=torch.float64)
    return (scale if scale.ndim > 1 else scale.reshape(-1, *[1] * (len(model.shape) - 1))).expand(model.shape)


def _scale_and_shift(model: Model, channel: int) -> list[float]:
    """From the units of the model to those of the data or, where the model sees it, of their logarithm."""
    values = (model.scaling.scale, model.scaling.shift)
    return [
        float(value) if isinstance(value, float | int) else float(torch.as_tensor(value[channel]).mean())
        for value in values
    ]


def in_units(noise: float, model: Model, scaling: Scaling, units: str, argument: str = "noise") -> Tensor:
    """A standard deviation in the units of the model, for each channel [C] or point [C, *event]: that of the data
    divided by the scale."""
    value, scale = check_number(argument, noise), torch.ones((), dtype=torch.float64)
    if one_of("units", units, UNITS) == "data":
        _require_linear(argument, model)
        scale = torch.as_tensor(scaling.scale, dtype=torch.float64).abs()
    return value / (scale if scale.ndim > 1 else scale.expand(model.shape[0]))


def noise_level(noise: float, model: Model, units: str, argument: str = "noise") -> Level:
    """The level of the process at which data with so much noise are a state of it."""
    deviations, schedule = in_units(noise, model, model.scaling, units, argument), model.denoiser.process.schedule
    if deviations.max() > 1.001 * deviations.min() or schedule.event_shape:
        problem = "is another level for each channel or point, or the model has other levels for every mode"
        raise InputError(argument, noise, problem, "give noise / scale, with `units` model, or use another model")
    try:
        return schedule.level_with_noise(deviations.flatten()[0].item())
    except InputError as error:
        remedy = f"{error.remedy}, in the units of the model"
        raise InputError(argument, noise, "is not a level of the model", remedy) from error


def to_model(values: Tensor, model: Model) -> Tensor:
    """Items in the units of the data as the model sees them, on its device."""
    return as_seen(values, model.scaling, model)


def as_seen(values: Tensor, scaling: Scaling, model: Model) -> Tensor:
    """Numbers in the units of the data in those of the model, on its device."""
    return scaling.to_model(values.double()).float().to(model.denoiser.device)
