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

from nidiff.covariance.config import Config, build, describe
from nidiff.covariance.cross import CrossSpectral
from nidiff.covariance.grids import resampled
from nidiff.covariance.matrix import Channels
from nidiff.covariance.modes import Coefficient, Modes, elementwise
from nidiff.covariance.operator import Covariance, as_numbers, check_shape, check_sizes
from nidiff.covariance.spectral import Boundary, Fourier, Spectral, check_boundary, radial_mean, white_in
from nidiff.diffusion.schedule import Level, broadcast, interpolate
from nidiff.errors import TENSOR, InputError, expect, one_of
from nidiff.randomness import Generators
from nidiff.recipe import check_number, check_whole, plain

if TYPE_CHECKING:
    from nidiff.diffusion.denoiser import Denoiser
    from nidiff.diffusion.process import Process

BATCH = 1024  # items at a time


class Wiener(NamedTuple):
    """What the Gaussian model says of one level, per mode."""

    mean: Tensor  # μ
    signal: Any
    total: Any  # the variance of x
    gain: Any  # E[x0 | x] = μ + gain (x − signal μ)
    spread: Any  # the standard deviation of x0 given x
    angle: Any  # θ, from 0 (noise) to π/2 (data)

    def to_z(self, x: Tensor) -> Tensor:
        """z = total^-½ (x − signal μ): variance 1 in every mode."""
        return broadcast(self.total**-0.5, x) * (x - self._centre(x))

    def from_z(self, z: Tensor) -> Tensor:
        """The inverse: x = signal μ + total^½ z."""
        return self._centre(z) + broadcast(self.total**0.5, z) * z

    def residual(self, x: Tensor, x0: Tensor) -> Tensor:
        """F at x, for any x̂0: (x̂0 − E[x0 | x]) / spread."""
        return (x0 - self.mean.to(x) - broadcast(self.gain, x) * (x - self._centre(x))) / broadcast(self.spread, x)

    @property
    def sin(self) -> Any:
        """√(signal² C / total): the share of the signal in x, as an amplitude."""
        return elementwise(torch.sin, self.angle)

    @property
    def cos(self) -> Any:
        return elementwise(torch.cos, self.angle)

    def _centre(self, like: Tensor) -> Tensor:
        return broadcast(self.signal, like) * self.mean.to(like).expand_as(like)


