"""The Fréchet distance between two sets of features (FID; Heusel et al. 2017)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.evaluation.points import CHUNK, Array, as_features, as_pair, as_tensor, mean


class Moments(NamedTuple):
    """A Gaussian in float64: its mean [D], and a factor F [R, D] of its covariance C = FᵀF."""

    mean: Tensor
    factor: Tensor


def frechet_distance(a: Array, b: Array) -> float:
    """‖μa − μb‖² + tr(Ca + Cb − 2 (Ca Cb)^½) of two sets of features [N, D], in float64.

    With any factors C = FᵀF, the eigenvalues of Ca Cb are the squared singular values of Fa Fbᵀ, so the trace of its
    root is their sum. For N ≤ D the centred features are such a factor: no D × D matrix is needed, and the zero
    eigenvalues of a covariance without full rank are not there to be rounded.
    """
    first, second = as_pair(a, b, "a", "b")
    return moments_distance(moments(first), moments(second))


def frechet_from_statistics(mu1: Array, sigma1: Array, mu2: Array, sigma2: Array) -> float:
    """The same from the means [D] and covariances [D, D]."""
    first, second = _from_statistics(mu1, sigma1, "1"), _from_statistics(mu2, sigma2, "2")
    if (size := len(second.mean)) != len(first.mean):
        raise InputError(f"mu2 has {size} dimensions and mu1 has {len(first.mean)}: use the same features for both.")
    return moments_distance(first, second)


@torch.no_grad()
def moments_distance(a: Moments, b: Moments) -> float:
    """The Fréchet distance between two Gaussians."""
    mean_b, factor_b = b.mean.to(a.mean.device), b.factor.to(a.mean.device)
    shift = (a.mean - mean_b).square().sum()
    traces = a.factor.square().sum() + factor_b.square().sum()
    cross = torch.linalg.svdvals(a.factor @ factor_b.T).sum()
    return max((shift + traces - 2 * cross).item(), 0.0)  # below zero only by rounding


@torch.no_grad()
def moments(features: Tensor) -> Moments:
    """The moments of features [N, D], with at most D rows in the factor."""
    count, size = features.shape
    if count <= size:
        centre = mean(features)
        return Moments(centre, (features.double() - centre) / (count - 1) ** 0.5)
    centre, covariance = statistics(features)
    return Moments(centre, _root(covariance, "features"))


@torch.no_grad()
def statistics(features: Array) -> tuple[Tensor, Tensor]:
    """The mean [D] and the unbiased covariance [D, D] of features [N, D], in float64."""
    points = as_features(features, "features")
    centre, size = mean(points), points.shape[1]
    total = torch.zeros(size, size, dtype=torch.float64, device=points.device)
    for chunk in points.split(CHUNK):
        centred = chunk.double() - centre
        total.addmm_(centred.T, centred)
    return centre, total / (len(points) - 1)


def _root(sigma: Tensor, name: str) -> Tensor:
    """F with FᵀF = Σ, one row per eigenvalue above rounding: the root of 1e-16 would be 1e-8."""
    values, vectors = torch.linalg.eigh(sigma)
    largest = values[-1].clamp(min=0)
    if values[0] < -1e-6 * largest or (largest == 0 and values[0] < 0):
        raise InputError(f"{name} has a negative eigenvalue, {values[0].item():.3g}: give a covariance matrix.")
    kept = values > largest * len(values) * torch.finfo(values.dtype).eps
    return (vectors[:, kept] * values[kept].sqrt()).T


def _from_statistics(mu: Array, sigma: Array, number: str) -> Moments:
    centre = as_tensor(mu, f"mu{number}").double()
    matrix = as_tensor(sigma, f"sigma{number}").to(centre.device, torch.float64)
    if centre.ndim != 1 or len(centre) == 0:
        raise InputError(f"mu{number} has shape {tuple(centre.shape)}: give the mean of shape [D].")
    if matrix.shape != (len(centre), len(centre)):
        raise InputError(f"sigma{number} has shape {tuple(matrix.shape)}: give [D, D], where mu{number} is [D].")
    if not torch.allclose(matrix, matrix.T, rtol=1e-5, atol=1e-6 * matrix.abs().max().item()):
        raise InputError(f"sigma{number} is not symmetric: give a covariance matrix.")
    return Moments(centre, _root((matrix + matrix.T) / 2, f"sigma{number}"))
