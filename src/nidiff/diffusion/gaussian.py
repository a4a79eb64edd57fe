"""The second Gaussian of the library: noise is N(0, Σ), and data are about N(μ, C).

Where C and Σ are diagonal in one basis, everything about Gaussian data under the process is one formula per mode. With
``total`` = signal² C + sigma² Σ, the covariance of x, and the angle θ of tan θ = signal √C / (sigma √Σ):

    E[x0 | x] = μ + gain (x − signal μ)      gain = signal C / total, the Wiener filter
    Var[x0 | x] = spread²                    spread = √C cos θ

Any x̂0 is then E[x0 | x] + spread · F, and in z = total^-½ (x − signal μ) the probability-flow ODE is dz = F dθ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nidiff.covariance.basis import Basis, PerMode
from nidiff.covariance.checks import as_numbers, check_finite, check_sizes
from nidiff.covariance.config import Config, build, describe
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.eigen import symmetric_eigen
from nidiff.covariance.families import CrossSpectral
from nidiff.covariance.grids import resampled
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import Boundary, Waves, radial_mean
from nidiff.diffusion.schedule import Level, interpolate
from nidiff.errors import TENSOR, InputError, expect, one_of
from nidiff.randomness import Generators
from nidiff.recipe import check_number, check_whole

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.diffusion.process import Process

BATCH = 1024  # items at a time


class Wiener(NamedTuple):
    """What the Gaussian model says of one level, per mode."""

    mean: Tensor  # μ
    signal: Modes
    total: Modes  # the variance of x
    gain: Modes  # E[x0 | x] = μ + gain (x − signal μ)
    spread: Modes  # the standard deviation of x0 given x
    angle: Modes  # θ, from 0 (noise) to π/2 (data)

    def to_z(self, x: Tensor) -> Tensor:
        """z = total^-½ (x − signal μ): variance 1 in every mode."""
        return self.total**-0.5 * (x - self._centre(x))

    def from_z(self, z: Tensor) -> Tensor:
        """The inverse: x = signal μ + total^½ z."""
        return self._centre(z) + self.total**0.5 * z

    def residual(self, x: Tensor, x0: Tensor) -> Tensor:
        """F at x, for any x̂0: (x̂0 − E[x0 | x]) / spread."""
        return (x0 - self.mean.to(x) - self.gain * (x - self._centre(x))) / self.spread

    def _centre(self, like: Tensor) -> Tensor:
        return self.signal * self.mean.to(like).expand_as(like)


class GaussianModel:
    """N(μ, C): ``mean`` [channels, *event] (or without channels), and C over the same axes, or over the last of them
    and the same for all channels."""

    def __init__(self, mean: Tensor, covariance: Covariance) -> None:
        expect("covariance", covariance, Covariance)
        covariance.require_invertible("a Gaussian model with this C")
        self.mean = as_numbers(mean, "mean").detach()
        check_finite("mean", self.mean)
        covariance.check_trailing(tuple(self.mean.shape), "mean")
        self.covariance = covariance

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one item."""
        return tuple(self.mean.shape)

    @property
    def spatial(self) -> Basis:
        """The basis over the event alone, without channels."""
        return self.covariance.basis.spatial

    @property
    def mean_spectrum(self) -> Tensor:
        """C per mode of the event: its mean over the channels where they differ."""
        return self.covariance.values.reshape(-1, *self.spatial.event_shape).mean(0)

    def check_basis(self, covariance: Covariance) -> Modes:
        """C/Σ per mode; a Σ that is diagonal in another basis than C, or over other axes, is refused."""
        covariance.check_trailing(self.shape, "gaussian")
        try:
            return Modes(self.covariance.values, self.covariance.basis) / covariance
        except InputError as error:
            over_channels = covariance.basis.spatial is not covariance.basis
            remedy = "use a Σ over the event alone" if over_channels else "fit it by fit_gaussian(data, basis=Σ)"
            problem = f"has the modes of {self.covariance!r}, which are not those of Σ = {covariance!r}"
            raise InputError("gaussian", None, problem, remedy) from error

    def spectrum(self, covariance: Covariance) -> Tensor:
        """C per mode of Σ, float64 of Σ's shape: the mean over the channels where they differ."""
        self.check_basis(covariance)
        return self.covariance.values.reshape(-1, *covariance.event_shape).mean(0)

    def at(self, level: Level, covariance: Covariance) -> Wiener:
        """The model at a level of a process with this Σ."""
        variance = Modes(self.covariance.values, self.covariance.basis)
        data, noise = level.signal**2 * variance, level.sigma**2 * covariance
        total = data + noise
        return Wiener(
            mean=self.mean,
            signal=level.signal,
            total=total,
            gain=level.signal * variance / total,
            spread=(variance * noise / total) ** 0.5,
            angle=(data**0.5).map(torch.atan2, noise**0.5),
        )

    def powers(self, z: Tensor) -> Tensor:
        """|z|² per item and mode of C [N, *modes]; channels that share a spectrum count as items."""
        return self.covariance.basis.power(z).reshape(-1, *self.covariance.event_shape)

    def whiten(self, x0: Tensor) -> Tensor:
        """C^-½ (x0 − μ)."""
        return self.covariance.inv_sqrt(x0 - self.mean.to(x0))

    def colour(self, z: Tensor) -> Tensor:
        """μ + C^½ z."""
        return self.mean.to(z) + self.covariance.sqrt(z)

    def denoiser(self, process: "Process") -> "Denoiser":
        """E[x0 | x] of data from this model, which needs no network."""
        from nidiff.diffusion.denoiser import Denoiser, zero_net

        return Denoiser(zero_net, process, "residual", gaussian=self)

    def sample(
        self, shape: Sequence[int], generator: Generators = None, *, state: Wiener | None = None, **place: Any
    ) -> Tensor:
        """Draws of ``shape`` [B, *item], of x0 or of x in the ``state`` that `at` gives; ``place`` as of Σ's."""
        shape = check_sizes(shape)
        if len(shape) <= len(self.shape) or shape[-len(self.shape) :] != self.shape:
            raise InputError("shape", shape, f"must end in {self.shape}", "put the number of draws in front")
        white = self.covariance.with_eigenvalues(torch.ones_like(self.covariance.eigenvalues))
        z = white.sample(shape, generator, **place)
        return self.colour(z) if state is None else state.from_z(z)

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x; μ, C) in nats per item of x [B, *item]."""
        expect("x", x, Tensor, TENSOR)
        if tuple(x.shape[1:]) != self.shape or not x.is_floating_point():
            raise InputError("x", None, f"has shape {tuple(x.shape)}", f"give floats [B, *{self.shape}]")
        return self.covariance.log_prob(x - self.mean.to(x))

    def bits_per_dim(self, x: Tensor, *, bin_width: float = 2 / 255) -> Tensor:
        """−log₂ density per dimension of data quantised with ``bin_width``: the baseline of `nidiff.bits_per_dim`."""
        return as_bits(self.log_prob(x), math.prod(self.shape), bin_width)

    def power(self, exponent: float) -> Covariance:
        """Σ ∝ C^p over the axes of the event, with mean variance 1: 0 is white, 1 has the data's mean spectrum."""
        return Covariance(self.mean_spectrum ** check_number("exponent", exponent), self.spatial, normalize=True)

    def on_grid(self, shape: Sequence[int]) -> "GaussianModel":
        """The model of the same data on a grid of another ``shape`` of the event: see `Covariance.at`."""
        covariance = self.covariance.at(shape)
        return GaussianModel(resampled(self.mean, self.spatial, covariance.spatial.event_shape), covariance)

    def to_config(self) -> Config:
        """What rebuilds the model: its configuration, with the arrays in ``.tensors``."""
        covariance = describe(self.covariance, "covariance.")
        return Config({"covariance": dict(covariance)}, {"mean": self.mean, **covariance.tensors})

    @staticmethod
    def from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> "GaussianModel":
        """The inverse of `to_config`."""
        tensors = getattr(config, "tensors", {}) if tensors is None else tensors
        if not (isinstance(config, Mapping) and "covariance" in config and "mean" in tensors):
            raise InputError("gaussian", None, "lacks its covariance or its mean", "give what to_config() returned")
        return GaussianModel(tensors["mean"], build(config["covariance"], tensors))

    def __repr__(self) -> str:
        return f"GaussianModel(shape={self.shape}, covariance={self.covariance!r})"


