"""The training loss."""

from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.covariance.modes import Coefficient
from nidiff.diffusion.denoiser import Denoiser, check_denoiser
from nidiff.diffusion.schedule import Level
from nidiff.errors import InputError, choose
from nidiff.randomness import Generators, as_generator, white_noise
from nidiff.recipe import check_number


def denoising_loss(
    denoiser: Denoiser,
    x0: Tensor,
    *,
    generator: Generators = None,
    weighting: "str | float | Weight | None" = "eps",
    level: Level | None = None,
    eps: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean squared error per image [B] at a random level: E‖Λ^½ (s_θ − s)‖² / D with a weight Λ inside the norm (E13).

    ``weighting`` names Λ by the error it makes plain, and means the same for every target:

    - "eps": Λ = sigma² Σ, the white eps error ‖eps_θ − eps‖² (the paper's objective, eq. 16),
    - "score": Λ = sigma² I, the Σ^-½-weighted eps error (the source's variant b),
    - "noise": Λ = sigma² Σ², the Σ^½-weighted eps error, that of coloured noise (the source's variant c),
    - "v": Λ = sigma² Σ² (signal + sigma² / signal)², the plain error of v (see `TARGETS`),
    - "target": no weight, the plain error of the network's output,
    - a number p: Λ = sigma² Σ^(1 + 2p), the Σ^p-weighted eps error.

    ``level`` and ``eps`` default to draws from ``generator``. ``weights`` [C, *event], of mean 1, are those of the
    squared errors of points, after Λ.
    """
    check_denoiser(denoiser)
    if denoiser.corrections:
        remedy = "train the plain denoiser, without guidance and observations"
        raise InputError("denoiser", None, "has guidance or an observation, which the loss cannot train", remedy)
    generator = as_generator(generator, len(x0))
    weight = choose("weighting", weighting, WEIGHTINGS)
    process, target = denoiser.process, denoiser.target
    process.check_batch("x0", x0)
    if not len(x0):
        raise InputError("x0", None, "is an empty batch", "give one image or more")
    if level is None:
        if not torch.compiler.is_compiling():
            denoiser.check_levels(x0.dtype)
        level = process.schedule.draw(len(x0), generator)
    eps = white_noise(x0.shape, generator, dtype=x0.dtype, device=x0.device) if eps is None else eps
    x = process.perturb(x0, level, eps)
    error = denoiser.output(x, level) - target.encode(x0, eps, level, process.covariance)
    if weight is not None:
        scale, power = weight(level) if callable(weight) else (1.0, check_number("weighting", weight))
        own_scale, own_power = target.eps_error(level)
        error = (scale * own_scale) * error
        if power + own_power:
            error = process.covariance.power(error, power + own_power)
    squares = error.square()
    return (squares if weights is None else weights.to(squares) * squares).flatten(1).mean(1)


Weight = Callable[[Level], tuple[Coefficient, float]]
# (c, p): the error of eps is weighted by c · Σ^p, c of the level; a number is p alone. None: the target's own error.
WEIGHTINGS: dict[str, float | Weight | None] = {
    "eps": 0.0,
    "score": -0.5,
    "noise": 0.5,
    # With x known, v = (signal + sigma² / signal) · Σ^½ eps and something that has no error.
    "v": lambda level: (level.signal + level.sigma**2 / level.signal, 0.5),
    "target": None,
}
