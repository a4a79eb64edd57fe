"""A mixture of Gaussians as the law of data: one component per class or per cluster, each with a whole covariance.

A component is N(μ, C) with C = D + VᵀV: D has a variance for every mode of a basis (those of Σ, mostly waves), and the
rows of V [rank, *item] are as many of the directions in which the data vary as one likes to store. With V of all
directions C is any covariance, colours included; with none of them the component is a `GaussianModel`.

At a level x has the covariance A + (signal V)ᵀ (signal V), with A = signal² D + sigma² Σ diagonal in the basis. With
L Lᵀ = I + (signal V) A⁻¹ (signal V)ᵀ, T = L⁻¹ V and u = x − signal μ (Woodbury),

    log N(x) = −½ (uᵀ A⁻¹ u − ‖T (signal/A) u‖²) − ½ log det A − log det L − ½ d log 2π
    E[x0 | x] = μ + (signal D/A) u + (sigma² Σ/A) Tᵀ T (signal/A) u

and the mixture's E[x0 | x] is the mean of these, weighted by the probability of every component given x.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, PerMode, Pixels
from nidiff.covariance.checks import as_numbers, check_finite, check_sizes
from nidiff.covariance.config import Config, build, describe
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.modes import Modes
from nidiff.covariance.products import padded, row_product
from nidiff.covariance.waves import Boundary
from nidiff.diffusion.gaussian import BATCH, as_bits, event_basis, smooth
from nidiff.diffusion.schedule import CLEAN, Level
from nidiff.errors import TENSOR, InputError, expect
from nidiff.memory import require_memory
from nidiff.precision import widest
from nidiff.randomness import Generators, as_generator, check_place, random_index, uniform, white_noise
from nidiff.recipe import check_number, check_whole

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.diffusion.process import Process

Data = Tensor | Iterable[Tensor] | Iterable[tuple[Tensor, Tensor]]
NUMBERS = 2**23  # of all V together, by default
PROJECTED = 64  # random coordinates in which clusters are looked for: distances stay about the same
ROUNDS = 50  # of k-means


class MixtureModel:
    """Σ_k weight_k N(μ_k, D_k + V_kᵀ V_k).

    Args:
        weights: [K], positive; they are scaled to the sum 1.
        means: μ [K, *item], the items as `GaussianModel` has them.
        covariances: D, K of them, all in one basis over the last axes of an item.
        factors: V [K, rank, *item]; None: without.
        classes: [K], the class that every component belongs to, if the data have classes.
    """

    def __init__(
        self,
        weights: Tensor | Sequence[float],
        means: Tensor,
        covariances: Sequence[Covariance],
        factors: Tensor | None = None,
        classes: Tensor | Sequence[int] | None = None,
    ) -> None:
        self.weights, self.means = as_numbers(weights, "weights"), as_numbers(means, "means")
        count = len(self.means)
        factors = self.means[:, None][:, :0] if factors is None else as_numbers(factors, "factors")
        for argument, values in (("weights", self.weights), ("means", self.means), ("factors", factors)):
            check_finite(argument, values)
        if tuple(self.weights.shape) != (count,) or not bool((self.weights > 0).all()):
            raise InputError("weights", weights, "is not a positive number for each mean", f"give {count}")
        self.weights = self.weights / self.weights.sum()
        if len(covariances) != count or any(each.basis != covariances[0].basis for each in covariances):
            raise InputError("covariances", None, f"is not one for each of {count} means, in one basis", "give such")
        for each in covariances:
            each.require_invertible("a mixture with this component")
            each.check_trailing(tuple(self.means.shape[1:]), "means")
        if factors.ndim != self.means.ndim + 1 or factors.shape[2:] != self.means.shape[1:] or len(factors) != count:
            problem = f"has shape {tuple(factors.shape)}, and means has {tuple(self.means.shape)}"
            raise InputError("factors", None, problem, "give [K, rank, *item]")
        self.basis = covariances[0].basis
        self.variances = torch.stack([each.values for each in covariances]).float()
        self.means, self.factors = self.means.float(), factors.float()  # as they are saved
        self.classes = None if classes is None else check_labels("classes", classes, count)

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one item."""
        return tuple(self.means.shape[1:])

    @property
    def rank(self) -> int:
        """The number of rows of V."""
        return self.factors.shape[1]

    def log_weights(self, count: int, classes: Tensor | None = None) -> Tensor:
        """log of the weights of the components [count, K], given the class of every image, if it is known: a class
        that the mixture does not have says nothing."""
        logs = self.weights.log().expand(count, -1)
        if classes is None or self.classes is None:
            return logs
        allowed = self.classes == torch.as_tensor(classes).cpu().reshape(-1, 1)
        return logs.masked_fill(~(allowed | ~allowed.any(1, keepdim=True)), -math.inf).log_softmax(1)

    def sample(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        classes: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draws of x0, of ``shape`` [B, *item]: μ + D^½ z + Vᵀ z' of a component by the weights, or by those of the
        components of each image's class [B] or [1]. A class that the mixture does not have stands for any."""
        shape = check_sizes(shape)
        if shape[1:] != self.shape:
            raise InputError("shape", shape, f"must end in {self.shape}", "put the number of draws in front")
        check_place(dtype, device)
        count, work = shape[0], torch.promote_types(dtype, torch.float32)
        require_memory("shape", shape, 16 * math.prod(map(float, shape)), "draw fewer at a time")
        source = as_generator(generator, count)
        shares = self.log_weights(count, classes).exp().cumsum(1)
        component = (uniform(count, source, device="cpu")[:, None] >= shares / shares[:, -1:]).sum(1)
        numbers, along = (white_noise(each, source, dtype=work, device="cpu") for each in (shape, (count, self.rank)))
        deviations = self.variances.sqrt().to(work)[component].reshape(count, *self._leading, *self.basis.event_shape)
        x = self.basis.synthesise(self.basis.white(numbers) * deviations) + self.means.to(work)[component]
        for k in component.unique().tolist() if self.rank else ():
            images = component == k
            x[images] += row_product(
                along[images], padded(self.factors[k].flatten(1).to(work)), math.prod(self.shape)
            ).reshape(-1, *self.shape)
        return x.to(device, dtype)

    def at(self, level: Level = CLEAN, covariance: Covariance | None = None) -> "Marginal":
        """The law of x at a level of a process with this Σ, which must be diagonal in the basis of D."""
        if covariance is None:
            return Marginal(self, level.signal, Modes(0.0))
        covariance.check_trailing(self.shape, "mixture")
        try:
            return Marginal(self, level.signal, level.sigma**2 * covariance)
        except InputError as error:
            problem = f"has components in {self.basis!r}, which is not the basis of Σ = {covariance!r}"
            raise InputError("mixture", None, problem, "fit it by fit_mixture(data, basis=Σ)") from error

    def log_prob(self, x: Tensor, classes: Tensor | None = None) -> Tensor:
        """log of the density in nats per item of x [B, *item], given the class of each if it is known."""
        return self._clean.log_prob(x, classes)

    def bits_per_dim(self, x: Tensor, *, bin_width: float = 2 / 255, classes: Tensor | None = None) -> Tensor:
        """−log₂ density per dimension of data quantised with ``bin_width``, as of `GaussianModel`."""
        return as_bits(self.log_prob(x, classes), math.prod(self.shape), bin_width)

    def denoiser(self, process: "Process") -> "Denoiser":
        """E[x0 | x] of data from this model, which needs no network; it takes ``class_labels``."""
        from nidiff.diffusion.denoiser import Denoiser

        @lru_cache(2)
        def marginal(row: float) -> Marginal:
            return self.at(process.schedule.level(row), process.covariance)

        def expected(x: Tensor, label: Tensor, class_labels: Tensor | None = None) -> Tensor:
            result = torch.empty_like(x)
            for row in label.unique().tolist():
                images = label == row
                classes = None if class_labels is None else class_labels[images]
                result[images] = marginal(row).expected(x[images], classes)
            return result

        return Denoiser(expected, process, "x0")

    def to_config(self) -> Config:
        """What rebuilds the model: its configuration, with the arrays in ``.tensors``."""
        basis = describe(self.basis, "basis.")
        arrays = {"weights": self.weights, "means": self.means, "variances": self.variances, "factors": self.factors}
        classes = None if self.classes is None else self.classes.tolist()
        return Config({"basis": dict(basis), "classes": classes}, {**arrays, **basis.tensors})

    @staticmethod
    def from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> "MixtureModel":
        """The inverse of `to_config`."""
        tensors = getattr(config, "tensors", {}) if tensors is None else tensors
        names = ("weights", "means", "variances", "factors")
        if not (isinstance(config, Mapping) and "basis" in config and all(name in tensors for name in names)):
            raise InputError("mixture", None, "lacks its basis or arrays", "give what to_config() returned")
        basis = build(config["basis"], tensors, ("basis",))
        weights, means, variances, factors = (tensors[name] for name in names)
        covariances = [Covariance(values, basis, argument="variances") for values in variances]
        return MixtureModel(weights, means, covariances, factors, config.get("classes"))

    @property
    def _leading(self) -> list[int]:
        """Axes of length 1 for those of an item that the basis is not over."""
        return [1] * (len(self.shape) - len(self.basis.event_shape))

    @cached_property
    def _clean(self) -> "Marginal":
        """The law of x0, which is expensive to prepare."""
        return self.at()

    def __repr__(self) -> str:
        return f"MixtureModel({len(self)} components of shape {self.shape}, rank {self.rank}, {self.basis!r})"


class Marginal:
    """A mixture at a level, with what its formulas need in float64: see the head of this module."""

    def __init__(self, mixture: MixtureModel, signal: Modes, noise: Modes) -> None:
        variances = Modes(mixture.variances, mixture.basis)
        total = signal**2 * variances + noise
        self._mixture, self._basis = mixture, total.basis or Pixels(mixture.shape)

        def table(modes: Modes) -> Tensor:  # [K, numbers of an item]
            values = total.map(lambda a, b: b.expand_as(a), modes).values
            axes = len(total.event_shape)
            values = values.reshape(len(mixture), *[1] * (len(mixture.shape) - axes), *values.shape[1:][:axes])
            return values.expand(len(mixture), *mixture.shape).flatten(1)

        self._total, self._signal = table(total), table(signal)
        self._variances = table(variances)
        self._gain, self._rest = table(signal * variances / total), table(noise / total)
        self._centres = self._analysed(mixture.means.double())
        self._turned, logdets = [], []
        for factor, spread, strength in zip(mixture.factors, self._total, self._signal, strict=True):
            rows = self._analysed(factor.double())
            scaled = rows * (strength / spread.sqrt())
            lower = torch.linalg.cholesky(scaled @ scaled.T + torch.eye(len(rows), dtype=torch.float64, device="cpu"))
            self._turned.append(torch.linalg.solve_triangular(lower, rows, upper=False))
            logdets.append(spread.log().sum() + 2 * lower.diagonal().log().sum())
        self._constants = -0.5 * (torch.stack(logdets) + self._total.shape[1] * math.log(2 * math.pi))

    def log_prob(self, x: Tensor, classes: Tensor | None = None) -> Tensor:
        """log of the density in nats per item of x [B, *item]; float64."""
        return self._log_joint(self._coefficients(x), classes).logsumexp(1)

    def expected(self, x: Tensor, classes: Tensor | None = None) -> Tensor:
        """E[x0 | x], in the dtype and on the device of x."""
        coefficients = self._coefficients(x)
        shares = self._log_joint(coefficients, classes).softmax(1)
        mean = torch.zeros_like(coefficients)
        for k in range(len(self._turned)):
            mean += shares[:, k, None] * self._mean(coefficients, k)
        return self._basis.synthesise(mean.reshape(x.shape)).to(x)

    @property
    def rank(self) -> int:
        """The number of rows of V."""
        return self._mixture.rank

    def components(self, x: Tensor, classes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """log p(k | x), of shape [B, K], and E[x0 | x, k], of shape [K, B, *item], in the widest dtype there is."""
        coefficients, wide = self._coefficients(x), widest(x.device)
        means = torch.stack([self._mean(coefficients, k) for k in range(len(self._turned))])
        means = self._basis.synthesise(means.reshape(-1, *x.shape))
        return self._log_joint(coefficients, classes).log_softmax(1).to(x.device, wide), means.to(x.device, wide)

    def covariance(self, k: int, v: Tensor) -> Tensor:
        """Cov[x0 | x, k] v = (D N/A) v + (N/A) Tᵀ T (N/A) v with N = sigma² Σ, of v [B, *item]."""
        coefficients, turned, rest = self._analysed(v.to("cpu", torch.float64)), self._turned[k], self._rest[k]
        result = self._left(k) * coefficients + rest * ((coefficients * rest) @ turned.T @ turned)
        return self._basis.synthesise(result.reshape(v.shape)).to(v)

    def vary(self, k: int, numbers: Tensor, along: Tensor) -> Tensor:
        """A draw of N(0, Cov[x0 | x, k]) from white ``numbers`` [B, *item] and others ``along`` V [B, rank]."""
        coefficients = self._left(k).sqrt() * self._basis.white(numbers.to("cpu", torch.float64)).flatten(1)
        coefficients = coefficients + self._rest[k] * (along.to("cpu", torch.float64) @ self._turned[k])
        return self._basis.synthesise(coefficients.reshape(numbers.shape)).to(numbers)

    def _left(self, k: int) -> Tensor:
        """D N/A: what x0 varies by, given x, in every mode of D."""
        return self._rest[k] * self._variances[k]

    def _mean(self, coefficients: Tensor, k: int) -> Tensor:
        u, along = self._along(coefficients, k)
        return self._centres[k] + self._gain[k] * u + self._rest[k] * (along @ self._turned[k])

    def _coefficients(self, x: Tensor) -> Tensor:
        expect("x", x, Tensor, TENSOR)
        if tuple(x.shape[1:]) != self._mixture.shape or not x.is_floating_point():
            problem = f"has shape {tuple(x.shape)} and dtype {x.dtype}"
            raise InputError("x", None, problem, f"give floats [B, *{self._mixture.shape}]")
        return self._analysed(x.to("cpu", torch.float64))

    def _along(self, coefficients: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """u, and T (signal/A) u, of a component."""
        u = coefficients - self._signal[k] * self._centres[k]
        return u, (u * (self._signal[k] / self._total[k])) @ self._turned[k].T

    def _log_joint(self, coefficients: Tensor, classes: Tensor | None) -> Tensor:
        """log of weight_k N_k(x) [B, K]."""
        squares = []
        for k, total in enumerate(self._total):
            u, along = self._along(coefficients, k)
            squares.append((u.square() / total).sum(1) - along.square().sum(1))
        logs = self._mixture.log_weights(len(coefficients), classes)
        return logs + self._constants - 0.5 * torch.stack(squares, 1)

    def _analysed(self, x: Tensor) -> Tensor:
        return self._basis.analyse(x).flatten(1)


def fit_mixture(
    data: Data,
    labels: Tensor | Sequence[int] | None = None,
    components: int | None = None,
    *,
    basis: Boundary | Covariance | Basis = "periodic",
    event_axes: int | None = None,
    rank: int | None = None,
    shrinkage: float = 0.02,
    floor: float = 1e-9,
    seed: int = 0,
) -> MixtureModel:
    """The mixture fitted to ``data`` [N, channels, *event] or [N, *event], or to an iterable of such batches, or of
    pairs of a batch and its labels: one Gaussian per class, or per cluster.

    C of a component is (1 − ρ) S + ρ W of its sample covariance S and of W, diagonal in the basis: the spectrum of S,
    its mean over the modes of the same rounded |k|. Of S the ``rank`` leading directions are stored and, of the rest,
    the spectrum: whatever the rank, C has the spectrum that `fit_gaussian` fits.

    Args:
        labels: the class of every item, whole numbers from 0.
        components: clusters by k-means of all data or, with labels, of every class; they need two passes. Default 1:
            a Gaussian per class or, without labels, one with the whole covariance of the data. A cluster of one item
            joins the nearest.
        basis: of D, as of `fit_gaussian`.
        event_axes: how many of the last axes are the event, as of `fit_gaussian`.
        rank: directions of each component, at most as many as there are. Default: all, or what 2²³ numbers hold.
        shrinkage: ρ from 0 to 1.
        floor: the least variance in W, as a share of the mean.
        seed: of k-means, and of the random directions by which the leading ones are looked for where these are few.
    """
    check_number("shrinkage", shrinkage, 0.0, 1.0)
    check_number("floor", floor, 0.0, 1.0)
    clusters = 1 if components is None else check_whole("components", components)
    known, has_classes = None if labels is None else check_labels("labels", labels), False
    if clusters > 1:
        known, has_classes = _clustered(data, known, clusters, seed)
    moments: dict[int, _Moments] = {}
    for x, keys in _batches(data, known):
        if not moments:
            item, spatial = tuple(x.shape[1:]), event_basis(basis, tuple(x.shape[1:]), event_axes)
            shift = x.mean(0)  # about which sums of squares round least
            fewest = 1 if known is None else len(known.unique())
            wanted = NUMBERS // (fewest * shift.numel()) if rank is None else check_whole("rank", rank, 0)
            few = 2 * wanted < shift.numel()
            probe = white_noise((shift.numel(), 2 * wanted), seed, dtype=torch.float64) if few else None
        has_classes = keys is not None if clusters == 1 else has_classes
        keys = torch.zeros(len(x), dtype=torch.long) if keys is None else keys
        for key in keys.unique().tolist():
            moments.setdefault(key, _Moments(spatial, probe)).add(x[keys == key] - shift)
    if not moments:
        raise InputError("data", None, "has no items", "give some")
    if rank is None:  # now that the number of components is known
        wanted = min(wanted, NUMBERS // (len(moments) * shift.numel()))
    names = sorted(moments)
    classes = [name // clusters for name in names] if has_classes else None
    parts = [
        moments[name].component("" if classes is None else f" of class {name // clusters}", wanted, shrinkage, floor)
        for name in names
    ]
    factors = torch.zeros(len(parts), max(len(part.factor) for part in parts), shift.numel(), dtype=torch.float64)
    for place, part in zip(factors, parts, strict=True):
        place[: len(part.factor)] = part.factor
    modes = spatial
    if len(item) > len(spatial.event_shape):
        channels = shift.numel() // spatial.size
        modes = PerMode(torch.eye(channels, dtype=torch.float64, device="cpu"), spatial)
    return MixtureModel(
        [moments[name].count for name in names],
        torch.stack([part.mean for part in parts]).reshape(-1, *item) + shift,
        [Covariance(part.variances.flatten(), modes, argument="data") for part in parts],
        factors.reshape(*factors.shape[:2], *item),
        classes,
    )


class _Component(NamedTuple):
    mean: Tensor  # [d]
    variances: Tensor  # of D, [channels, *event]
    factor: Tensor  # V [rank, d]


class _Moments:
    """The sums of a component: of items, of the squares of their coefficients, and S Ω for the ``probe`` Ω."""

    def __init__(self, spatial: Basis, probe: Tensor | None) -> None:
        self.spatial, self.probe = spatial, probe
        self.count = 0
        self.total: Tensor | float = 0.0
        self.powers: Tensor | float = 0.0
        self.products: Tensor | float = 0.0

    def add(self, x: Tensor) -> None:
        """Count items [B, *item]."""
        flat, spread = x.flatten(1), x.reshape(len(x), -1, *self.spatial.event_shape)
        self.count += len(x)
        self.total = self.total + flat.sum(0)
        self.powers = self.powers + self.spatial.power(spread).sum(0)
        self.products = self.products + flat.T @ (flat if self.probe is None else flat @ self.probe)

    def component(self, who: str, rank: int, shrinkage: float, floor: float) -> _Component:
        """The component of these items, with at most so many rows of V."""
        mean = torch.as_tensor(self.total) / self.count
        powers = self.powers / self.count - self.spatial.power(mean.reshape(-1, *self.spatial.event_shape))
        if self.count < 2 or not bool(powers.mean() > 1e-13 * mean.square().mean()):
            problem = f"has {self.count} item{'s' * (self.count != 1)}{who} or only equal ones"
            raise InputError("data", None, problem, "a component needs at least two that differ")
        powers = powers.clamp(min=0.0)
        target = smooth(powers, self.spatial).clamp(min=(floor * powers.mean()).item())
        powers = (1 - shrinkage) * powers + shrinkage * target
        probed = mean if self.probe is None else mean @ self.probe
        products = self.products / self.count - mean.outer(probed)
        factor = (1 - shrinkage) ** 0.5 * _leading(products, self.probe, rank)
        stored = self.spatial.power(factor.reshape(len(factor), *powers.shape)).sum(0)
        # Of all directions exactly ρ W is left; rounding may leave less.
        return _Component(mean, torch.maximum(powers - stored, max(shrinkage, floor) * target), factor)


def _leading(products: Tensor, probe: Tensor | None, rank: int) -> Tensor:
    """V [≤ rank, d] with VᵀV nearest to S, given S Ω for random Ω (Nyström's method, as Tropp et al. 2017 stabilise
    it), or S itself."""
    if probe is None:
        values, vectors = torch.linalg.eigh((products + products.T) / 2)
        columns = vectors * values.clamp(min=0.0).sqrt()
    else:
        shift = 1e-10 * products.norm()
        products = products + shift * probe
        inner = probe.T @ products
        lower = torch.linalg.cholesky((inner + inner.T) / 2)
        factor = torch.linalg.solve_triangular(lower, products.T, upper=False).T
        values, vectors = torch.linalg.eigh(factor.T @ factor)
        columns = factor @ vectors
    columns = columns[:, values > 1e-10 * values[-1]] if len(values) else columns
    return columns[:, max(columns.shape[1] - rank, 0) :].flip(1).T


def _clustered(data: Data, labels: Tensor | None, clusters: int, seed: int) -> tuple[Tensor, bool]:
    """class · clusters + cluster of every item, and whether there are classes."""
    if isinstance(data, Iterator):
        remedy = "give a tensor or a list of batches"
        raise InputError("data", None, "is an iterator, and clusters need two passes", remedy)
    coordinates, found, probe = [], [], None
    for x, keys in _batches(data, labels):
        flat = x.flatten(1)
        if probe is None:
            few = flat.shape[1] <= PROJECTED
            probe = torch.eye(flat.shape[1]).double() if few else white_noise((flat.shape[1], PROJECTED), seed).double()
        coordinates.append(flat @ probe)
        found.append(torch.zeros(len(x), dtype=torch.long) if keys is None else keys)
    points, classes = torch.cat(coordinates), torch.cat(found)
    groups = classes * clusters
    for label in classes.unique().tolist():
        mine = classes == label
        if int(mine.sum()) < 2 * clusters:
            who = "" if keys is None else f" of class {label}"
            problem = f"are too many for {int(mine.sum())} items{who}"
            raise InputError("components", clusters, problem, "a component needs at least two")
        groups[mine] += _k_means(points[mine], clusters, seed)
    return groups, keys is not None


def _k_means(points: Tensor, clusters: int, seed: int) -> Tensor:
    """The cluster of every point [N, n]: k-means++ and Lloyd's rounds; clusters of one point are left out."""
    source = as_generator(seed)
    centres = points[random_index(len(points), 1, source)]
    for _ in range(clusters - 1):
        nearest = torch.cdist(points, centres).amin(1).square().cumsum(0)
        chosen = torch.searchsorted(nearest, uniform(1, source).double() * nearest[-1]).clamp(max=len(points) - 1)
        centres = torch.cat([centres, points[chosen]])
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        counts = nearest.bincount(minlength=len(centres))
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = (sums / counts.clamp(min=1)[:, None])[counts > 1]
        if len(moved) == len(centres) and torch.equal(moved, centres):
            break
        centres = moved
    return nearest


def _batches(data: Data, labels: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches in float64 with the labels of their items: those given, or those of pairs, or none."""
    position, item = 0, None
    for batch in torch.as_tensor(data).split(BATCH) if hasattr(data, "__array__") else data:
        is_pair = isinstance(batch, tuple | list)
        x = as_numbers(batch[0] if is_pair else batch, "data")
        if x.ndim < 2 or not x.numel() or (item is not None and x.shape[1:] != item):
            problem = f"has a batch of shape {tuple(x.shape)}"
            raise InputError("data", None, problem, "give [N, channels, *event], all alike")
        check_finite("data", x)
        item, end = x.shape[1:], position + len(x)
        if labels is not None and end > len(labels):
            raise InputError("labels", None, f"has {len(labels)} for {end} or more items", "give one for each")
        keys = labels[position:end] if labels is not None else None
        if keys is None and is_pair:
            keys = check_labels("labels", batch[1], len(x))
        yield x, keys
        position = end
    if labels is not None and len(labels) != position:
        raise InputError("labels", None, f"has {len(labels)} for {position} items", "give one for each")


def check_labels(argument: str, labels: Any, count: int | None = None) -> Tensor:
    """Labels [N] as whole numbers from 0."""
    try:
        values = torch.as_tensor(labels).cpu()
        whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
    except (TypeError, ValueError, RuntimeError):
        whole = False
    if not whole or values.ndim != 1 or (count is not None and len(values) != count) or bool((values < 0).any()):
        wanted = "" if count is None else f" {count}"
        raise InputError(argument, labels, "is not a column of classes", f"give{wanted} whole numbers, 0 or more")
    return values.long()
