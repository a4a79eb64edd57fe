"""Items that follow each other: how many independent ones they are worth, and the errors of everything measured."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import nidiff
from nidiff.data.dataset import Dataset
from nidiff.evaluation.evaluate import evaluate_images
from nidiff.evaluation.likelihood import Likelihood
from nidiff.evaluation.metrics import measure
from nidiff.evaluation.order import effective_number, is_ordered, standard_error
from nidiff.evaluation.samples import SampleSet
from nidiff.evaluation.table import detailed_text


def followed(draws, rho):
    """An AR(1) sequence in time of independent ``draws`` [n, …]: each is ρ times the one before, and variance stays."""
    items = draws.clone()
    for index in range(1, len(items)):
        items[index] = rho * items[index - 1] + (1 - rho**2) ** 0.5 * draws[index]
    return items


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fields(count, seed=0, channels=1):
    covariance = nidiff.power_law((16, 16), exponent=3.0)
    return covariance.sample((count, channels, 16, 16), torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_two_standard_errors_hold_the_mean_in_19_of_20_sequences(rho):
    values = followed(numbers(1000, 2000), rho)
    exact = 1000 * (1 - rho) / (1 + rho)
    assert effective_number(values).median().item() == pytest.approx(exact, rel=0.1)
    assert effective_number(values[:, :64], pooled=True).item() == pytest.approx(exact, rel=0.15)
    covered, naive = (
        (values.mean(0).abs() <= 2 * standard_error(values, ordered=ordered)).double().mean().item()
        for ordered in (True, False)
    )
    assert 0.92 < covered < 0.98
    assert (naive > 0.93) == (rho == 0)  # the control: 0.75 and 0.34


def test_without_an_order_there_are_as_many_items_as_there_are():
    values = followed(numbers(500, 64), 0.9)
    shuffled = values[torch.randperm(500, generator=torch.Generator().manual_seed(1))]
    assert effective_number(values, pooled=True).item() < 50
    assert effective_number(shuffled, pooled=True).item() > 450
    ratio = standard_error(shuffled, ordered=True) / standard_error(shuffled, ordered=False)
    assert ratio.median().item() == pytest.approx(1, abs=0.05)
    for constant in (torch.ones(9, 2), torch.full((9, 2), 1e9) + 1e-9):
        assert effective_number(constant).tolist() == [9, 9]
    for count in range(2, 12):  # never more than all, never less than one
        assert (
            (effective_number(numbers(count, 50).cumsum(0)) - 1) * (count - effective_number(numbers(count, 50)))
        ).min() >= 0


def test_the_bands_of_72_hours_are_within_their_errors_of_the_same_climate():
    """z of real hours that follow each other against independent draws of the same distribution is about N(0, 1)."""
    found, naive = [], []
    for seed in range(6):
        hours, others = followed(fields(72, seed=seed, channels=2), 0.95), fields(300, seed=100 + seed, channels=2)
        result = evaluate_images(others.float(), hours.float(), bootstrap=2)
        count, independent = result.details["items"]["real"]
        assert count == 72
        assert independent < 15
        assert f"72 real items count as about {independent:.0f} independent" in detailed_text(result)
        found += [band["z"] for table in result.details["bands"] for band in table["bands"] if "spectrum" in table]
        shuffled = evaluate_images(
            others.float(),
            hours[torch.randperm(72, generator=torch.Generator().manual_seed(seed))].float(),
            bootstrap=2,
        )
        naive += [band["z"] for table in shuffled.details["bands"] for band in table["bands"] if "spectrum" in table]
    assert np.sqrt(np.mean(np.square(found))) < 2
    assert np.sqrt(np.mean(np.square(naive))) > 2  # the control: without their order hours count as independent
    without = replace(result, details={key: value for key, value in result.details.items() if key != "items"})
    assert "count as about" not in detailed_text(without)  # a result of an older version


def test_every_error_grows_where_items_follow_each_other():
    items = followed(fields(100, channels=2), 0.8)
    features = items.flatten(1)[:, ::16].float()
    real = SampleSet(fields(100, seed=1, channels=2), numbers(100, features.shape[1], seed=2).float())
    alike, alone = (SampleSet(items, features, ordered=ordered) for ordered in (True, False))
    factor = (100 / alike.num_independent) ** 0.5
    assert 2 < factor < 5  # √9 for ρ = 0.8
    assert alone.num_independent == 100
    more, fewer = (measure(real, side, bootstrap=40) for side in (alike, alone))
    shares = {"precision", "recall"}  # of which the first may be 0, and the second is of the real items
    for name in more.keys() - shares:
        assert more[name].value == fewer[name].value
        assert 1.2 < more[name].error / fewer[name].error < 2.5 * factor, name
    for first, name in ((alike, "recall"), (real, "precision")):
        second = real if first is alike else alike
        error = measure(first, second, bootstrap=0, keys=[name])[name].error
        unordered = measure(
            alone if first is alike else real, alone if second is alike else real, bootstrap=0, keys=[name]
        )
        assert error == pytest.approx(factor * unordered[name].error)


def test_the_error_of_a_likelihood_is_that_of_independent_items():
    cost = followed(numbers(400, 1), 0.9)[:, 0]
    about = (torch.zeros(400), None, 1, False, False)
    alike, alone = (Likelihood(cost, *about, ordered=ordered) for ordered in (True, False))
    assert alone.num_independent == 400
    assert 8 < alike.num_independent < 60  # 21
    errors = [one.summary()["model"]["nats_per_dim"].error for one in (alike, alone)]
    assert errors[0] / errors[1] == pytest.approx((400 / alike.num_independent) ** 0.5)


def test_an_order_is_that_of_a_coordinate_or_of_an_array_and_not_of_names_or_classes():
    values = torch.zeros(4, 1, 8, 8)
    times = np.arange("2020-01-01", "2020-01-05", dtype="datetime64[D]")
    labels = torch.arange(4)
    assert is_ordered(values)
    assert is_ordered(Dataset(values))
    assert is_ordered(Dataset(values, labels=labels, along=("time", times)))
    assert not is_ordered(Dataset(values, along=("file", np.array(["a", "b", "c", "d"]))))
    assert not is_ordered(Dataset(values, labels=labels))
    assert not is_ordered(Dataset(values.byte()))
