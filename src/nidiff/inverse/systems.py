"""The linear system of an observation: w with (A V Aᵀ + R) w = y − A x̂0, and what it adds to x̂0, δ = V Aᵀ w.

Where V is diagonal in a basis and A is linear, it is solved in the cheapest of three ways:

- a row of y has at most `MOST_DENSE` entries (stations, rays, a coarse field): by its matrix, made once for every V;
- every entry has noise, and A is not just a mask (a blur): by conjugate gradients on δ = V^½ u with
  (I + V^½ Aᵀ R⁻¹ A V^½) u = V^½ Aᵀ R⁻¹ (y − A x̂0). In the basis of V the matrix is nearly diagonal, and its diagonal is
  the preconditioner. An edge that A and V treat differently costs iterations, but the range of V/R does not;
- else (large masks, hard constraints) by conjugate gradients on w. The preconditioner of a mask has the strongest modes
  of V as they are, and the mean of the others; else it is the diagonal in a basis over y.

For any other V, such as that of a network's Jacobian, by conjugate gradients on w without a preconditioner.
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import Waves
from nidiff.diffusion.gaussian import smooth
from nidiff.inverse.observation import Observation
from nidiff.inverse.operators import Function
from nidiff.randomness import white_noise

MOST_DENSE = 1024  # entries of a row of y for which the matrix is made
MOST_NUMBERS = 2**26  # of all the matrices that are kept, 512 MB
ROUGH = 1e-4  # a tolerance for which float32 is enough
PROBES = 8  # random vectors that a diagonal is estimated from
STRONGEST = 512  # modes that the preconditioner of a mask has as they are
T = TypeVar("T")
_TABLES: WeakKeyDictionary[Observation, dict[Hashable, tuple[Any, int]]] = WeakKeyDictionary()


class Solved(NamedTuple):
    """The solution of a `System`."""

    weights: Tensor  # (A V Aᵀ + R)⁻¹ of the right-hand side, like y
    update: Tensor  # V Aᵀ of these, like x


class System:
    """An observation, linearised at images x0."""

    def __init__(self, observation: Observation, x0: Tensor, dtype: torch.dtype | None = None) -> None:
        self.observation, self.x0 = observation, x0
        self.near = observation.operator.linearise(x0, dtype)
        self.noise = observation.variance(self.near.value)

    @property
    def misfit(self) -> Tensor:
        """y − A x0."""
        return self.observation.rows(self.near.value) - self.near.value

    def solve(self, right: Tensor, variance: Modes | Function, tolerance: float, iterations: int) -> Solved:
        """The solution for the right-hand side ``right``, like y, with ``variance`` as V."""
        if not isinstance(variance, Modes):
            return self._plain(right, variance, None, tolerance, iterations)
        if not self.observation.operator.is_linear or variance.per_image or variance.basis is None:
            return self._plain(right, variance.apply, None, tolerance, iterations)
        factor = self._factor(variance)
        if factor is not None:
            matrix, index = factor
            weights = torch.zeros_like(right).flatten(1)
            weights[:, index] = torch.cholesky_solve(right.flatten(1)[:, index].T, matrix.to(right)).T
            weights = weights.reshape(right.shape)
            return Solved(weights, variance.apply(self.near.transpose(weights)))
        if not self.observation.operator.is_mask and (precision := self.observation.precision(right)) is not None:
            return self._in_modes(right, variance, precision, tolerance, iterations)
        return self._plain(right, variance.apply, self._preconditioner(variance), tolerance, iterations)

    def fluctuation(self, draw: Tensor, noise: Tensor, variance: Modes, tolerance: float, iterations: int) -> Tensor:
        """A draw of N(0, V − V Aᵀ (A V Aᵀ + R)⁻¹ A V) from ``draw`` ~ N(0, V) and ``noise`` ~ N(0, R): what is left of
        them when y is known (Matheron's rule)."""
        wide = draw.to(noise)
        return draw - self.solve(self.near.forward(wide) + noise, variance, tolerance, iterations).update.to(draw)

    def matrix(self, variance: Function, v: Tensor) -> Tensor:
        """(A V Aᵀ + R) v."""
        return self.near.forward(variance(self.near.transpose(v))) + self.noise(v)

    # The three ways --------------------------------------------------------------------------------------------------

    def _factor(self, variance: Modes) -> tuple[Tensor, Tensor] | None:
        """The Cholesky factor of the matrix between the entries that are observed, and which they are; None where there
        are too many, they differ from image to image, or the matrix is singular."""
        if self.observation.is_per_image:
            return None
        like, index = self.near.value[:1], seen(self.observation)
        count = len(index)
        if count > MOST_DENSE:
            return None
        index = index.to(like.device)

        def make() -> tuple[Tensor, Tensor] | None:
            units = torch.zeros(count, like[0].numel(), dtype=like.dtype, device=like.device)
            units[torch.arange(count, device=like.device), index] = 1.0
            some = System(self.observation, torch.zeros(count, *self.x0.shape[1:]).to(self.x0))
            rows = some.matrix(variance.apply, units.reshape(count, *like.shape[1:])).flatten(1)[:, index]
            rows = (rows + rows.T) / 2
            factor, failed = torch.linalg.cholesky_ex(rows)
            weak = factor.diagonal().min() <= 1e-7 * factor.diagonal().max()
            return None if bool(failed) or bool(weak) else (factor, index)

        return self._kept(("factor", like.dtype, *_key(variance)), count**2, make)

    def _in_modes(
        self, right: Tensor, variance: Modes, precision: Function, tolerance: float, iterations: int
    ) -> Solved:
        if tolerance >= ROUGH and self.x0.dtype is torch.float32 is not right.dtype:  # twice as fast, and good enough
            rough = System(self.observation, self.x0, torch.float32)
            rough_right = right.float()
            found = rough._in_modes(rough_right, variance, precision, tolerance, iterations)
            return Solved(found.weights.to(right), found.update.to(right))
        basis, near = cast(Basis, variance.basis), self.near
        root = variance.values.sqrt().to(right)

        def precisions(system: "System", c: Tensor) -> Tensor:
            """Aᵀ R⁻¹ A, in the basis."""
            return basis.analyse(system.near.transpose(precision(system.near.forward(basis.synthesise(c)))))

        def make() -> Tensor:
            probed = System(self.observation, self._probes(), right.dtype)
            return _diagonal(lambda c: precisions(probed, c), basis, tuple(probed.x0.shape), right)

        diagonal = self._kept(("precision", right.dtype, basis), self.x0[0].numel(), make)
        scale = 1 / (1 + root**2 * diagonal)
        target = root * basis.analyse(near.transpose(precision(right)))
        u = conjugate_gradients(
            lambda u: u + root * precisions(self, root * u), target, tolerance, iterations, lambda r: scale * r
        )
        update = basis.synthesise(root * u)
        return Solved(precision(right - near.forward(update)), update)

    def _plain(
        self, right: Tensor, variance: Function, preconditioner: Function | None, tolerance: float, iterations: int
    ) -> Solved:
        weights = conjugate_gradients(lambda v: self.matrix(variance, v), right, tolerance, iterations, preconditioner)
        return Solved(weights, variance(self.near.transpose(weights)))

    def _preconditioner(self, variance: Modes) -> Function | None:
        like, observation = self.near.value, self.observation
        basis = _basis_over(tuple(like.shape[1:]), tuple(self.x0.shape[1:]), cast(Basis, variance.basis))
        if basis is None:
            return None
        if observation.operator.is_mask:
            return self._of_mask(variance)

        def make() -> Tensor:
            probed = System(observation, self._probes())
            shape = tuple(probed.near.value.shape)
            return _diagonal(
                lambda c: basis.analyse(probed.matrix(variance.apply, basis.synthesise(c))), basis, shape, like
            )

        diagonal = self._kept(("matrix", like.dtype, *_key(variance)), like[0].numel(), make)
        return lambda r: basis.synthesise(basis.analyse(r) / diagonal)

    def _of_mask(self, variance: Modes) -> Function:
        """About (A V Aᵀ + R)⁻¹ for a mask: with B the strongest modes of V at the observed places, v their variances,
        and d the mean of R and of what the other modes add, (B v Bᵀ + d)⁻¹ = (1 − B (d/v + BᵀB)⁻¹ Bᵀ)/d (Woodbury).
        In float32 the difference would not stay positive where v/d is large."""
        like, basis = self.near.value, cast(Basis, variance.basis)
        observed = self.observation.operator(torch.ones_like(self.x0)).to(like)
        axes = tuple(range(1, observed.ndim))
        masks = observed if self.observation.is_per_image else observed[:1]
        values = variance.values.to(like).expand(self.x0.shape[1:]).flatten()
        count = min(len(values) // 4, int(STRONGEST / len(masks) ** 0.5))
        strongest, modes = values.topk(count)
        noise = self.noise(observed).sum(axes) / observed.sum(axes).clamp(min=1.0)
        rest = noise.clamp(min=0.0) + (values.sum() - strongest.sum()).clamp(min=0.0) / len(values)
        rest = torch.maximum(rest, 1e-9 * values.max())[: len(masks)]

        def products() -> Tensor:
            """BᵀB of each mask, by the modes in turn."""
            units = torch.zeros(count, len(values)).to(like)
            units[torch.arange(count, device=like.device), modes] = 1.0
            images = basis.synthesise(units.reshape(count, *self.x0.shape[1:]))
            return torch.stack([basis.analyse(mask * images).flatten(1)[:, modes] for mask in masks])

        def inverse() -> Tensor:
            size = len(masks) * count**2
            gram = self._kept(("modes", like.dtype, basis, modes.cpu().numpy().tobytes()), size, products)
            ratio = rest[:, None] / strongest.clamp(min=torch.finfo(like.dtype).tiny)
            return torch.linalg.inv(torch.diag_embed(ratio.cpu().double()) + gram.cpu()).to(like)

        inner = self._kept(("mask", like.dtype, *_key(variance)), len(masks) * count**2, inverse)
        divisor = rest.reshape(-1, *[1] * len(axes))

        def preconditioner(r: Tensor) -> Tensor:
            known = basis.analyse(r).flatten(1)[:, modes]
            spread = torch.zeros_like(r).flatten(1)
            spread[:, modes] = known @ inner[0] if len(inner) == 1 else (known[:, None] @ inner)[:, 0]
            return (r - observed * basis.synthesise(spread.reshape(r.shape))) / divisor

        return preconditioner

    def _probes(self) -> Tensor:
        count = len(self.x0) if self.observation.is_per_image else PROBES
        return torch.zeros(count, *self.x0.shape[1:]).to(self.x0)

    def _kept(self, key: Hashable, size: int, make: Callable[[], T]) -> T:
        place = (tuple(self.x0.shape[1:]), self.x0.dtype, str(self.x0.device))
        return kept(self.observation, (key, place), size, make)


def kept(observation: Observation, key: Hashable, size: int, make: Callable[[], T]) -> T:
    """What ``make``, about ``size`` numbers, returned for the observation and ``key``. Those made last are kept, of all
    observations together up to `MOST_NUMBERS`, and the last two of this one in any case."""
    mine = _TABLES.setdefault(observation, {})
    if key not in mine:
        with torch.inference_mode(False), torch.no_grad():
            mine[key] = make(), size
        spare = sum(size for tables in _TABLES.values() for _, size in tables.values()) - MOST_NUMBERS
        for tables in [*(tables for tables in _TABLES.values() if tables is not mine), mine]:
            while spare > 0 and len(tables) > (2 if tables is mine else 0):
                spare -= tables.pop(next(iter(tables)))[1]
    return cast(T, mine[key][0])


def seen(observation: Observation) -> Tensor:
    """The places in a flat row of y that are observed, if they are the same for all images; on the CPU."""

    def make() -> Tensor:
        y, observed = observation.y[:1], observation.operator.observed
        if observed is None:
            return torch.arange(y.numel(), device="cpu")
        return observed.cpu().expand(y.shape).flatten().nonzero()[:, 0]

    return kept(observation, "seen", 1, make)


def _key(variance: Modes) -> tuple[Hashable, ...]:
    """Equal for equal operators."""
    return variance.basis, variance.values.cpu().numpy().tobytes()


def _basis_over(y: tuple[int, ...], x: tuple[int, ...], basis: Basis) -> Basis | None:
    """The basis for a y of the shape of x, or the waves of the same boundary over the last axes of a smaller one."""
    if y == x:
        return basis
    spatial = basis.spatial
    if isinstance(spatial, Waves) and len(y) == len(x) and min(y) > 0:
        return Waves(y[len(y) - len(spatial.event_shape) :], spatial.boundary)
    return None


def _diagonal(function: Function, basis: Basis, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The diagonal of a matrix ≥ 0 between coefficients: of random signs s, the mean of s · (matrix s). Where the
    matrix is diagonal all agree on it; else there is noise in it, and waves of one rounded |k| share their mean."""
    signs = white_noise(shape, 0, device="cpu").sign().to(like)
    found = signs * function(signs)
    mean = found.mean(0)
    if len(found) == 1 or bool((found - mean).abs().max() > 1e-6 * mean.abs().max()):
        mean = smooth(mean.double().cpu(), basis.spatial).to(like)
    return mean.clamp(min=1e-12 * mean.abs().max().item())


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each pair of rows."""
    return (a * b).sum(1)


def conjugate_gradients(
    matrix: Function, right: Tensor, tolerance: float, iterations: int, preconditioner: Function | None = None
) -> Tensor:
    """w with S w = ``right`` [B, …] for a symmetric S ≥ 0, which may be singular if ``right`` is in its range.

    The rows are systems of their own. A row ends when √(rᵀ P r) of its residual r has fallen to ``tolerance`` times
    that of ``right``, or when S returns only rounding errors; P is the ``preconditioner``, about S⁻¹, or 1.
    """
    shape = right.shape

    def conditioned(r: Tensor) -> Tensor:
        return r if preconditioner is None else preconditioner(r.reshape(shape)).flatten(1)

    residual = right.flatten(1)
    found, direction = torch.zeros_like(residual), conditioned(residual)
    size = _dots(residual, direction)
    goal, largest = tolerance**2 * size, torch.zeros_like(size)
    for _ in range(iterations):
        if preconditioner is not None and bool((size < 0).any()):  # it is not positive, by rounding
            return conjugate_gradients(matrix, right, tolerance, iterations)
        active = size > goal
        if not bool(active.any()):
            break
        image = matrix(direction.reshape(shape)).flatten(1)
        curvature, length = _dots(direction, image), _dots(direction, direction)
        largest = torch.maximum(largest, curvature / torch.where(active, length, 1.0))
        active &= curvature > torch.finfo(right.dtype).eps * largest * length
        step = torch.where(active, size / torch.where(active, curvature, 1.0), 0.0).unsqueeze(1)
        found = found + step * direction
        residual = residual - step * image
        towards = conditioned(residual)
        new = _dots(residual, towards)
        direction = towards + torch.where(active, new / torch.where(active, size, 1.0), 0.0).unsqueeze(1) * direction
        size = torch.where(active, new, 0.0)
    return found.reshape(shape)