class GaussianModel:
    """N(μ, C): ``mean`` [channels, *event] (or without channels), and C over the same axes, or over the last of them
    and the same for all channels."""

    def __init__(self, mean: Tensor, covariance: Covariance) -> None:
        expect("covariance", covariance, Covariance)
        covariance.require_invertible("a Gaussian model with this C")
        self.mean = as_numbers(mean, "mean").detach()
        if not bool(torch.isfinite(self.mean).all()):
            raise InputError("mean has NaN or infinite entries: give finite numbers.")
        covariance.check_trailing(tuple(self.mean.shape), "mean")
        self.covariance = covariance

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one item."""
        return tuple(self.mean.shape)

    @property
    def variance(self) -> Coefficient:
        """C, per mode; a number if it is the same for all, which is so in every basis."""
        values = self.covariance.eigenvalues
        return values.flatten()[0].item() if self.covariance.is_constant else Modes(values, self.covariance)

    @property
    def spatial(self) -> Covariance:
        """What gives the basis over the axes that Σ is over."""
        return self.covariance.spatial

    def spectrum(self, covariance: Covariance) -> Tensor:
        """C per mode of Σ, float64 of Σ's shape: the mean over the channels where they differ."""
        self.noise(covariance)
        values = self.covariance.eigenvalues
        return values.reshape(-1, *covariance.event_shape).mean(0)

    def noise(self, covariance: Covariance) -> Coefficient:
        """The eigenvalues of Σ for the modes of C. A Σ that is diagonal in another basis is refused."""
        event = covariance.event_shape
        if covariance.is_constant and self.shape[len(self.shape) - len(event) :] == event:
            return covariance.eigenvalues.flatten()[0].item()
        if event not in (self.spatial.event_shape, self.covariance.event_shape):
            raise InputError(
                f"gaussian is over {self.spatial.event_shape}, and Σ over {event}: fit it to data of that shape."
            )
        for own in (self.covariance, self.spatial):
            if self.covariance.is_constant or own.shares_basis(covariance):
                return Modes(covariance.eigenvalues, covariance)
        over_channels = covariance.spatial is not covariance
        remedy = (
            "use a Σ over the event alone" if over_channels else "fit it in Σ's basis by fit_gaussian(data, basis=Σ)"
        )
        raise InputError(
            f"gaussian has the modes of {self.covariance!r}, which are not those of Σ = {covariance!r}: {remedy}."
        )

    def at(self, level: Level, covariance: Covariance) -> Wiener:
        """The model at a level of a process with this Σ."""
        variance: Any = self.variance
        data = level.signal**2 * variance
        noise = level.sigma**2 * self.noise(covariance)
        total = data + noise
        return Wiener(
            mean=self.mean,
            signal=level.signal,
            total=total,
            gain=level.signal * variance / total,
            spread=(variance * noise / total) ** 0.5,
            angle=elementwise(torch.atan2, data**0.5, noise**0.5),
        )

    def whiten(self, x0: Tensor) -> Tensor:
        """C^-½ (x0 − μ)."""
        return self.covariance.inv_sqrt(x0 - self.mean.to(x0))

    def colour(self, z: Tensor) -> Tensor:
        """μ + C^½ z."""
        return self.mean.to(z) + self.covariance.sqrt(z)

    def denoiser(self, process: "Process") -> "Denoiser":
        """E[x0 | x] of data from this model, which needs no network."""
        from nidiff.diffusion.denoiser import Denoiser, silent

        return Denoiser(silent, process, "residual", gaussian=self)

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
            raise InputError("level and noise=Σ say together which noisy data to draw: give both, or neither.")
        if len(shape) <= len(self.shape) or shape[-len(self.shape) :] != self.shape:
            raise InputError(f"shape={shape} must end in {self.shape}, with the number of draws in front.")
        white = self.covariance.with_eigenvalues(torch.ones_like(self.covariance.eigenvalues))
        z = white.sample(shape, generator, dtype=dtype, device=device)
        return self.colour(z) if level is None or noise is None else self.at(level, noise).from_z(z)

    def log_prob(self, x: Tensor) -> Tensor:
        """log N(x; μ, C) in nats per item of x [B, *item]."""
        self._check_items("x", x)
        return self.covariance.log_prob(x - self.mean.to(x))

    def bits_per_dim(self, x: Tensor, *, bin_width: float = 2 / 255) -> Tensor:
        """−log₂ density per dimension of data quantised with ``bin_width``: the baseline of `nidiff.bits_per_dim`."""
        check_bins(bin_width)
        return as_bits(self.log_prob(x), math.prod(self.shape), bin_width)

    def power(self, exponent: float) -> Covariance:
        """Σ ∝ C^p over the axes of the event, with mean variance 1: 0 is white, 1 has the data's own spectrum.

        Where channels differ, C is their mean.
        """
        spectrum = self.spectrum(self.spatial) ** check_number("exponent", exponent)
        return self.spatial.with_eigenvalues(spectrum / spectrum.mean())

    def on_grid(self, shape: Sequence[int]) -> "GaussianModel":
        """The model of the same data on a grid of another ``shape`` of the event: see `Covariance.at`."""
        covariance = self.covariance.at(shape)
        return GaussianModel(resampled(self.mean, self.spatial, covariance.spatial.event_shape), covariance)

    def _check_items(self, argument: str, x: Tensor) -> None:
        expect(argument, x, Tensor, TENSOR)
        if tuple(x.shape[1:]) != self.shape or not x.is_floating_point():
            raise InputError(
                f"{argument} has shape {tuple(x.shape)}: give floats [B, {', '.join(map(str, self.shape))}]."
            )

    def to_config(self) -> Config:
        """What rebuilds the model: its configuration, with the arrays in ``.tensors``."""
        covariance = describe(self.covariance, "covariance.")
        return Config({"covariance": dict(covariance)}, {"mean": self.mean, **covariance.tensors})

    @staticmethod
    def from_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> "GaussianModel":
        """The inverse of `to_config`."""
        tensors = getattr(config, "tensors", {}) if tensors is None else tensors
        known = isinstance(config, Mapping) and isinstance(tensors, Mapping)
        if not (known and "covariance" in config and "mean" in tensors):
            raise InputError("gaussian must be what GaussianModel.to_config() returned, with its arrays.")
        return GaussianModel(tensors["mean"], build(config["covariance"], tensors))

    def __repr__(self) -> str:
        return f"GaussianModel(shape={self.shape}, covariance={self.covariance!r})"


def check_bins(bin_width: float) -> None:
    """Refuse a width of bins that is not a positive number."""
    if not check_number("bin_width", bin_width) > 0:
        raise InputError(f"bin_width={bin_width} must be positive.")


def as_bits(log_density: Tensor, dimensions: int, bin_width: float) -> Tensor:
    """−log₂ of a density in nats, per dimension, for data quantised with ``bin_width``."""
    return -(log_density / dimensions + math.log(bin_width)) / math.log(2)


