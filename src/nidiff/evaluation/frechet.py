"""The Fréchet distance between two sets of features (FID; Heusel et al. 2017), and what features must be."""

from collections.abc import Callable

import torch
from torch import Tensor

from nidiff.errors import InputError

CHUNK = 1024  # points at a time


@torch.no_grad()
def frechet_distance(a: Tensor, b: Tensor) -> float:
    """‖μa − μb‖² + tr(Ca + Cb − 2 (Ca Cb)^½) of two sets of features [N, D], in float64.

    With any factors C = FᵀF, the eigenvalues of Ca Cb are the squared singular values of Fa Fbᵀ, so the trace of its
    root is their sum. For N ≤ D the centred features are such a factor: no D × D matrix is needed, and the zero
    eigenvalues of a covariance without full rank are not there to be rounded.
    """
    a, b = check_pair(a, b, "a", "b")
    return frechet_to(a)(b)


@torch.no_grad()
def frechet_to(a: Tensor) -> Callable[[Tensor], float]:
    """``frechet_distance(a, ·)``, with what depends on ``a`` alone computed once."""
    mean, factor = feature_mean(a), _factor(a)
    return torch.no_grad()(lambda b: _distance(mean, factor, feature_mean(b), _factor(b)))


@torch.no_grad()
def frechet_from_statistics(mu1: Tensor, sigma1: Tensor, mu2: Tensor, sigma2: Tensor) -> float:
    """The same from the means [D] and covariances [D, D], tensors or numpy arrays."""
    mu1, sigma1 = _check_statistics(mu1, sigma1, "1")
    mu2, sigma2 = _check_statistics(mu2, sigma2, "2")
    if len(mu1) != len(mu2):
        raise InputError(f"mu2 has {len(mu2)} dimensions and mu1 has {len(mu1)}: use the same features for both.")
    return _distance(mu1, _root(sigma1, "sigma1"), mu2.to(mu1.device), _root(sigma2, "sigma2").to(mu1.device))


@torch.no_grad()
def statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """The mean [D] and the unbiased covariance [D, D] of features [N, D], in float64."""
    check_features(features, "features")
    return feature_mean(features), _covariance(features)


def check_features(features: Tensor, name: str, least: int = 2) -> None:
    """Refuse what is not a finite float tensor [N, D] of ``least`` points or more."""
    if features.ndim != 2 or features.shape[1] == 0:
        raise InputError(f"{name} has shape {tuple(features.shape)}: give features of shape [N, D].")
    if not features.is_floating_point():
        raise InputError(f"{name} has dtype {features.dtype}: give float32 or float64.")
    if len(features) < least:
        raise InputError(f"{name} has too few points, {len(features)}: give {least} or more.")
    if not all(bool(torch.isfinite(chunk).all()) for chunk in features.split(CHUNK)):
        raise InputError(f"{name} has NaN or infinite features: remove those points.")


def check_pair(first: Tensor, second: Tensor, one: str, other: str, least: int = 2) -> tuple[Tensor, Tensor]:
    """Two sets of features of the same dimension, on the device of the first."""
    check_features(first, one, least)
    check_features(second, other, least)
    if first.shape[1] != second.shape[1]:
        raise InputError(
            f"{other} has {second.shape[1]} dimensions and {one} has {first.shape[1]}: use the same features for both."
        )
    return first, second.to(first.device)


def feature_mean(features: Tensor) -> Tensor:
    """The mean [D] in float64, in chunks: torch would make a float64 copy of all the features."""
    total = torch.zeros(features.shape[1], dtype=torch.float64, device=features.device)
    for chunk in features.split(CHUNK):
        total += chunk.double().sum(0)
    return total / len(features)


def _distance(mean_a: Tensor, factor_a: Tensor, mean_b: Tensor, factor_b: Tensor) -> float:
    shift = (mean_a - mean_b).square().sum()
    traces = factor_a.square().sum() + factor_b.square().sum()
    cross = torch.linalg.svdvals(factor_a @ factor_b.T).sum()
    return max((shift + traces - 2 * cross).item(), 0.0)  # below zero only by rounding


def _covariance(features: Tensor) -> Tensor:
    mean, size = feature_mean(features), features.shape[1]
    total = torch.zeros(size, size, dtype=torch.float64, device=features.device)
    for chunk in features.split(CHUNK):
        centred = chunk.double() - mean
        total.addmm_(centred.T, centred)
    return total / (len(features) - 1)


def _factor(features: Tensor) -> Tensor:
    """F with FᵀF = C and no more than D rows."""
    count, size = features.shape
    if count <= size:
        return (features.double() - feature_mean(features)) / (count - 1) ** 0.5
    return _root(_covariance(features), "features")


def _root(sigma: Tensor, name: str) -> Tensor:
    """F with FᵀF = Σ, one row per eigenvalue above rounding.

    The root of an eigenvalue that is zero but for rounding would be 1e-8 and not 1e-16 of the largest.
    """
    values, vectors = torch.linalg.eigh(sigma)
    largest = values[-1].clamp(min=0)
    if values[0] < -1e-6 * largest or (largest == 0 and values[0] < 0):
        raise InputError(f"{name} has a negative eigenvalue, {values[0].item():.3g}: give a covariance matrix.")
    kept = values > largest * len(values) * torch.finfo(values.dtype).eps
    return (vectors[:, kept] * values[kept].sqrt()).T


def _check_statistics(mu: Tensor, sigma: Tensor, number: str) -> tuple[Tensor, Tensor]:
    mu = torch.as_tensor(mu, dtype=torch.float64)
    sigma = torch.as_tensor(sigma, dtype=torch.float64, device=mu.device)
    if mu.ndim != 1 or len(mu) == 0:
        raise InputError(f"mu{number} has shape {tuple(mu.shape)}: give the mean of shape [D].")
    if tuple(sigma.shape) != (len(mu), len(mu)):
        raise InputError(
            f"sigma{number} has shape {tuple(sigma.shape)}, but mu{number} has {len(mu)} dimensions: give [D, D]."
        )
    for name, values in ((f"mu{number}", mu), (f"sigma{number}", sigma)):
        if not bool(torch.isfinite(values).all()):
            raise InputError(f"{name} has NaN or infinite entries: compute it from finite features.")
    if not torch.allclose(sigma, sigma.T, rtol=1e-5, atol=1e-6 * sigma.abs().max().item()):
        raise InputError(f"sigma{number} is not symmetric: give a covariance matrix.")
    return mu, (sigma + sigma.T) / 2
