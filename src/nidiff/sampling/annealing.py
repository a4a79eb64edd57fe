"""The step of annealed Langevin dynamics in closed form: what a level's variance becomes, and the ε that is best (E31).

η = ε / σ_min² is the step in units of σ², so that a level σ moves by η σ²; ``ratio`` > 1 is σ of a level over σ of the
next (the paper's γ of appendix E).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.errors import InputError
from nidiff.recipe import check_whole

MOST_STEPS = 10_000  # Langevin steps at a level


def variance_ratio(
    covariance: Covariance,
    ratio: float,
    epsilon: float,
    sigma_min: float = 0.01,
    steps: int = 5,
    preconditioned: bool = True,
) -> Tensor:
    """Var[x_T] / (σ² λ) of every mode after T = ``steps`` Langevin steps at level σ, from a draw of level ratio · σ.

    A step multiplies a mode by 1 − η, or, in the update as printed, which lacks Σ before the score, by 1 − η/λ; and it
    adds noise of variance 2ησ²λ (E23, E31). A mode without variance counts as one that the score does not move.
    """
    check_langevin(ratio, sigma_min, steps, epsilon)
    eta = epsilon / sigma_min**2
    values = covariance.eigenvalues
    if preconditioned:
        factor = torch.full_like(values, (1 - eta) ** 2)
    else:
        factor = torch.where(values > 0, 1 - eta / values, 1.0).square()
    variance = torch.full_like(values, float(ratio) ** 2)
    for _ in range(steps):
        variance = factor * variance + 2 * eta
    return variance  # infinite where the steps are unstable


def langevin_epsilon(
    covariance: Covariance, ratio: float, sigma_min: float = 0.01, steps: int = 5, preconditioned: bool = True
) -> float:
    """The ε with the least mean variance of a pixel, mean_k λ_k · `variance_ratio`_k: no ε brings it to 1 (E31).

    Preconditioned it is the isotropic value, and for one step σ_min² (1 − ratio⁻²).
    """
    check_langevin(ratio, sigma_min, steps)
    values = covariance.eigenvalues
    slowest = 1.0 if preconditioned else values[values > 0].min().item()

    def cost(log_eta: float) -> float:
        epsilon = math.exp(log_eta) * sigma_min**2
        mean = pixel_mean(variance_ratio(covariance, ratio, epsilon, sigma_min, steps, preconditioned), covariance)
        return mean if math.isfinite(mean) else math.inf

    # The minimum of a grid of half octaves, and golden section between its neighbours.
    lowest, step = math.log(1e-3 * slowest * (1 - ratio**-2) / steps), math.log(2) / 2
    grid = [lowest + step * i for i in range(math.ceil((math.log(2.0) - lowest) / step) + 1)]
    costs = [cost(point) for point in grid]
    least = costs.index(min(costs))
    if least == 0:
        problem = "has no ε at which the update without preconditioning lowers the variance"
        raise InputError("covariance", None, problem, "use preconditioned=True, or one with mean eigenvalue 1")
    return math.exp(_golden_section(cost, grid[least] - step, grid[least] + step)) * sigma_min**2


def cas_interval(ratio: float) -> tuple[float, float]:
    """[1 − 1/ratio, 1 + 1/ratio]: the η for which β² = 1 − ratio² (1 − η)² of consistent annealed sampling is ≥ 0."""
    check_langevin(ratio)
    return 1 - 1 / ratio, 1 + 1 / ratio


def pixel_mean(variance: Tensor, covariance: Covariance) -> float:
    return (variance * covariance.eigenvalues).mean().item()


def check_langevin(ratio: float, sigma_min: float = 1.0, steps: int = 1, epsilon: float | None = None) -> None:
    """Refuse a ratio of two σ that is not above 1, and numbers that float64 cannot square."""
    step = 1.0 if epsilon is None else epsilon
    for argument, value, least in (("ratio", ratio, 1.0), ("sigma_min", sigma_min, 0.0), ("epsilon", step, 0.0)):
        if not max(least, 1e-150) < value < 1e150:
            raise InputError(argument, value, "is out of range", f"choose a number above {least:g}")
    check_whole("steps", steps, 1, MOST_STEPS)


def _golden_section(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum between low and high has it."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > 1e-9:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return (low + high) / 2
