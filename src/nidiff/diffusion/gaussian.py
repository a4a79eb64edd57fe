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
from nidiff.covariance.checks import as_numbers, check_between, check_finite, check_sizes
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

    @property
    def sin(self) -> Modes:
        """√(signal² C / total): the share of the signal in x, as an amplitude."""
        return self.angle.map(torch.sin)

    @property
    def cos(self) -> Modes:
        return self.angle.map(torch.cos)

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
        self,
        shape: Sequence[int],
        generator: Generators = None,
        *,
        level: Level | None = None,
        noise: Covariance | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draws of ``shape`` [B, *item]; with a ``level`` and Σ = ``noise``, of x at that level."""
        shape = check_sizes(shape)
        if (level is None) != (noise is None):
            raise InputError("level", None, "says with `noise` which noisy data to draw", "give both, or neither")
        if len(shape) <= len(self.shape) or shape[-len(self.shape) :] != self.shape:
            raise InputError("shape", shape, f"must end in {self.shape}", "put the number of draws in front")
        white = self.covariance.with_eigenvalues(torch.ones_like(self.covariance.eigenvalues))
        z = white.sample(shape, generator, dtype=dtype, device=device)
        return self.colour(z) if level is None or noise is None else self.at(level, noise).from_z(z)

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x; μ, C) in nats per item of x [B, *item]."""
        expect("x", x, Tensor, TENSOR)
        if tuple(x.shape[1:]) != self.shape or not x.is_floating_point():
            raise InputError("x", None, f"has shape {tuple(x.shape)}", f"give floats [B, *{self.shape}]")
        return self.covariance.log_prob(x - self.mean.to(x))

    def bits_per_dim(self, x: Tensor, *, bin_width: float = 2 / 255) -> Tensor:
        """−log₂ density per dimension of data quantised with ``bin_width``: the baseline of `nidiff.bits_per_dim`."""
        check_bins(bin_width)
        return as_bits(self.log_prob(x), math.prod(self.shape), bin_width)

    def power(self, exponent: float) -> Covariance:
        """Σ ∝ C^p over the axes of the event, with mean variance 1: 0 is white, 1 has the data's own spectrum.

        Where channels differ, C is their mean.
        """
        values = self.covariance.values.reshape(-1, *self.spatial.event_shape).mean(0)
        return Covariance(values ** check_number("exponent", exponent), self.spatial, normalize=True)

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


def check_bins(bin_width: float) -> None:
    """Refuse a width of bins that is not a positive number."""
    if not check_number("bin_width", bin_width) > 0:
        raise InputError("bin_width", bin_width, "is not positive", "give the distance of two grey levels, 2/255")


def as_bits(log_density: Tensor, dimensions: int, bin_width: float) -> Tensor:
    """−log₂ of a density in nats, per dimension, for data quantised with ``bin_width``."""
    return -(log_density / dimensions + math.log(bin_width)) / math.log(2)


class Kappa(NamedTuple):
    """What `nidiff.design.measure_kappa` found of a network, at some rows of the schedule and for every mode.

    κ = E (βF)² is the share of the residual that it explains: 0 for Gaussian data, where nothing is left to explain; 1
    where x0 is known. β is how far F can be trusted: the factor that brings βF nearest to what F should be.
    """

    rows: Tensor  # [n], rising
    values: Tensor  # κ [n, *modes of C], from 0 to 1
    trust: Tensor  # β, the same

    def at(self, level: Level, gaussian: GaussianModel) -> tuple[Modes, Modes]:
        """(κ, β) at a level, between the rows by interpolation."""
        position = torch.tensor(float(level.label), dtype=torch.float64, device="cpu")
        position = position.clamp(self.rows[0], self.rows[-1])
        tables = (interpolate(position, self.rows, table.double()) for table in (self.values, self.trust))
        kappa, trust = (Modes(table, gaussian.covariance.basis) for table in tables)
        return kappa, trust

    def check(self, gaussian: GaussianModel, num_levels: int | None = None) -> None:
        """Refuse tables that are not of this Gaussian's modes, of another schedule's rows, or not from 0 to 1."""
        rows, modes = self.rows, gaussian.covariance.event_shape
        remedy = "measure it again by nidiff.design.measure_kappa(denoiser, data)"
        sound = rows.ndim == 1 and len(rows) > 1 and bool((rows.diff() > 0).all())
        for table in (self.values, self.trust):
            sound = sound and tuple(table.shape) == (len(rows), *modes) and bool(((table >= 0) & (table <= 1)).all())
        if not sound:
            problem = f"must have 2 or more rising rows, and for each two numbers from 0 to 1 per mode {modes}"
            raise InputError("kappa", None, problem, remedy)
        if num_levels is not None and rows[-1].item() != num_levels - 1:
            problem = f"is of a schedule of {rows[-1].item() + 1:.0f} levels, and this one has {num_levels}"
            raise InputError("kappa", None, problem, remedy)


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
    """The Gaussian fitted to ``data`` [N, channels, *event] (or [N, *event]), or to an iterable of such batches, once
    through.

    Args:
        basis: in which C is diagonal: that of a boundary, "periodic" (waves), "reflecting" (cosines), "fixed" (sines)
            or one of these per axis, or that of a covariance.
        event_axes: how many of the last axes are the event. Default: all but two (N and channels), or those of a
            covariance given as ``basis``.
        channels: "each" has a spectrum of its own, "shared" is one for all, "joint" has one spectrum for each
            principal axis of the channels (their eigenvectors, of colour say), and "cross" has the covariance matrix
            between channels of every mode: their spectra and cross spectra, phases included.
        average: "modes" (each mode its own variance) or "radial" (one for all of the same rounded |k|).
        shrinkage: ρ from 0 to 1, towards the mean over the modes of the same rounded |k|: (1 − ρ) C + ρ C(|k|); in a
            basis without wavenumbers, towards white. (White would drown the fine modes of a steep spectrum.)
        floor: the least variance of a mode, as a share of the mean.
    """
    one_of("channels", channels, ("each", "shared", "joint", "cross"))
    one_of("average", average, ("modes", "radial"))
    check_between("shrinkage", shrinkage, 0.0, 1.0)
    check_between("floor", floor, 0.0, 1.0)
    spatial, mean, cross, lag = _moments(data, basis, event_axes)
    if average == "radial" and spatial.wavenumbers is None:
        raise InputError("average", average, "needs wavenumbers", "use `basis` 'periodic', 'reflecting' or 'fixed'")
    share = 1.0 if average == "radial" else shrinkage
    cross = (1 - share) * cross + share * _smooth(cross, spatial)
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
    mean_variance = values.mean()
    values = values.clamp(min=(floor * mean_variance).item())
    if not bool((values > 1e-30 * mean_variance).all()):
        mode = tuple((values <= 1e-30 * mean_variance).nonzero()[0].tolist())
        problem = f"has no variance in mode {mode}, so C has no inverse"
        raise InputError("data", None, problem, "raise `shrinkage` or `floor`, or remove what is constant")
    return GaussianModel(mean, Covariance(values, modes))


