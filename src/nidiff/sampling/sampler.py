"""The sampling loop, once, and the names of the samplers it knows."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from nidiff.covariance.modes import largest
from nidiff.covariance.operator import check_sizes
from nidiff.diffusion.condition import check_told
from nidiff.diffusion.denoiser import Denoiser, check_denoiser
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.errors import InputError, one_of, shown
from nidiff.notation import parse_call
from nidiff.randomness import Generators, check_place, generators_from_seeds
from nidiff.recipe import KINDS, check_kinds, check_number, check_whole, fits, is_number, plain
from nidiff.sampling.ancestral import ancestral, churn, ddim
from nidiff.sampling.angle import angle, angle_2m, angle_rows, known_gaussian
from nidiff.sampling.langevin import als, cas, predictor_corrector
from nidiff.sampling.planning import planned_rows
from nidiff.sampling.repaint import repaint
from nidiff.sampling.solver import dpmpp_2m, euler, euler_maruyama, heun
from nidiff.sampling.spacing import FROM_DATA, SPACINGS, check_count, checked_rows, spaced_rows
from nidiff.sampling.step import Chain, Sampler, Spacing, Step, walk
from nidiff.sampling.tile import Tiled
from nidiff.sampling.warm import start_row

DEFAULT = "dpmpp_2m"
STARTS = ("prior", "gaussian")
AMPLIFIED = 25.0  # how far one step may magnify an error of the network before we warn


class Visit(NamedTuple):
    """What ``callback`` is given at each level, before the step that leaves it."""

    step: int  # from 1 to num_steps
    num_steps: int
    level: Level
    x: Tensor  # the state at ``level``
    x0: Tensor  # and the clean image expected from it


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    shape: Sequence[int],
    *,
    sampler: str | Sampler | Step = DEFAULT,
    num_steps: int | None = None,
    seeds: Sequence[int] | None = None,
    tile: int | None = None,
    spacing: str | Spacing | None = None,
    rows: Sequence[float] | None = None,
    start: str | Tensor | None = None,
    level: Level | float | None = None,
    bound: float | None = None,
    initial: Tensor | None = None,
    denoise: bool = True,
    callback: Callable[[Visit], None] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **options: object,
) -> Tensor:
    """Draw images of ``shape`` [B, ..., *event] from the prior down to the data.

    Args:
        sampler: a name in `SAMPLERS`, with options if you like ("ddim:eta=0.5"), or a `Sampler` or step of your own.
        num_steps: how many levels are visited. Default: the sampler's own (20 for ODE solvers, else all).
        spacing: which ones: a name in `SPACINGS`, or a function (schedule, count) -> rows. Default: the sampler's own.
            "planned" are those at which the sampler makes the least error on Gaussian data (`planned_rows`): it needs
            a denoiser that knows the data's Gaussian.
        rows: the levels themselves instead, as falling rows of the schedule.
        start: "prior", or "gaussian": begin at the first level with the Gaussian model of the data instead. That level
            is then lower, the least noisy one that loses at most ``bound``. Default: the sampler's own, the prior. Or
            noisy data y = x0 + (sigma / signal) Σ^½ eps at a ``level``: then x = signal · y is a state of the process,
            and a stochastic sampler ("ancestral") draws x0 given y, exactly as the model knows it.
        level: of y, a level or a row of the schedule: ``schedule.level_with_noise(0.3)`` for x0 + 0.3 Σ^½ eps.
        bound: nats per dimension (0.005): an upper bound of KL(x ‖ Gaussian) at that level, for any data
            (`gaussian_loss`).
        seeds: one per image: its noise then depends on its seed alone. Default: torch's global generator.
        tile: images in one call of the network. With seeds and a tile, an image has the same bits in a batch of any
            size. Default: the whole batch, whose size changes the rounding of the network, and with it the last bits.
        initial: the state at the first level instead of a draw from the prior.
        denoise: end with the expected denoised sample x̂0 of the last level (no noise is added there);
            False returns the state at the last level, noise included.
        callback: called with a `Visit` at each level.
        options: of the sampler (``variance``, ``eta``, …).
    """
    check_denoiser(denoiser)
    check_told(denoiser.conditions, denoiser.bound)
    chosen, told = as_sampler(sampler, options)
    shape, schedule = check_sizes(shape), denoiser.process.schedule
    denoiser.process.covariance.check_trailing(shape, "shape")
    check_kinds(sample, {"denoise": denoise})
    if callback is not None and not callable(callback):
        raise InputError(f"callback={shown(callback)} must be a function of a Visit, or None.")
    noisy = start if isinstance(start, Tensor) else None
    begin = "noisy" if noisy is not None else one_of("start", chosen.start if start is None else start, STARTS)
    first = _level_of(noisy, level, schedule)
    if begin == "gaussian":
        known_gaussian(denoiser, "start='gaussian'")
    if bound is not None and (begin != "gaussian" or rows is not None):
        raise InputError("bound says how low start='gaussian' begins, without rows: leave it out, or give that alone.")
    if rows is None:
        count = default_steps(chosen, schedule) if num_steps is None else num_steps
        limit = chosen.bound if bound is None else bound
        rows = _choose_rows(
            denoiser, chosen, told, count, chosen.spacing if spacing is None else spacing, begin, limit, first
        )
    elif first is not None:
        raise InputError("rows and level both say where sampling begins: give initial with rows, or start with level.")
    elif num_steps is not None:
        raise InputError("rows and num_steps both say which levels to visit: give one of the two.")
    rows = checked_rows(schedule, rows)
    levels = [schedule.level(row) for row in rows]
    place: dict[str, Any] = {"dtype": dtype, "device": denoiser.device if device is None else device}
    check_place(**place)
    denoiser.check_levels(dtype, rows)
    _warn_of_amplification(denoiser, levels)
    levels += levels[-1:] if chosen.settles else []
    if tile is not None:
        denoiser = denoiser.with_net(Tiled(denoiser.net, tile))
    source: Generators = None
    if seeds is not None:
        seeds = plain(seeds)
        seeds = [*seeds] if isinstance(seeds, Iterable) else [seeds]
        if not shape or len(seeds) != shape[0]:
            raise InputError(f"seeds has {len(seeds)} entries for shape={shape}: give one per image.")
        source = generators_from_seeds(seeds)
    if initial is not None and begin != "prior":
        raise InputError("initial and start both say where sampling begins: give one of the two.")
    if noisy is not None:
        x = levels[0].signal * _given_state("start", noisy, shape, place)
    elif initial is not None:
        x = _given_state("initial", initial, shape, place)
    else:
        x = _first_state(denoiser, shape, source, levels[0], begin, place)
    chain = Chain(denoiser, lambda: denoiser.process.noise(shape, source, **place))
    visit = None if callback is None else _telling(callback, len(levels))
    return walk(chain, x, levels, chosen, told, denoise=denoise, visit=visit)


def _choose_rows(
    denoiser: Denoiser,
    sampler: Sampler,
    options: dict[str, Any],
    count: int,
    spacing: str | Spacing,
    start: str,
    bound: float | None,
    begin: float | None = None,
) -> list[Any]:
    """``count`` rows: from ``begin`` on, or, with a warm start, from the row at which that loses no more than
    ``bound``. Where fewer rows are left than that, all of these."""
    process, gaussian, first = denoiser.process, denoiser.gaussian, len(denoiser.process.schedule) - 1
    count = check_count(process.schedule, count)
    if begin is not None:
        first = math.floor(begin)
        count = min(count, first + 1)
    elif start == "gaussian" and gaussian is not None:
        first = max(start_row(process, gaussian, bound), count - 1)
    if spacing not in FROM_DATA:
        rows: list[Any] = spaced_rows(
            process.schedule if start == "prior" else process.schedule.below(first), count, spacing
        )
    else:
        gaussian = known_gaussian(denoiser, f"spacing={spacing!r}")
        if spacing == "angle" or sampler.finishes:  # which makes no error on Gaussian data, wherever it steps
            rows = angle_rows(process, gaussian, count, first)
        else:
            law = "prior" if start == "prior" else "gaussian"  # of noisy data, too
            rows = planned_rows(process, gaussian, sampler, options, count, start=law, first=first)
    return rows if begin is None else [begin, *rows[1:]]


def _level_of(noisy: Tensor | None, level: Level | float | None, schedule: Schedule) -> float | None:
    """The row at which noisy data are a state of the process."""
    if (noisy is None) != (level is None):
        raise InputError("start=y and level say together where noisy data are: give both, or neither.")
    if level is None:
        return None
    row = level.label if isinstance(level, Level) else plain(level)
    if not is_number(row):
        raise InputError(f"level={shown(level)} must be a level of the schedule, or its row.")
    if not 0 <= row <= len(schedule) - 1:
        raise InputError(f"level={shown(level)} does not exist: the rows of the schedule are 0 … {len(schedule) - 1}.")
    return float(row)


def _given_state(argument: str, x: Any, shape: tuple[int, ...], place: dict[str, Any]) -> Tensor:
    """A tensor of the user's that is to be the first state."""
    if not isinstance(x, Tensor) or x.is_complex():
        raise InputError(f"{argument} is a {type(x).__name__}: give a real tensor, such as torch.from_numpy(array).")
    if tuple(x.shape) != shape:
        raise InputError(f"{argument} has shape {tuple(x.shape)}, but shape={shape}: they must be equal.")
    if not bool(x.isfinite().all()):
        raise InputError(f"{argument} has NaN or infinite values: fill them in first.")
    return x.to(**place)


