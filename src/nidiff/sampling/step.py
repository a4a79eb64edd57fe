"""What a step of a sampler gets, what a sampler is, and the loop that takes its steps."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.modes import Coefficient, as_modes, combine, outside_autocast
from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.gaussian import GaussianModel, Wiener
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.diffusion.spacing import Spacing

MOST_PAST = 3  # steps that a solver looks back on
MOST_ANALYSED = 12  # tensors whose coefficients are remembered: those of all these steps, and a few more
FEWEST_TABLES, NUMBERS_OF_TABLES = 16, 2**20  # that are remembered: so many, or what so many numbers per mode make
T = TypeVar("T")
_TABLES: WeakKeyDictionary[Process, dict[Hashable, Any]] = WeakKeyDictionary()  # of all walks of a process


class Past(NamedTuple):
    """A step: its level, its state and its x̂0."""

    level: Level
    x0: Tensor
    x: Tensor


@dataclass
class Chain:
    """One walk from noise to data: the denoiser, a source of coloured noise like x, the last steps before this one, the
    latest at the end, and a source of white numbers of any shape, which only some of the steps need."""

    denoiser: Denoiser
    noise: Callable[[], Tensor]
    history: list[Past] = field(default_factory=list)
    white: Callable[[tuple[int, ...]], Tensor] | None = None
    _analysed: list[tuple[Tensor, int, Basis, Tensor]] = field(default_factory=list)
    _mean: Tensor | None = None

    @property
    def previous(self) -> Past | None:
        """The step before this one."""
        return self.history[-1] if self.history else None

    def remember(self, step: Past) -> None:
        """Keep ``step`` as the one before the next."""
        self.history = [*self.history, step][-MOST_PAST:]

    def combine(self, *terms: tuple[Coefficient, Tensor], fresh: Coefficient | None = None) -> Tensor:
        """The sum of tensors like x, each mode of each times its coefficient, and ``fresh`` times coloured noise.

        Every step of a sampler is such a sum. Where coefficients differ from mode to mode it takes one synthesis, and
        an analysis of those tensors alone that are new: the coefficients of the last ones, and of what was returned,
        are remembered.
        """
        if fresh is not None:
            terms = (*terms, (fresh, self.noise()))
        total, basis = self.in_modes(*terms)
        if basis is None:
            return total
        x = outside_autocast(total, basis.synthesise).to(terms[0][1].dtype)
        self._analysed.append((x, version(x), basis, total))
        return x

    def in_modes(self, *terms: tuple[Coefficient, Tensor]) -> tuple[Tensor, Basis | None]:
        """That sum in the basis of its coefficients; or itself, where they have none."""
        return combine([(as_modes(coefficient), x) for coefficient, x in terms], self._analyse)

    def gaussian_at(self, level: Level) -> Wiener:
        """The data's Gaussian at a level."""
        gaussian = require_gaussian(self.denoiser.gaussian, "denoiser")
        return self.once("gaussian", [level], lambda: gaussian.at(level, self.denoiser.process.covariance))

    def once(self, name: Hashable, levels: Sequence[Level], make: Callable[[], T]) -> T:
        """What ``make`` returns of the levels, the data's Gaussian and κ alone: computed once, also for later walks."""
        kappa = self.denoiser.kappa
        known = None if kappa is None else (kappa.rows, kappa.values, kappa.trust)
        return remembered(self.denoiser.process, self.denoiser.gaussian, (name, known, *map(_key, levels)), make)

    def mean_like(self, x: Tensor) -> Tensor:
        """The mean of the data's Gaussian [1, ...] where x is."""
        if self._mean is None or self._mean.dtype != x.dtype or self._mean.device != x.device:
            self._mean = require_gaussian(self.denoiser.gaussian, "denoiser").mean.to(x).unsqueeze(0)
        return self._mean

    def _analyse(self, basis: Basis, x: Tensor) -> Tensor:
        """The coefficients of x in float32 or better, which are remembered for as long as x stays the same."""
        for known, then, of_basis, coefficients in self._analysed:
            if known is x and then == version(x) >= 0 and of_basis == basis:
                return coefficients
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        coefficients = outside_autocast(wide, basis.analyse)
        self._analysed = [*self._analysed, (x, version(x), basis, coefficients)][-MOST_ANALYSED:]
        return coefficients


