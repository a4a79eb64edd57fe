"""Scores of ensembles are proper and do not depend on how many samples there are."""

import pytest
import torch

from nidiff.inverse.scores import covered, crps, interval

NORMAL = torch.pi**-0.5  # the expectation of the CRPS of N(0, 1) where that is the law of the truth


def draws(count: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(count, 200_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("count", [2, 5, 20])
def test_crps_of_the_right_law_has_its_closed_form_for_every_number_of_samples(count):
    assert crps(draws(count), draws(1, 1)[0]).mean().item() == pytest.approx(NORMAL, rel=0.01)


def test_crps_is_the_mean_over_pairs_and_of_one_sample_the_absolute_error():
    samples, truth = draws(4)[:, :50], draws(1, 1)[0, :50]
    pairs = (samples[:, None] - samples[None]).abs().sum((0, 1)) / (4 * 3)
    torch.testing.assert_close(crps(samples, truth), (samples - truth).abs().mean(0) - pairs / 2)
    torch.testing.assert_close(crps(samples[:1], truth), (samples[0] - truth).abs())


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_too_narrow_or_too_wide_an_ensemble_scores_worse(spread):
    assert crps(draws(10, spread=spread), draws(1, 1)[0]).mean() > 1.05 * NORMAL


@pytest.mark.parametrize("count", [4, 9, 19, 32])
def test_the_interval_holds_the_truth_as_often_as_it_says(count):
    truth, (_, share) = draws(1, 1)[0], interval(count)
    assert covered(draws(count), truth).double().mean().item() == pytest.approx(share, abs=0.005)
    assert covered(draws(count, spread=0.5), truth).double().mean().item() < share - 0.1
