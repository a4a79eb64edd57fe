"""`sample` and the parts it consists of, and the names of the samplers."""

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any, get_type_hints

import torch
from torch import Tensor

from nidiff.covariance.checks import check_finite, check_sizes
from nidiff.covariance.modes import Modes
from nidiff.diffusion.condition import CLASSES, check_not_missing
from nidiff.diffusion.denoiser import Denoiser, check_denoiser, require_gaussian
from nidiff.diffusion.schedule import Level, Schedule
from nidiff.diffusion.spacing import ANGLE, SPACINGS, Spacing, check_rows, spaced_rows
from nidiff.errors import InputError, expect, one_of
from nidiff.notation import parse_call
from nidiff.precision import widest
from nidiff.randomness import Generators, as_generator, check_place, white_noise
from nidiff.recipe import check_number, check_whole, fits, plain
from nidiff.sampling.ancestral import ancestral, churn, ddim, diffpir, repaint
from nidiff.sampling.angle import angle, angle_2m, angle_rows
from nidiff.sampling.langevin import als, cas, predictor_corrector
from nidiff.sampling.local import dpmpp_2m, gaussian_2m
from nidiff.sampling.rescale import PILOT_SEED, PILOTS, Measured, check_rescale, factors_of, rescaled
from nidiff.sampling.solver import euler, euler_maruyama, heun, ipndm
from nidiff.sampling.step import After, Chain, Sampler, Step, Visit, remembered, run_chain
from nidiff.sampling.tile import Tiled
from nidiff.sampling.warm import MAX_LOSS, STARTS, check_start, start_row

DEFAULT = "dpmpp_2m"
AMPLIFIED = 25.0  # how far one step may magnify an error of the network before we warn
FAR = 20.0  # standard deviations of the data, as the root mean square of an image, beyond which we warn


class Diverged(InputError):
    """Sampling ended in images that are not finite."""