def remembered(process: Process, gaussian: GaussianModel | None, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned for this process, Gaussian and ``key``; the tables that were made last are kept."""
    tables, whole = _TABLES.setdefault(process, {}), (gaussian, key)
    if whole in tables:
        return cast(T, tables[whole])
    made = tables[whole] = make()
    size = math.prod(process.covariance.event_shape if gaussian is None else gaussian.shape)
    while len(tables) > max(FEWEST_TABLES, NUMBERS_OF_TABLES // size):
        tables.pop(next(iter(tables)), None)
    return made


def _key(level: Level) -> Hashable:
    """Equal for equal levels; a level that differs from mode to mode is equal to itself alone."""
    numbers = (level.signal, level.sigma)
    if isinstance(level.label, Tensor) or any(each.basis is not None or each.values.ndim for each in numbers):
        return level
    return (*map(float, numbers), level.label)


def version(x: Tensor) -> int:
    """How often x was changed in place; -1 where torch does not count."""
    return -1 if x.is_inference() else x._version


class Visit(NamedTuple):
    """What a callback gets at each level, before the step that leaves it."""

    step: int  # from 1 to num_steps
    num_steps: int
    level: Level
    x: Tensor  # the state at ``level``
    x0: Tensor  # and the clean image expected from it


# (chain, x, x̂0 at x, here, there, **options) -> x at the level ``there``, which has less noise than ``here``.
Step = Callable[..., Tensor]
# (chain, x, number of the step from 0, there) -> x, changed after a step.
After = Callable[[Chain, Tensor, int, Level], Tensor]


class Sampler(NamedTuple):
    """A step, and the levels to visit by default."""

    step: Step
    spacing: str | Spacing = "uniform"
    num_steps: int | None = None
    """How many levels, or all the schedule has if those are fewer; None: all of them."""
    settles: bool = False
    """Whether it also takes its step at the last level, to stay there."""
    finishes: bool = False
    """Whether it takes the step to the clean image itself; others end with x̂0 of the last level."""
    start: str = "prior"
    """Where it begins: "prior", or lower, from the "gaussian" or the "mixture" as a model of the data."""
    max_loss: float | None = None
    """How much that may lose, in nats per dimension; None: `nidiff.sampling.warm.MAX_LOSS`."""
    level: float | None = None
    """The row at which such a start begins; None: by what it loses."""
    rescale: bool = False
    """Whether each mode has, after every step, the variance that is known of it: see `nidiff.sampling.rescale`."""


def moved(denoiser: Denoiser, x: Tensor, pull: Tensor | None, last: bool) -> Tensor:
    """x after a step, and after what an observation adds to it (`Denoiser.pulled`); an image stays in its range."""
    if pull is None:
        return x
    return (x + pull).clamp(-denoiser.clip, denoiser.clip) if last and denoiser.clip is not None else x + pull


def run_chain(
    chain: Chain,
    x: Tensor,
    levels: Sequence[Level],
    sampler: Sampler,
    options: dict[str, Any],
    *,
    denoise: bool = True,
    callback: Callable[[Visit], None] | None = None,
    after: After | None = None,
) -> Tensor:
    """Take x from the first of ``levels`` to the last and, to ``denoise``, from there to the clean image."""
    levels = [*levels, levels[-1]] if sampler.settles else levels
    for index, here in enumerate(levels):
        last = index == len(levels) - 1
        if last and not denoise:
            break
        x0, pull = chain.denoiser.pulled(x, here)
        if callback is not None:
            callback(Visit(index + 1, len(levels), here, x, x0))
        there = CLEAN if last else levels[index + 1]
        past = Past(here, x0, x)
        x = x0 if last and not sampler.finishes else sampler.step(chain, x, x0, here, there, **options)
        x = moved(chain.denoiser, x, pull, last)
        x = x if after is None else after(chain, x, index, there)
        chain.remember(past)
    return x