def _cross_spectral(cross: Tensor, lag: Tensor, spatial: Basis) -> Covariance:
    """One matrix per mode. What rounding left below 0, with copied channels or fewer items than channels, is 0."""
    spectrum = torch.complex(spatial.evened(cross), lag).movedim((0, 1), (-2, -1))
    values, vectors = torch.linalg.eigh((spectrum + spectrum.mH) / 2)
    spectrum = (vectors * values.clamp(min=0.0).unsqueeze(-2)) @ vectors.mH
    spectrum = (spectrum + spectrum.mH) / 2
    quadrature = spectrum.imag if bool((lag != 0).any()) else None
    return CrossSpectral(spectrum.real, spatial, quadrature=quadrature, normalize=False, allow_singular=True)


def _smooth(cross: Tensor, spatial: Basis) -> Tensor:
    """The mean over the modes of the same rounded |k|; over all, where there is no |k|."""
    if spatial.wavenumbers is None:
        return cross.flatten(2).mean(2).reshape(*cross.shape[:2], *[1] * len(spatial.event_shape)).expand_as(cross)
    shell = spatial.wavenumbers.round().long()
    return radial_mean(cross, shell)[..., shell]


class _Moments(NamedTuple):
    spatial: Basis
    mean: Tensor  # [channels, *event], or [*event]
    cross: Tensor  # [channels, channels, *event]: covariances between channels of every mode
    lag: Tensor  # the imaginary part of the same, of waves


def _moments(data: Tensor | Iterable[Tensor], basis: Boundary | Covariance | Basis, event_axes: int | None) -> _Moments:
    """Mean and covariance per mode, in one pass."""
    if hasattr(data, "__array__"):  # of numpy too: else its items would be taken for batches
        data = (data if isinstance(data, Tensor) else as_numbers(data, "data")).split(BATCH)
    spatial: Basis | None = None
    sums: tuple[Tensor, ...] | None = None
    item: tuple[int, ...] = ()
    count = 0
    for batch in data:
        batch = batch if isinstance(batch, Tensor) else as_numbers(batch, "data")
        if batch.ndim < 2 or not batch.numel() or (spatial is not None and tuple(batch.shape[1:]) != item):
            problem = f"has a batch of shape {tuple(batch.shape)}"
            raise InputError("data", None, problem, "give [N, channels, *event], all alike")
        if spatial is None:
            item = tuple(batch.shape[1:])
            spatial = _basis(basis, item, event_axes)
        channels = math.prod(batch.shape[1 : batch.ndim - len(spatial.event_shape)])
        x = batch.detach().double().cpu().reshape(len(batch), channels, *spatial.event_shape)
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
    return _Moments(spatial, mean.reshape(item), cross, lag)


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


def _basis(basis: Boundary | Covariance | Basis, item: tuple[int, ...], event_axes: int | None) -> Basis:
    basis = basis.basis if isinstance(basis, Covariance) else basis
    if not isinstance(basis, Basis):
        axes = max(len(item) - 1, 1) if event_axes is None else check_whole("event_axes", event_axes, 1, len(item))
        return Waves(item[-axes:], basis, "basis")
    if basis.spatial is not basis:
        raise InputError("basis", None, "is over channels too", "give the covariance over the event alone")
    if event_axes not in (None, len(basis.event_shape)) or item[-len(basis.event_shape) :] != basis.event_shape:
        problem = f"is over {basis.event_shape}, and data has items {item}"
        raise InputError("basis", None, problem, "build it for their shape")
    return basis