def _first_state(
    denoiser: Denoiser, shape: tuple[int, ...], source: Generators, first: Level, start: str, place: dict[str, Any]
) -> Tensor:
    process = denoiser.process
    if start == "prior" or denoiser.gaussian is None:
        return process.prior(shape, source, **place)
    return denoiser.gaussian.sample(shape, source, level=first, noise=process.covariance, **place)


def _telling(callback: Callable[[Visit], None], count: int) -> Callable[[int, Level, Tensor, Tensor], None]:
    return lambda index, level, x, x0: callback(Visit(index + 1, count, level, x, x0))


def rehearse(denoiser: Denoiser, shape: Sequence[int], **arguments: Any) -> list[str]:
    """Draw one image of ``shape`` [...] with a network that says 0: what `sample` would refuse is refused, quickly, and
    what it would warn of is returned.

    So is a schedule with a level at which training overflows, and one whose images are not finite.
    """
    if isinstance(denoiser, Denoiser):  # else `sample` says so
        denoiser.check_levels(torch.float32)
        denoiser = denoiser.silenced().for_images(torch.tensor([0], device="cpu"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        image = sample(denoiser, (1, *check_sizes(shape)), seeds=[0], device="cpu", **arguments)
    if not bool(image.isfinite().all()):
        schedule = denoiser.process.schedule
        raise InputError(f"schedule={schedule!r} ends in NaN or infinite pixels: use one of a narrower range.")
    return [str(one.message) for one in said]


def as_sampler(sampler: str | Sampler | Step, options: dict[str, Any] | None = None) -> tuple[Sampler, dict[str, Any]]:
    """The sampler and its options, those written in its text (``NAME:key=value,…``) included; both are checked."""
    options = {key: plain(value) for key, value in (options or {}).items()}
    name = getattr(sampler, "__name__", sampler)
    if isinstance(sampler, str):
        name, written = parse_call("sampler", sampler)
        options = written | options
        chosen = SAMPLERS[one_of("sampler", name, SAMPLERS)]
        if "spacing" in options:
            chosen = chosen._replace(spacing=one_of("spacing", options.pop("spacing"), [*SPACINGS, *FROM_DATA]))
        if "start" in options:
            chosen = chosen._replace(start=one_of("start", options.pop("start"), STARTS))
        if "bound" in options:
            chosen = chosen._replace(bound=check_number("bound", options.pop("bound")))
    else:
        chosen = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
    kinds: dict[str, Any] = {}
    with contextlib.suppress(NameError, TypeError):  # a step may be an object, or have annotations nobody can resolve
        kinds = get_type_hints(chosen.step)
    if not callable(chosen.step):
        raise InputError(f"sampler={shown(sampler)} must be a name in SAMPLERS, a Sampler, or a step.")
    try:
        parameters = [*signature(chosen.step).parameters.values()][5:]  # after (chain, x, x0, here, there)
    except ValueError as error:  # a function written in C has none
        raise InputError(f"sampler={shown(sampler)} is not a step: write one as a Python function.") from error
    anything, known = any(p.kind is Parameter.VAR_KEYWORD for p in parameters), [p.name for p in parameters]
    for key, value in options.items():
        if key not in known and not anything:
            raise InputError(f"{key} is not an option of sampler={name!r}: it takes {', '.join(known) or 'none'}.")
        if key in kinds and not fits(value, kinds[key]):
            remedy = f"must be {KINDS[kinds[key]]}" if kinds[key] in KINDS else "has the wrong type: correct it"
            raise InputError(f"{key}={shown(value)} of sampler={name!r} {remedy}.")
        if kinds.get(key) is float and not is_number(value):
            raise InputError(f"{key}={shown(value)} of sampler={name!r} must be {KINDS[float]}.")
    try:
        signature(chosen.step).bind(*[None] * 5, **options)
    except TypeError as error:
        problem = f"cannot be called with (chain, x, x0, here, there) and its options ({error})"
        raise InputError(f"sampler={shown(name)} {problem}: correct it.") from error
    if chosen.num_steps is not None:
        check_whole("num_steps", chosen.num_steps)
    return chosen, options


def default_steps(sampler: Sampler, schedule: Schedule) -> int:
    """How many levels the sampler visits if nothing is said."""
    return len(schedule) if sampler.num_steps is None else min(sampler.num_steps, len(schedule))


def _warn_of_amplification(denoiser: Denoiser, levels: list[Level]) -> None:
    """x̂0 = a x + b · output: without clipping, the first step carries |b| signal' times the network's error on.

    A single step ends with x̂0 itself, where the signal is 1.
    """
    if denoiser.clip is not None:
        return
    b = denoiser.target.coefficients(levels[0].signal, levels[0].sigma)[1]
    factor = largest(b * (levels[1].signal if len(levels) > 1 else 1.0)).item()
    if factor > AMPLIFIED and denoiser.process.schedule.keeps == "variance":
        warnings.warn(
            f"clip=None with target {denoiser.target_name!r} multiplies an error of the network by {factor:,.0f} in "
            f"the first step, since the noisiest level has a signal of {largest(levels[0].signal).item():.1g}: pass "
            "clip (1.0 for images in [−1, 1]), train with target 'v' or 'x0', or use a schedule with more signal.",
            stacklevel=4,
        )


# A solver of the ODE needs few steps, and gains nothing from a last level so near the clean image that x̂0 there is x.
SAMPLERS: dict[str, Sampler] = {
    "ancestral": Sampler(ancestral),
    "ddim": Sampler(ddim, "trailing", 20),
    "churn": Sampler(churn),
    "euler": Sampler(euler, "trailing", 20),
    "heun": Sampler(heun, "trailing", 20),
    "dpmpp_2m": Sampler(dpmpp_2m, "trailing", 20),
    "angle": Sampler(angle, "angle", 10, finishes=True),
    "angle_2m": Sampler(angle_2m, "angle", 10, finishes=True),
    "euler_maruyama": Sampler(euler_maruyama),
    "als": Sampler(als, settles=True),
    "cas": Sampler(cas),
    "pc": Sampler(predictor_corrector),
    "repaint": Sampler(repaint, num_steps=100),
}