class Kappa(NamedTuple):
    """What `nidiff.measure_kappa` found of a network, at some rows of the schedule and for every mode.

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
        kappa, trust = (Modes(table, gaussian.covariance) for table in tables)
        return kappa, trust

    def check(self, gaussian: GaussianModel, num_levels: int | None = None) -> None:
        """Refuse tables that are not of this Gaussian's modes, of another schedule's rows, or not from 0 to 1."""
        rows, modes = self.rows, gaussian.covariance.event_shape
        sound = isinstance(rows, Tensor) and rows.ndim == 1 and len(rows) > 1 and bool((rows.diff() > 0).all())
        for table in (self.values, self.trust):
            sound = sound and isinstance(table, Tensor) and table.is_floating_point()
            sound = sound and tuple(table.shape) == (len(rows), *modes) and bool(((table >= 0) & (table <= 1)).all())
        if not sound:
            raise InputError(
                f"kappa must have 2 or more rising rows, and for each two numbers from 0 to 1 per mode {modes} of the "
                "gaussian: measure it by nidiff.measure_kappa(denoiser, data)."
            )
        if num_levels is not None and rows[-1].item() != num_levels - 1:
            raise InputError(
                f"kappa was measured on a schedule of {rows[-1].item() + 1:.0f} levels, and this one has {num_levels}: "
                "measure it again by nidiff.measure_kappa(denoiser, data)."
            )


def fit_gaussian(
    data: Tensor | Iterable[Tensor],
    *,
    basis: Boundary | Covariance = "periodic",
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
    shrinkage = check_number("shrinkage", shrinkage)
    if not 0 <= shrinkage <= 1:
        raise InputError(f"shrinkage={shrinkage} must be from 0 (the data's own spectrum) to 1 (a smooth one).")
    if not 0 <= check_number("floor", floor) < 1:
        raise InputError(f"floor={floor} must be from 0 to below 1.")
    moments = _moments(data, basis, event_axes)
    spatial, mean, cross, lag = moments
    axes = len(spatial.event_shape)
    if average == "radial" and spatial.wavenumbers is None:
        raise InputError("average='radial' needs wavenumbers: use basis 'periodic', 'reflecting' or 'fixed'.")
    share = 1.0 if average == "radial" else shrinkage
    cross = (1 - share) * cross + share * _smooth(cross, spatial)
    lag = (1 - share) * lag  # odd in k: its mean over all of the same |k| is 0
    own = cross.diagonal(dim1=0, dim2=1).movedim(-1, 0)  # [channels, *event]
    if channels == "shared" or mean.ndim == axes:
        values, covariance = own.mean(0), spatial
    elif channels == "each":
        # Any diagonal matrix has the channels as its axes, if its entries differ: those of I are not determined.
        numbers = torch.arange(1, len(own) + 1, dtype=torch.float64, device="cpu")
        values, covariance = own, Channels(numbers.diag(), spatial)
    elif channels == "joint":
        matrix = cross.flatten(2).mean(2)
        matrix = (matrix + matrix.T) / 2
        # Channels that are copies of each other have axes, too.
        matrix = matrix + 1e-6 * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64, device="cpu")
        joint = Channels(matrix, spatial)
        values, covariance = torch.einsum("ci,cd...,di->i...", joint.rotation, cross, joint.rotation), joint
    else:
        covariance = _cross_spectral(cross, lag, spatial)
        values = covariance.eigenvalues
    mean_variance = values.mean()
    values = values.clamp(min=(floor * mean_variance).item())
    if not bool((values > 1e-30 * mean_variance).all()):
        mode = (values <= 1e-30 * mean_variance).nonzero()[0].tolist()
        raise InputError(
            f"data has no variance in mode {tuple(mode)}, so C has no inverse: raise shrinkage or floor, or remove "
            "what is constant."
        )
    return GaussianModel(mean, covariance.with_eigenvalues(values))


def _cross_spectral(cross: Tensor, lag: Tensor, spatial: Covariance) -> CrossSpectral:
    """One matrix per mode; what rounding left below 0 of those of copies, or of fewer items than channels, is 0."""
    spectrum = torch.complex(spatial.evened(cross), lag).movedim((0, 1), (-2, -1))
    values, vectors = torch.linalg.eigh((spectrum + spectrum.mH) / 2)
    spectrum = (vectors * values.clamp(min=0.0).unsqueeze(-2)) @ vectors.mH
    spectrum = (spectrum + spectrum.mH) / 2
    quadrature = spectrum.imag if bool((lag != 0).any()) else None
    return CrossSpectral(spectrum.real, spatial, quadrature=quadrature, normalize=False, allow_singular=True)


def _smooth(cross: Tensor, spatial: Covariance) -> Tensor:
    """The mean over the modes of the same rounded |k|; over all, where there is no |k|."""
    if spatial.wavenumbers is None:
        return cross.flatten(2).mean(2).reshape(*cross.shape[:2], *[1] * len(spatial.event_shape)).expand_as(cross)
    shell = spatial.wavenumbers.round().long()
    return radial_mean(cross, shell)[..., shell]


class _Moments(NamedTuple):
    spatial: Covariance
    mean: Tensor  # [channels, *event], or [*event]
    cross: Tensor  # [channels, channels, *event]: covariances between channels of every mode
    lag: Tensor  # the imaginary part of the same, of waves


def _moments(data: Tensor | Iterable[Tensor], basis: Boundary | Covariance, event_axes: int | None) -> _Moments:
    """Mean and covariance per mode, in one pass."""
    if not isinstance(data, Tensor) and hasattr(
        data, "__array__"
    ):  # of numpy: else its items would be taken for batches
        data = as_numbers(data, "data")
    batches: Any = data
    if isinstance(data, Tensor):
        batches = data.split(BATCH) if data.ndim else None
    if isinstance(data, str | bytes) or not isinstance(batches, Iterable):
        raise InputError(f"data is a {type(data).__name__}: give a tensor [N, channels, *event], or batches of one.")
    spatial, total, cross, lag, count, item = None, None, None, None, 0, None
    for batch in batches:
        batch = batch if isinstance(batch, Tensor) else as_numbers(batch, "data")
        if (
            batch.ndim < 2
            or not batch.numel()
            or batch.is_complex()
            or (item is not None and tuple(batch.shape[1:]) != item)
        ):
            raise InputError(f"data has a batch of shape {tuple(batch.shape)}: give [N, channels, *event], all alike.")
        if spatial is None:
            item = tuple(batch.shape[1:])
            spatial = _basis(basis, item, event_axes)
        channels = math.prod(batch.shape[1 : batch.ndim - len(spatial.event_shape)])
        x = batch.detach().double().cpu().reshape(len(batch), channels, *spatial.event_shape)
        own_total, (own_cross, own_lag) = x.sum(0), _cross_spectrum(x, spatial)
        total = own_total if total is None else total + own_total
        cross = own_cross if cross is None else cross + own_cross
        lag = own_lag if lag is None else lag + own_lag
        count += len(x)
    if spatial is None or total is None or cross is None or lag is None or item is None or count < 2:
        raise InputError(f"data has {count} item{'s' * (count != 1)}: the covariance needs at least two.")
    mean = total / count
    # The mean is removed afterwards: E|x̂|² − |mean̂|², of which rounding may leave a little below 0.
    of_mean, lag_of_mean = _cross_spectrum(mean.unsqueeze(0), spatial)
    cross, lag = cross / count - of_mean, lag / count - lag_of_mean
    if not bool(torch.isfinite(cross).all()):
        raise InputError("data has NaN or infinite values: remove them first.")
    own = cross.diagonal(dim1=0, dim2=1)
    own.clamp_(min=0.0)
    if bool(own.mean() <= 1e-13 * mean.square().mean()):
        raise InputError("data has the same values in every item, so C has no inverse: give items that differ.")
    return _Moments(spatial, mean.reshape(item), cross, lag)


def _cross_spectrum(x: Tensor, spatial: Covariance) -> tuple[Tensor, Tensor]:
    """Σ over items of x̂_c x̂_d* per mode: the real and the imaginary part, [channels, channels, *event] each."""
    if isinstance(spatial, Fourier):
        waves = torch.fft.fftn(x, dim=tuple(range(2, x.ndim)), norm="ortho")
        both = _products(waves, waves.conj())
        return both.real.contiguous(), both.imag.contiguous()
    coefficients = spatial.in_real_basis().to_basis(x)
    cross = spatial.evened(_products(coefficients, coefficients))
    if not isinstance(spatial, Spectral):
        return cross, torch.zeros_like(cross)
    # Of real coefficients x(k) = Re x̂ − Im x̂.
    across = _products(coefficients, spatial.mirrored(coefficients))
    return cross, (across.transpose(0, 1) - across) / 2


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Σ over items of a_c b_d: [channels, channels, *event]. An einsum would make a small matrix product of each mode,
    which is ten times slower."""
    return torch.stack([torch.stack([(one * other).sum(0) for other in b.unbind(1)]) for one in a.unbind(1)])


def _basis(basis: Boundary | Covariance, item: tuple[int, ...], event_axes: int | None) -> Covariance:
    if isinstance(basis, Covariance):
        if basis.spatial is not basis:
            raise InputError("basis is over channels too: give the covariance over the event alone.")
        if event_axes not in (None, len(basis.event_shape)) or item[-len(basis.event_shape) :] != basis.event_shape:
            raise InputError(f"basis is over {basis.event_shape}, and data has items {item}: build it for their shape.")
        return basis
    check_boundary(basis, "basis")
    axes = max(len(item) - 1, 1) if event_axes is None else check_whole("event_axes", plain(event_axes), 1, len(item))
    return white_in(basis, check_shape(item[-axes:]), "basis")