class FarOut(UserWarning):
    """Sampling ended far outside of the data."""


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    shape: Sequence[int],
    *,
    sampler: str | Sampler | Step | None = None,
    num_steps: int | None = None,
    spacing: str | Spacing | Sequence[float] | None = None,
    start: str | Tensor | None = None,
    level: Level | float | None = None,
    max_loss: float | None = None,
    generator: Generators = None,
    tile: int | None = None,
    denoise: bool = True,
    callback: Callable[[Visit], None] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **options: object,
) -> Tensor:
    """Draw images of ``shape`` [B, ..., *event] from the prior down to the data: `Schedule.levels`, `Process.prior` and
    `walk`, with conveniences.

    Args:
        sampler: a name in `SAMPLERS`, with options if you like ("ddim:eta=0.5"), or a `Sampler` or step of your own.
            Default: what `nidiff.metrics.tune` has chosen for this model and ``num_steps`` evaluations, if only these
            are given; else "dpmpp_2m".
        num_steps: how many levels are visited. Default: the sampler's own (20 for ODE solvers, else all).
        spacing: which ones: a name in `SPACINGS`, a function (schedule, count) -> rows, or the falling rows of the
            schedule themselves. "angle" needs a denoiser that knows the data's Gaussian. Default: the sampler's own.
        start: "prior", the default of most; "gaussian" or "mixture", those models of the data at the least noisy level
            that loses at most ``max_loss``, the mixture by the class of each image where both have classes; or a
            tensor: the state at the first level or, with ``level``, noisy data y = x0 + (sigma / signal) Σ^½ eps, of
            which a stochastic sampler draws x0 given y: of Gaussian data, "ancestral:variance=gaussian" in any number
            of steps, and plain "ancestral" only as steps grow.
        level: at which to begin, a level or a row of the schedule; of y, ``schedule.level_with_noise(0.3)`` is that of
            x0 + 0.3 Σ^½ eps.
        max_loss: KL(x ‖ model) at the first level, in nats per dimension, as `nidiff.design.start_loss` has it.
        generator: None (torch's global one), a seed or a torch.Generator; or a list with one seed or generator per
            image, whose noise then depends on it alone.
        tile: images in one call of the network. With a generator per image and a tile, an image has the same bits in a
            batch of any size. Default: the whole batch, whose size changes the rounding of the network.
        denoise: end with the expected clean image x̂0 of the last level (no noise is added there);
            False returns the state at the last level, noise included.
        callback: called with a `Visit` at each level.
        options: of the sampler (``variance``, ``eta``, …); or ``rescale=True``, which gives every mode its known
            variance after each step (`nidiff.sampling.rescale`).
    """
    check_denoiser(denoiser)
    check_not_missing(denoiser.conditions, denoiser.condition_values)
    if sampler is None:
        is_plain = not options and all(each is None for each in (spacing, start, level, max_loss))
        choice = denoiser.choice_for(num_steps) if is_plain else None
        sampler, num_steps = (DEFAULT, num_steps) if choice is None else (choice.sampler, choice.num_steps)
    chosen, step_options = as_sampler(sampler, options)
    shape, schedule = check_sizes(shape), denoiser.process.schedule
    denoiser.process.covariance.check_trailing(shape, "shape")
    place: dict[str, Any] = {"dtype": dtype, "device": denoiser.device if device is None else device}
    check_place(**place)
    begin = "state" if isinstance(start, Tensor) else one_of("start", start or chosen.start, STARTS)
    if begin != "state":
        check_start(denoiser, begin)
    if chosen.rescale:
        check_rescale(denoiser)
        if begin == "state":
            raise InputError("rescale", True, "needs to know how x was drawn", "leave out `start`, or `rescale`")
    spacing = chosen.spacing if spacing is None else spacing
    by_rows = not isinstance(spacing, str) and not callable(spacing)
    for name, value, is_used in (
        ("level", level, begin != "prior" and not by_rows),
        ("max_loss", max_loss, begin not in ("prior", "state") and not by_rows and level is None),
        ("num_steps", num_steps, not by_rows),
    ):
        if value is not None and not is_used:
            raise InputError(name, None, "is not used with this `start` and `spacing`", "leave it out")
    if by_rows:
        rows = check_rows("spacing", spacing, len(schedule))  # type: ignore[arg-type]
    else:
        count = default_steps(chosen, schedule) if num_steps is None else num_steps
        first = chosen.level if level is None and begin in MAX_LOSS else level
        first = None if first is None else float(first.label if isinstance(first, Level) else first)
        max_loss = chosen.max_loss if max_loss is None else max_loss
        rows = _choose_rows(denoiser, count, spacing, begin, max_loss, first)  # type: ignore[arg-type]
    known = (denoiser.process, denoiser.gaussian)
    levels = [remembered(*known, ("level", row), partial(schedule.level, row)) for row in rows]
    denoiser.check_levels(dtype, rows)
    _warn_of_amplification(denoiser, levels)
    known_to = denoiser
    if tile is not None:
        denoiser = denoiser.with_net(Tiled(denoiser.net, tile))
    source = as_generator(generator, shape[0] if shape else 0)
    if isinstance(start, Tensor):
        check_finite("start", start)
        if tuple(start.shape) != shape:
            raise InputError("start", None, f"has shape {tuple(start.shape)}", f"make it that of `shape`, {shape}")
        x = start.to(**place)
        x = x if level is None else levels[0].signal * x
    else:
        x = _first_state(denoiser, begin, levels[0], shape, source, place)
    after = None
    if chosen.rescale:
        after = _rescaling(denoiser, known_to, chosen, step_options, begin, levels, shape[1:], place)
    return _walk(denoiser, x, levels, chosen, step_options, source, denoise, callback, after)


def _first_state(
    denoiser: Denoiser, start: str, level: Level, shape: tuple[int, ...], source: Generators, place: dict[str, Any]
) -> Tensor:
    """x at the first level, from the prior or from a model of the data."""
    process = denoiser.process
    if start == "gaussian" and denoiser.gaussian is not None:
        state = denoiser.gaussian.at(level, process.covariance)
        return denoiser.gaussian.sample(shape, source, state=state, **place)
    if start == "mixture" and denoiser.mixture is not None:
        x0 = denoiser.mixture.sample(shape, source, classes=denoiser.condition_values.get(CLASSES), **place)
        return level.signal * x0 + level.sigma * process.noise(shape, source, **place)
    return process.prior(shape, source, **place)


def _rescaling(
    denoiser: Denoiser,
    owner: Denoiser,
    sampler: Sampler,
    options: dict[str, Any],
    start: str,
    levels: Sequence[Level],
    shape: tuple[int, ...],
    place: dict[str, Any],
) -> After:
    """What follows each step, measured on images from seeds of their own; ``owner`` has the network without tiles."""

    def measure() -> list[Modes]:
        source = as_generator([*range(PILOT_SEED, PILOT_SEED + PILOTS)], PILOTS)
        x = _first_state(denoiser, start, levels[0], (PILOTS, *shape), source, place)
        measured = Measured()
        _walk(denoiser, x, levels, sampler, options, source, True, None, measured)
        return measured.factors

    key = (sampler, tuple(sorted(options.items())), start, tuple(level.label for level in levels), *place.values())
    factors = factors_of(owner, key, measure)
    return lambda chain, x, index, there: rescaled(chain, x, factors[index], there)


