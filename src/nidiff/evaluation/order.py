"""How many independent items a sequence of items is worth, where neighbours are alike: hours, days, slices."""

import torch
from torch import Tensor

from nidiff.data.dataset import Dataset


def effective_number(values: Tensor, *, pooled: bool = False) -> Tensor:
    """n / τ for each column of ``values`` [n, …], one number or more per item, in order: float64 […], from 1 to n.

    τ = 1 + 2 Σ ρ_k is the integrated autocorrelation time: the mean of n items varies as that of n / τ independent
    ones, σ² τ / n; of an AR(1) sequence n / τ = n (1 − ρ) / (1 + ρ). The sum is Geyer's initial monotone sequence
    (1992): sums of two neighbouring ρ_k count until one is not positive, and none more than the one before it. What was
    subtracted with the mean of the same items is put back, (n − 1) / (n − 2W − 1) for W lags (Wolff 2004). With
    ``pooled``, all columns have one τ, from the mean of their ρ_k, which is less noisy. Of few items that are much
    alike τ is still too small: 72 with ρ = 0.9 are worth 3.8, and found to be worth 6.
    """
    count = len(values)
    columns = values.detach().cpu().double().reshape(count, -1)
    columns = columns - columns.mean(0)
    lags = max(1, count // 4) // 2 * 2 + 2  # an even number
    power = torch.fft.rfft(columns, 2 * count + lags, dim=0).abs().square()
    covariance = torch.fft.irfft(power, 2 * count + lags, dim=0)[:lags]
    varies = covariance[0] > 1e-20 * count * values.abs().amax().double().square().item()  # more than rounding
    correlation = torch.where(varies, covariance / covariance[0].clamp(min=1e-300), 0.0)
    if pooled:
        correlation = correlation.sum(1, keepdim=True) / varies.sum().clamp(min=1)
    pairs = correlation.reshape(lags // 2, 2, -1).sum(1)
    counted = (pairs > 0).cumprod(0)
    last = (2 * counted.sum(0) - 1).clamp(min=1, max=(count - 1) // 4)
    time = 2 * (pairs.cummin(0).values * counted).sum(0) - 1
    time = torch.where(counted.sum(0) > 1, time * (count - 1) / (count - 2 * last - 1).clamp(min=1), time)
    effective = (count / time.clamp(min=1)).clamp(min=1)
    return effective[0] if pooled else effective.reshape(values.shape[1:])


def standard_error(values: Tensor, *, ordered: bool) -> Tensor:
    """The standard error of the mean over items of ``values`` [n, …]: their deviation / √n, or where the items are
    ``ordered`` and neighbours may be alike, / √`effective_number`."""
    return values.std(0) / (effective_number(values) if ordered else torch.tensor(len(values))).sqrt()


def is_ordered(data: Dataset | Tensor) -> bool:
    """Whether neighbouring items may be alike because they follow each other: along the coordinate of a sample axis,
    such as time, or in an array without labels. The order of files, pictures and classes is that of names."""
    if isinstance(data, Dataset) and data.along is not None:
        return data.along[1].dtype.kind != "U"
    return not isinstance(data, Dataset) or (data.labels is None and data.grid.kind != "picture")
