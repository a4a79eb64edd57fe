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

    With any factors C = FᵀF, the eigenvalues of Ca Cb are the squared singular values of M = Fa Fbᵀ, so the trace of
    its root is their sum. For N ≤ D the centred features are such a factor: no D × D matrix is needed, and the zero
    eigenvalues of a covariance without full rank are not there to be rounded. The squares are computed as eigenvalues
    of M Mᵀ, five times faster than singular values; one that is 0 may so become 1e-8 of the largest.
    """
    first, second = as_pair(a, b, ("a", "b"), as_features)
    return gaussian_distance(feature_gaussian(first), feature_gaussian(second))


@torch.no_grad()
def gaussian_distance(a: FeatureGaussian, b: FeatureGaussian) -> float:
    """The Fréchet distance between two Gaussians."""
    mean_b, factor_b = b.mean.to(a.mean.device), b.factor.to(a.mean.device)
    shift = (a.mean - mean_b).square().sum()
    traces = a.factor.square().sum() + factor_b.square().sum()
    product = a.factor @ factor_b.T
    product = product if len(product) <= product.shape[1] else product.T
    cross = torch.linalg.eigvalsh(product @ product.T).clamp(min=0).sqrt().sum()
    return max((shift + traces - 2 * cross).item(), 0.0)  # below zero only by rounding


@torch.no_grad()
def feature_gaussian(features: Tensor) -> FeatureGaussian:
    """The Gaussian of features [N, D], with at most D rows in the factor: the R of QR, of one part after the other."""
    centre, (count, size) = mean(features), features.shape
    factor = torch.empty(0, size, dtype=torch.float64, device=features.device)
    for part in features.split(max(CHUNK, 2 * size)):
        factor = torch.cat([factor, part.double() - centre])
        factor = factor if len(factor) <= size else torch.linalg.qr(factor, mode="r").R
    return FeatureGaussian(centre, factor / (count - 1) ** 0.5)


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