@torch.no_grad()
def walk(
    denoiser: Denoiser,
    x: Tensor,
    levels: Sequence[Level],
    sampler: str | Sampler | Step = DEFAULT,
    *,
    generator: Generators = None,
    denoise: bool = True,
    callback: Callable[[Visit], None] | None = None,
    **options: object,
) -> Tensor:
    """Take x [B, ..., *event], a state at the first of ``levels``, to the last of them and on to the clean image.

    All other arguments are those of `sample`.
    """
    chosen, step_options = as_sampler(sampler, options)
    if chosen.rescale:
        raise InputError("rescale", True, "needs to know how x was drawn", "use nidiff.sample, or leave it out")
    source = as_generator(generator, len(x))
    return _walk(denoiser, x, levels, chosen, step_options, source, denoise, callback)


def _walk(
    denoiser: Denoiser,
    x: Tensor,
    levels: Sequence[Level],
    sampler: Sampler,
    options: dict[str, Any],
    source: Generators,
    denoise: bool,
    callback: Callable[[Visit], None] | None,
    after: After | None = None,
) -> Tensor:
    place: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    chain = Chain(
        denoiser,
        lambda: denoiser.process.noise(x.shape, source, **place),
        white=lambda shape: white_noise(shape, source, **place),
    )
    x = run_chain(chain, x, levels, sampler, options, denoise=denoise, callback=callback, after=after)
    if denoise and len(x):
        _check_images(denoiser, x)
    return x


def _check_images(denoiser: Denoiser, x: Tensor) -> None:
    """Refuse images that are not finite, and warn of some that are far outside of the data, as far as these are known:
    by their Gaussian or else, given an observation, by the range that x̂0 is clipped to, or by the noise. Nothing is
    read before the end."""
    gaussian, process = denoiser.gaussian, denoiser.process
    culprits = [correction.blame for correction in denoiser.corrections if hasattr(correction, "blame")]
    if gaussian is None and not culprits:
        known, usual = "nothing", math.inf
    elif gaussian is not None:
        known, usual = "the data's Gaussian", gaussian.covariance.eigenvalues.mean().sqrt().item()
    elif denoiser.clip is not None:
        known, usual = "clip", denoiser.clip
    else:
        known, usual = "the noise", (process.schedule.prior_scale**2 * process.covariance).values.mean().sqrt().item()
    centred = x if gaussian is None else x - gaussian.mean.to(x)
    size = centred.to(widest(x.device)).flatten(1).square().mean(1).sqrt().amax().item() / usual
    if size <= FAR:
        return
    remedy = "use more steps, another `sampler` or a `clip`, or check the weights of the network"
    argument, value, remedy = culprits[-1] if culprits else (None, None, remedy)
    if count := int((~x.isfinite()).flatten(1).any(1).sum()):
        problem = f"ended in NaN or infinite numbers in {count} of {len(x)} images"
        raise Diverged(argument, value, problem if culprits else f"sampling {problem}", remedy)
    by = f" by {argument}={value!r}" if culprits else ""
    problem = f"an image is {size:.3g} times as large as {known} allows, and sampling{by} has probably diverged"
    warnings.warn(str(InputError(None, None, problem, remedy)), FarOut, stacklevel=4)


def _choose_rows(
    denoiser: Denoiser, count: int, spacing: str | Spacing, start: str, max_loss: float | None, begin: float | None
) -> list[float]:
    """``count`` rows from ``begin`` on, or, with a warm start, from the row at which that loses at most ``max_loss``;
    where fewer rows are left than that, all of these."""
    process, gaussian, first = denoiser.process, denoiser.gaussian, len(denoiser.process.schedule) - 1
    count = check_whole("num_steps", count, 1, len(process.schedule))
    if begin is not None:
        check_number("level", begin, 0, first)
        first = math.ceil(begin)  # in whose place `begin` is visited
        count = min(count, first + 1)
    elif start in MAX_LOSS:
        first = max(start_row(denoiser, start, max_loss), count - 1)
    if spacing == ANGLE:
        rows: list[float] = [*angle_rows(process, require_gaussian(gaussian, "spacing", spacing), count, first)]
    else:
        whole = first == len(process.schedule) - 1
        rows = spaced_rows(process.schedule if whole else process.schedule.below(first), count, spacing)
    return rows if begin is None else [begin, *rows[1:]]


