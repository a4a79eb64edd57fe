"""A linear operator of the user's own, and the errors of an observation, as the command line is given them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.checks import as_numbers
from nidiff.data.arrays import read_array
from nidiff.data.load import load_variables
from nidiff.data.science import has_variable, is_table
from nidiff.errors import InputError, first_line
from nidiff.files import as_path
from nidiff.generation.loaded_model import Model
from nidiff.generation.observations import NOISE, amplitude, seeded
from nidiff.inverse import operators
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Operator
from nidiff.plugins import import_here
from nidiff.randomness import white_noise
from nidiff.recipe import check_number

NAMED = "give module:function, of a module in this directory or an installed one"
TAKES = "it takes items [B, C, *event] in the units of the data and returns [B, …], and must be linear"


def load_operator(text: str) -> Operator:
    """The operator that module:name is: an `Operator`, or a function of items with, perhaps, an attribute
    ``transpose``, a function of y. Importing a module runs it."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise InputError("operator", text, "is not a name", NAMED)
    try:
        found: Any = getattr(import_here(module), name)
    except (Exception, SystemExit) as error:  # it is a program
        raise InputError("operator", text, f"cannot be imported ({first_line(error)})", NAMED) from error
    if isinstance(found, Operator):
        return found
    if not callable(found):
        raise InputError("operator", text, f"is a {type(found).__name__}", f"give a function: {TAKES}")
    return operators.linear(found, getattr(found, "transpose", None))


def observe_operator(
    model: Model,
    operator: Operator,
    values: Tensor,
    noise: float | Tensor,
    *,
    text: str = "",
    degrade: bool = False,
    seed: int = 0,
) -> tuple[Observation, Tensor]:
    """The observation of items in the units of the data through a linear ``operator`` on such items, and y in its own
    units. ``values`` are y [N, …] or, to ``degrade``, the clean items [N, C, *event]; ``noise`` is the standard
    deviation of y."""
    if not model.scaling.is_linear:
        problem = "is of a model of the logarithm of the data, which is not linear in them"
        raise InputError("operator", text or None, problem, "use `mask`, and noise in `units` model")
    whole = replace(model.scaling, domain=None)
    zero = whole.to_data(torch.zeros(1, *model.shape, dtype=torch.float64).expand(_count(model), *model.shape)).float()
    each = amplitude(model)
    size = float(each.square().mean().sqrt())
    try:
        offset = operator(zero).double()
        if model.scaling.domain is not None:
            outside = white_noise((1, *model.shape), 0, device="cpu") * ~model.scaling.domain
            if bool(operator(outside).any()):
                problem = "takes points that are outside of the domain of the model"
                raise InputError("operator", text or None, problem, "give them no weight")
        y = operator(torch.where(values.isnan(), zero, values.float())).double() if degrade else values.double()
        seen = operator @ operators.weighted((each / size).float())
        seen.check_transposes(torch.zeros(1, *model.shape))
    except InputError as error:
        if error.argument == "operator":
            raise
        raise InputError("operator", text or None, f"{error.problem}", f"{error.remedy}: {TAKES}") from error
    except Exception as error:  # of a program of the user's
        problem = f"fails for items of shape {tuple(zero.shape)} ({first_line(error)})"
        raise InputError("operator", text or None, problem, TAKES) from error
    if y.shape[1:] != offset.shape[1:]:
        problem = f"has shape {tuple(y.shape)}, and the operator makes {tuple(offset.shape[1:])} of each item"
        raise InputError("file", None, problem, "give one row of that shape for each item")
    deviations = torch.as_tensor(noise, dtype=torch.float64)
    if degrade:
        sources = [seeded(seed, item, NOISE) for item in range(len(y))]
        y = y + deviations * white_noise(y.shape, sources, device="cpu")
    device = model.denoiser.device
    known: Any = (deviations / size).float().to(device) if deviations.ndim else float(deviations / size)
    if deviations.ndim == y.ndim and len(known) == 1:
        known = known[0]
    return Observation(((y - offset) / size).float().to(device), seen, known), y


def _count(model: Model) -> int:
    """How many climatologies the items have."""
    return 1 if model.scaling.means is None else len(model.scaling.means)


# Errors -------------------------------------------------------------------------------------------------------------


def read_noise(
    text: str, argument: str, shape: Sequence[int], count: int, file: Path | None, model: Model | None
) -> float | Tensor:
    """A standard deviation, a number of 0 or more; or one for each entry of ``count`` rows of y of this ``shape``,
    [1, *shape] or [N, *shape]: an array file, or a variable of NetCDF ``file`` on the grid of the ``model``. The
    argument "variance" is its square."""
    is_squared = argument == "variance"
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is not None:
        value = check_number(argument, number, 0)
        return value**0.5 if is_squared else value
    if model is not None and (found := field_of(text, argument, file, model, is_difference=not is_squared)) is not None:
        values = found.double()
    else:
        path = as_path(argument, text)
        if not path.is_file():
            remedy = "give a number, a file with one for each entry, or a variable of a NetCDF file"
            raise InputError(argument, text, "is no number, no file and no variable", remedy)
        values = as_numbers(read_array(path, argument), argument).double()
    for wanted in (values, values[None], values.movedim(-1, 1) if values.ndim > 1 else values):
        spread = _expanded(wanted, tuple(shape), count)
        if spread is not None:
            break
    else:
        problem = f"has shape {tuple(values.shape)}, and each of {count} observations has {tuple(shape)}"
        raise InputError(argument, text, problem, "give one number, or one for each entry")
    return spread.sqrt() if is_squared else spread


def _expanded(values: Tensor, shape: tuple[int, ...], count: int) -> Tensor | None:
    """Values [N or 1, *shape], where they are that, with or without an axis of one channel."""
    if values.ndim == 0 or values.numel() == 1:
        return values.reshape(1, *[1] * len(shape)).expand(1, *shape)
    for each in (values, values.unsqueeze(1)):
        if each.ndim == len(shape) + 1 and len(each) in (1, count):
            try:
                return each.expand(len(each), *shape)
            except RuntimeError:
                continue
    return None


def check_noise(noise: float | Tensor, seen: Tensor | None, argument: str, text: str) -> float | Tensor:
    """The same, refused where an entry that is ``seen`` has an error of 0 or less or none; 1 where nothing is seen."""
    if not isinstance(noise, Tensor):
        return noise
    wrong = ~(noise.isfinite() & (noise > 0))
    if seen is not None:
        noise, wrong = torch.where(wrong & ~seen, 1.0, noise), wrong & seen
    if bool(wrong.any()):
        problem = f"has an error of 0 or less, or none, in {int(wrong.sum())} of {wrong.numel()} entries"
        raise InputError(argument, text, problem, "give errors above 0")
    return noise


def field_of(
    text: str, argument: str, file: Path | None, model: Model, *, is_difference: bool = False
) -> Tensor | None:
    """Variables of the NetCDF ``file`` on the grid of the model, [N, 1 or C, *event]; None if the text names none.
    Those that are differences, such as errors, are converted to the units of the data."""
    names = text.split(",")
    if file is None or not is_table(file) or not all(has_variable(file, name) for name in names):
        return None
    return load_variables(file, names, model.shape, model.grid, argument, is_difference=is_difference)