def as_bits(log_density: Tensor, dimensions: int, bin_width: float) -> Tensor:
    """−log₂ of a density in nats, per dimension, for data quantised with ``bin_width``."""
    return -(log_density / dimensions + math.log(check_number("bin_width", bin_width, above=0.0))) / math.log(2)


def common_basis(covariance: Covariance, gaussian: GaussianModel | None) -> Basis:
    """The basis over the event in which Σ and C are diagonal: that of Σ or, for white noise, which has any, of C."""
    return gaussian.spatial if gaussian is not None and covariance.is_constant else covariance.spatial


class Kappa(NamedTuple):
    """What `nidiff.design.measure_kappa` found of a network, at some rows of the schedule and for every mode.

    κ = E (βF)² is the share of the residual that it explains: 0 for Gaussian data, where nothing is left to explain; 1
    where x0 is known. β is how far F can be trusted: about the factor that brings βF nearest to what F should be.
    """

    rows: Tensor  # [n], rising
    values: Tensor  # κ [n, *modes of C], from 0 to 1
    trust: Tensor  # β, the same
    losses: Mapping[str, Tensor] = {}  # what `start` "gaussian" and "mixture" lose at the rows, in nats per dimension

    def at(self, level: Level, gaussian: GaussianModel) -> tuple[Modes, Modes]:
        """(κ, β) at a level, between the rows by interpolation."""
        position = torch.tensor(float(level.label), dtype=torch.float64, device="cpu")
        position = position.clamp(self.rows[0], self.rows[-1])
        tables = (interpolate(position, self.rows, table) for table in (self.values, self.trust))
        kappa, trust = (Modes(table, gaussian.covariance.basis) for table in tables)
        return kappa, trust

    def check(self, gaussian: GaussianModel, num_levels: int | None = None) -> None:
        """Refuse tables that are not of this Gaussian's modes, of another schedule's rows, or not from 0 to 1."""
        rows, modes = self.rows, gaussian.covariance.event_shape
        sound = rows.ndim == 1 and len(rows) > 1 and bool((rows.diff() > 0).all())
        sound = sound and (num_levels is None or rows[-1].item() == num_levels - 1)
        for column in self.losses.values():
            sound = sound and column.shape == rows.shape and bool((column >= 0).all()) and bool(column.isfinite().all())
        for table in (self.values, self.trust):
            sound = sound and tuple(table.shape) == (len(rows), *modes) and bool(((table >= 0) & (table <= 1)).all())
        if not sound:
            problem = f"has not two numbers from 0 to 1 for every mode {modes}, at rising rows up to the noisiest"
            raise InputError("kappa", None, problem, "measure it again by nidiff.design.measure_kappa(denoiser, data)")