def rehearse(denoiser: Denoiser, shape: Sequence[int], **arguments: Any) -> list[str]:
    """Draw one image of ``shape`` [...] with a network that returns 0, and return the warnings of `sample`.

    What `sample` would refuse is refused here, quickly; so is a schedule with a level at which training overflows, and
    one whose images are not finite.
    """
    check_denoiser(denoiser)
    denoiser.check_levels(torch.float32)
    denoiser = denoiser.with_zero_net().for_images(torch.tensor([0], device="cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", FarOut)  # with such a network
        try:
            sample(denoiser, (1, *check_sizes(shape)), generator=[0], device="cpu", **arguments)
        except Diverged as error:
            schedule, remedy = denoiser.process.schedule, "use one of a narrower range"
            raise InputError("schedule", schedule, "ends in NaN or infinite pixels", remedy) from error
    return [str(warning.message) for warning in caught]


def as_sampler(sampler: str | Sampler | Step, options: dict[str, Any] | None = None) -> tuple[Sampler, dict[str, Any]]:
    """The sampler and its options, those written in its text (``NAME:key=value,…``) included; both are checked."""
    options = {key: plain(value) for key, value in (options or {}).items()}
    if isinstance(sampler, str):
        name, written = parse_call("sampler", sampler)
        options = written | options
        chosen = SAMPLERS[one_of("sampler", name, SAMPLERS)]
        if "spacing" in options:
            chosen = chosen._replace(spacing=one_of("spacing", options.pop("spacing"), [*SPACINGS, ANGLE]))
        if "start" in options:
            chosen = chosen._replace(start=one_of("start", options.pop("start"), STARTS))
        if "rescale" in options:
            expect("rescale", options["rescale"], bool)
            chosen = chosen._replace(rescale=options.pop("rescale"))
        if "level" in options:
            chosen = chosen._replace(level=check_number("level", options.pop("level")))
        for key in ("bound", "max_loss"):  # "bound" is what version 0.2 wrote
            if key in options:
                chosen = chosen._replace(max_loss=check_number(key, options.pop(key)))
    else:
        chosen = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
    parameters = [*signature(chosen.step).parameters.values()][5:]  # after (chain, x, x0, here, there)
    known, kinds = [parameter.name for parameter in parameters], {}
    with contextlib.suppress(NameError, TypeError):  # a step may be an object, or have annotations nobody can resolve
        kinds = get_type_hints(chosen.step)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    for key, value in options.items():
        if not (key in known or takes_any) or not fits(value, kinds.get(key, Any)):
            problem = f"is not an option of `sampler` {getattr(chosen.step, '__name__', chosen.step)}"
            raise InputError(key, value, problem, f"it takes {', '.join(map(str, parameters)) or 'none'}")
    return chosen, options


def default_steps(sampler: Sampler, schedule: Schedule) -> int:
    """How many levels the sampler visits by default."""
    return len(schedule) if sampler.num_steps is None else min(sampler.num_steps, len(schedule))


def _warn_of_amplification(denoiser: Denoiser, levels: list[Level]) -> None:
    """x̂0 = a x + b · output: without clipping, the first step carries |b| signal' times the network's error on.

    A single step ends with x̂0 itself, where the signal is 1.
    """
    if denoiser.clip is not None:
        return
    b = denoiser.target.coefficients(levels[0].signal, levels[0].sigma)[1]
    factor = (b * (levels[1].signal if len(levels) > 1 else 1.0)).largest.item()
    if factor > AMPLIFIED and denoiser.process.schedule.keeps == "variance":
        warnings.warn(
            f"clip=None with target {denoiser.target_name!r} multiplies an error of the network by {factor:,.0f} in "
            f"the first step, since the noisiest level has a signal of {levels[0].signal.largest.item():.1g}: pass "
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
    "ipndm": Sampler(ipndm, "trailing", 20),
    "angle": Sampler(angle, "angle", 10, finishes=True),
    "angle_2m": Sampler(angle_2m, "angle", 10, finishes=True),
    "gaussian_2m": Sampler(gaussian_2m, "angle", 10, finishes=True),
    "euler_maruyama": Sampler(euler_maruyama),
    "als": Sampler(als, settles=True),
    "cas": Sampler(cas),
    "pc": Sampler(predictor_corrector),
    "repaint": Sampler(repaint, num_steps=100),
    "diffpir": Sampler(diffpir, num_steps=100),
}
