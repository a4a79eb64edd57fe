"""The Fréchet distance between two sets of features (FID; Heusel et al. 2017)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nidiff.evaluation.arrays import CHUNK, Array, as_features, as_pair, mean


class FeatureGaussian(NamedTuple):
    """The Gaussian of features in float64: its mean [D], and a factor F [R, D] of its covariance C = FᵀF."""

    mean: Tensor
    factor: Tensor


def frechet_distance(a: Array, b: Array) -> float:
    """‖μa − μb‖² + tr(Ca + Cb − 2 (Ca Cb)^½) of two sets of features [N, D], in float64.

    With any factors C = FᵀF, the eigenvalues of Ca Cb are the squared singular values of Fa Fbᵀ, so the trace of its
    root is their sum. For N ≤ D the centred features are such a factor: no D × D matrix is needed, and the zero
    eigenvalues of a covariance without full rank are not there to be rounded.
    """
    first, second = as_pair(a, b, ("a", "b"), as_features)
    return gaussian_distance(feature_gaussian(first), feature_gaussian(second))


@torch.no_grad()
def gaussian_distance(a: FeatureGaussian, b: FeatureGaussian) -> float:
    """The Fréchet distance between two Gaussians."""
    mean_b, factor_b = b.mean.to(a.mean.device), b.factor.to(a.mean.device)
    shift = (a.mean - mean_b).square().sum()
    traces = a.factor.square().sum() + factor_b.square().sum()
    cross = torch.linalg.svdvals(a.factor @ factor_b.T).sum()
    return max((shift + traces - 2 * cross).item(), 0.0)  # below zero only by rounding


@torch.no_grad()
def feature_gaussian(features: Tensor) -> FeatureGaussian:
    """The Gaussian of features [N, D], with at most D rows in the factor."""
    count, size = features.shape
    if count <= size:
        centre = mean(features)
        return FeatureGaussian(centre, (features.double() - centre) / (count - 1) ** 0.5)
    centre, covariance = statistics(features)
    return FeatureGaussian(centre, factor_of(covariance))


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


def factor_of(covariance: Tensor) -> Tensor:
    """F with FᵀF = C, one row per eigenvalue above rounding: the root of 1e-16 would be 1e-8."""
    values, vectors = torch.linalg.eigh(covariance)
    positive = values > values[-1].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    return (vectors[:, positive] * values[positive].sqrt()).T