def fit_gaussian(
    data: Tensor | Iterable[Tensor],
    *,
    basis: Boundary | Covariance | Basis = "periodic",
    event_axes: int | None = None,
    channels: str = "each",
    average: str = "modes",
    shrinkage: float = 0.02,
    floor: float = 1e-9,
) -> GaussianModel:
    """The Gaussian fitted to ``data`` [N, channels, *event] or [N, *event], or to an iterable of such batches.

    Args:
        basis: in which C is diagonal: a boundary ("periodic", "reflecting", "fixed", or one per axis), or a covariance.
        event_axes: how many of the last axes are the event. Default: all but two, or those of ``basis``.
        channels: "each" has a spectrum of its own, "shared" is one for all, "joint" has one for each principal axis of
            the channels, and "cross" has a matrix between channels per mode: cross spectra, phases included.
        average: "modes" (each mode its own variance) or "radial" (one for all of the same rounded |k|).
        shrinkage: ρ from 0 to 1, towards the mean over the modes of the same rounded |k|: (1 − ρ) C + ρ C(|k|); in a
            basis without wavenumbers, towards white. (White would drown the fine modes of a steep spectrum.)
        floor: the least variance of a mode, as a share of the mean.
    """
    one_of("channels", channels, ("each", "shared", "joint", "cross"))
    one_of("average", average, ("modes", "radial"))
    check_number("shrinkage", shrinkage, 0.0, 1.0)
    check_number("floor", floor, 0.0, 1.0)
    spatial, mean, cross, lag = _moments(data, basis, event_axes)
    if average == "radial" and spatial.wavenumbers is None:
        raise InputError("average", average, "needs wavenumbers", "use `basis` 'periodic', 'reflecting' or 'fixed'")
    share = 1.0 if average == "radial" else shrinkage
    cross = (1 - share) * cross + share * smooth(cross, spatial)
    lag = (1 - share) * lag  # odd in k: its mean over all of the same |k| is 0
    powers = cross.diagonal(dim1=0, dim2=1).movedim(-1, 0)  # [channels, *event]
    modes = spatial
    if channels == "shared" or mean.ndim == len(spatial.event_shape):
        values = powers.mean(0)
    elif channels == "each":
        values, modes = powers, PerMode(torch.eye(len(powers), dtype=torch.float64, device="cpu"), spatial)
    elif channels == "joint":
        matrix = cross.flatten(2).mean(2)
        _, axes = symmetric_eigen((matrix + matrix.T) / 2, "data")
        values, modes = torch.einsum("ci,cd...,di->i...", axes, cross, axes), PerMode(axes, spatial)
    else:
        covariance = _cross_spectral(cross, lag, spatial)
        values, modes = covariance.values, covariance.basis
    values = values.clamp(min=(floor * values.mean()).item())
    if bool((values <= 1e-30 * values.mean()).any()):
        remedy = "raise `shrinkage` or `floor`, or remove what is constant"
        raise InputError("data", None, "has modes without variance, so that C has no inverse", remedy)
    return GaussianModel(mean, Covariance(values, modes))


