"""States with the right variance: what is known of x at every level, whatever the data, and lost by samplers.

The variance of x is signal² C + sigma² Σ in every mode, so that E z² = 1 on the way from noise to data (`Wiener.to_z`).
Long steps lose some of it, and so do the small errors of a network, which then is shown images unlike those that it was
trained on. A few images, drawn beforehand from seeds of their own, tell how much: after each of its steps every mode is
divided by √E z², as it was after the same step of theirs, a mean over the modes of one wavenumber.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from nidiff.covariance.modes import Modes
from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.gaussian import smooth
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.errors import InputError
from nidiff.sampling.step import Chain, version

PILOTS = 64  # images that are drawn beforehand
PILOT_SEED = 3 * 10**9  # far from the seeds of users
MOST = 4.0  # by which a mode is multiplied, or divided
T = TypeVar("T")
_MADE: WeakKeyDictionary[object, dict[Hashable, object]] = WeakKeyDictionary()


def check_rescale(denoiser: Denoiser) -> None:
    """Refuse a denoiser whose states have another variance than the data's, or that does not know it."""
    require_gaussian(denoiser.gaussian, "rescale", True)
    if denoiser.condition_values or denoiser.corrections:
        problem = "needs images of all the data: given a condition or an observation, they vary less"
        raise InputError("rescale", True, problem, "leave it out")


class Measured:
    """Called after each step of images drawn beforehand: rescales them, and keeps the factors."""

    def __init__(self) -> None:
        self.factors: list[Modes] = []

    def __call__(self, chain: Chain, x: Tensor, index: int, there: Level) -> Tensor:
        gaussian = require_gaussian(chain.denoiser.gaussian, "rescale")
        power = gaussian.powers(chain.gaussian_at(there).to_z(x).cpu().double()).mean(0)
        factor = smooth(power, gaussian.spatial).clamp(min=MOST**-2, max=MOST**2).rsqrt()
        self.factors.append(Modes(factor, gaussian.covariance.basis))
        return rescaled(chain, x, self.factors[index], there)


def rescaled(chain: Chain, x: Tensor, factor: Modes, there: Level) -> Tensor:
    """x with every mode of x − signal μ times its factor; an image stays in its range."""
    x = chain.combine((factor, x), (there.signal * (1.0 - factor), chain.mean_like(x)))
    clip = chain.denoiser.clip
    return x.clamp(-clip, clip) if there is CLEAN and clip is not None else x


def factors_of(denoiser: Denoiser, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` returned for the same network, with the same weights, and ``key``."""
    weights: Iterable[Tensor] = getattr(denoiser.net, "parameters", tuple)()
    state = tuple((each.data_ptr(), version(each)) for each in weights)
    of_kappa = None if denoiser.kappa is None else denoiser.kappa.values
    knowledge = (denoiser.process, denoiser.gaussian, of_kappa, denoiser.mixture, denoiser.clip, denoiser.target_name)
    made = _MADE.setdefault(denoiser.net, {})
    whole = (key, state, knowledge)
    if whole not in made:
        made[whole] = make()
    return made[whole]  # type: ignore[return-value]