def _cross_spectral(cross: Tensor, lag: Tensor, spatial: Basis) -> Covariance:
    """One matrix per mode. What rounding left below 0, with copied channels or fewer items than channels, is 0."""
    spectrum = torch.complex(spatial.evened(cross), lag).movedim((0, 1), (-2, -1))
    values, vectors = torch.linalg.eigh((spectrum + spectrum.mH) / 2)
    spectrum = (vectors * values.clamp(min=0.0).unsqueeze(-2)) @ vectors.mH
    spectrum = (spectrum + spectrum.mH) / 2
    quadrature = spectrum.imag if bool((lag != 0).any()) else None
    return CrossSpectral(spectrum.real, spatial, quadrature=quadrature, normalize=False, allow_singular=True)


def smooth(values: Tensor, spatial: Basis) -> Tensor:
    """Numbers per mode [..., *event] as their mean over the modes of the same rounded |k|, or where there is no |k|,
    over all."""
    if spatial.wavenumbers is None:
        return values.mean([*range(-len(spatial.event_shape), 0)], keepdim=True).expand_as(values)
    shell = spatial.wavenumbers.round().long()
    return radial_mean(values, shell)[..., shell]


def _moments(
    data: Tensor | Iterable[Tensor], basis: Boundary | Covariance | Basis, event_axes: int | None
) -> tuple[Basis, Tensor, Tensor, Tensor]:
    """The basis, the mean of an item, and the covariances between channels of every mode [channels, channels, *event]:
    their real part, and the imaginary part of waves. In one pass."""
    spatial: Basis | None = None
    sums: tuple[Tensor, ...] | None = None
    item: tuple[int, ...] = ()
    count = 0
    # An array of numpy, too, is the data: else its items would be taken for batches.
    for batch in torch.as_tensor(data).split(BATCH) if hasattr(data, "__array__") else data:
        x = as_numbers(batch, "data").detach()
        if x.ndim < 2 or not x.numel() or (spatial is not None and tuple(x.shape[1:]) != item):
            problem = f"has a batch of shape {tuple(x.shape)}"
            raise InputError("data", None, problem, "give [N, channels, *event], all alike")
        if spatial is None:
            item = tuple(x.shape[1:])
            spatial = event_basis(basis, item, event_axes)
        x = x.reshape(len(x), -1, *spatial.event_shape)
        new = (x.sum(0), *_cross_spectrum(x, spatial))
        sums = new if sums is None else tuple(total + more for total, more in zip(sums, new, strict=True))
        count += len(x)
    if spatial is None or sums is None or count < 2:
        raise InputError("data", None, f"has {count} item{'s' * (count != 1)}", "the covariance needs at least two")
    mean, cross, lag = (total / count for total in sums)
    # The mean is removed afterwards: E|x̂|² − |mean̂|², of which rounding may leave a little below 0.
    of_mean, lag_of_mean = _cross_spectrum(mean.unsqueeze(0), spatial)
    cross, lag = cross - of_mean, lag - lag_of_mean
    check_finite("data", cross)
    powers = cross.diagonal(dim1=0, dim2=1)
    powers.clamp_(min=0.0)
    if bool(powers.mean() <= 1e-13 * mean.square().mean()):
        raise InputError("data", None, "has the same values in every item", "give items that differ")
    return spatial, mean.reshape(item), cross, lag


def _cross_spectrum(x: Tensor, spatial: Basis) -> tuple[Tensor, Tensor]:
    """Σ over items of x̂_c x̂_d* per mode: the real and the imaginary part, [channels, channels, *event] each."""
    coefficients = spatial.analyse(x)
    cross = spatial.evened(_products(coefficients, coefficients))
    if not isinstance(spatial, Waves):
        return cross, torch.zeros_like(cross)
    # Of real coefficients x(k) = Re x̂ − Im x̂.
    across = _products(coefficients, spatial.mirrored(coefficients))
    return cross, (across.transpose(0, 1) - across) / 2


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Σ over items of a_c b_d: [channels, channels, *event]. An einsum would make a small matrix product of each mode,
    which is ten times slower."""
    return torch.stack([torch.stack([(left * right).sum(0) for right in b.unbind(1)]) for left in a.unbind(1)])


def event_basis(basis: Boundary | Covariance | Basis, item: tuple[int, ...], event_axes: int | None) -> Basis:
    """The basis over the event of an item that an argument ``basis`` means."""
    basis = basis.basis if isinstance(basis, Covariance) else basis
    if not isinstance(basis, Basis):
        axes = max(len(item) - 1, 1) if event_axes is None else check_whole("event_axes", event_axes, 1, len(item))
        return Waves(item[-axes:], basis, "basis")
    axes = len(basis.event_shape)
    if basis.spatial is not basis or event_axes not in (None, axes) or item[-axes:] != basis.event_shape:
        problem = f"is over {basis.event_shape}, and data has items {item}"
        raise InputError("basis", None, problem, "build it for the event alone, without channels")
    return basis
