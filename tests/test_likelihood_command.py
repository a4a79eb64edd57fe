"""What data cost under a model, in their own units: closed forms, a change of units, and ``nidiff likelihood``."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused, untrained_model

import nidiff
from nidiff import Scaling
from nidiff.cli import main
from nidiff.data.dataset import Dataset
from nidiff.diffusion.denoiser import zero_net
from nidiff.diffusion.schedule import Schedule
from nidiff.evaluation.likelihood import measure_likelihood
from nidiff.testing.problems import normal

SHAPE = (2, 2, 2)
EXACT = {"trace": "exact", "rtol": 1e-4, "atol": 1e-5}
# The noise of the first level is far below the data, and the last level has forgotten them.
SCHEDULE = Schedule(torch.linspace(20.0, -16.0, 100, dtype=torch.float64), "variance")
GFF = nidiff.gaussian_free_field(SHAPE[1:])
GAUSSIAN = nidiff.fit_gaussian(normal(50, *SHAPE) + 0.3, basis=GFF)


def exact_denoiser(gaussian=GAUSSIAN, scaling=None, covariance=GFF):
    process = nidiff.Process(SCHEDULE, covariance)
    return nidiff.Denoiser(zero_net, process, "residual", gaussian=gaussian, scaling=scaling)


def in_data_units(x, scaling):
    return Dataset(scaling.to_data(x), scaling=scaling)


def dense_log_prob(x, gaussian=GAUSSIAN):
    """log N(x; μ, C) from the matrix."""
    size = math.prod(gaussian.shape)
    eye = torch.eye(size, dtype=torch.float64).reshape(size, *gaussian.shape)
    matrix = gaussian.covariance.matmul(eye).reshape(size, size)
    return torch.distributions.MultivariateNormal(gaussian.mean.flatten().double(), matrix).log_prob(x.flatten(1))


def test_the_exact_denoiser_of_gaussian_data_has_their_density():
    x = GAUSSIAN.sample((3, *SHAPE), torch.Generator().manual_seed(0), dtype=torch.float64)
    found = measure_likelihood(exact_denoiser(), Dataset(x), **EXACT)
    assert torch.allclose(found.log_prob, dense_log_prob(x), atol=2e-3)
    assert torch.allclose(found.gaussian, dense_log_prob(x), atol=1e-9)
    assert "mixture" not in found.summary()
    assert abs(found.summary()["difference"]["nats_per_dim"].value) < 2e-4
    mixture = nidiff.fit_mixture(normal(50, *SHAPE) + 0.3, basis=GFF, rank=0, shrinkage=0.0)
    mixed = measure_likelihood(exact_denoiser().with_mixture(mixture), Dataset(x), **EXACT)
    assert torch.allclose(mixed.mixture, mixture.log_prob(x), atol=1e-9)
    shown = mixed.summary()["mixture"]["nats_per_dim"].value
    assert shown == pytest.approx(-(mixture.log_prob(x) + mixed.log_volume).mean().item() / math.prod(SHAPE))
    # The control: the denoiser of other data has another density.
    other = nidiff.GaussianModel(GAUSSIAN.mean + 1.0, GAUSSIAN.covariance)
    wrong = measure_likelihood(exact_denoiser(other), Dataset(x), **EXACT)
    assert (wrong.log_prob - dense_log_prob(x)).abs().min() > 1e-2


@pytest.mark.parametrize("scaling", [Scaling(250.0, 3.0), Scaling((0.01, -7.0), (1.0, 280.0))])
def test_other_units_change_the_cost_by_the_logarithm_of_the_scale(scaling):
    x = GAUSSIAN.sample((2, *SHAPE), torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = measure_likelihood(exact_denoiser(), Dataset(x), **EXACT).summary()["model"]
    found = measure_likelihood(exact_denoiser(scaling=scaling), in_data_units(x, scaling), **EXACT)
    scaled = found.summary()["model"]
    scales = scaling.scale if isinstance(scaling.scale, tuple) else (scaling.scale,)
    shift = float(np.mean([math.log(abs(scale)) for scale in scales]))
    assert scaled["nats_per_dim"].value == pytest.approx(plain["nats_per_dim"].value + shift, abs=2e-4)
    assert scaled["nats_per_dim_of_model"].value == pytest.approx(plain["nats_per_dim"].value, abs=2e-4)
    assert scaled["bits_per_dim"].value == pytest.approx(scaled["nats_per_dim"].value / math.log(2))
    # The density of the data themselves, N(scale μ + shift, scale C scale), is the same; with the sign wrong it is not.
    each = torch.tensor(scales, dtype=torch.float64).expand(2)[:, None, None]
    offset = torch.as_tensor(scaling.shift, dtype=torch.float64).expand(2)[:, None, None]
    direct = dense_log_prob((in_data_units(x, scaling).values - offset) / each) - 4 * each.abs().log().sum()
    assert torch.allclose(found.log_prob + found.log_volume, direct, atol=2e-3)
    assert (found.log_prob - found.log_volume - direct).abs().min() > 1


def test_the_density_of_log_normal_data():
    scaling = Scaling(0.5, 1.0, log=True)
    x = GAUSSIAN.sample((2, *SHAPE), torch.Generator().manual_seed(2), dtype=torch.float64)
    data = torch.exp(0.5 * x + 1.0)
    found = measure_likelihood(exact_denoiser(scaling=scaling), Dataset(data, scaling=scaling), **EXACT)
    # A change of variables, one number at a time: p(d) = p(x) / (0.5 d).
    expected = dense_log_prob(x) - (0.5 * data).log().flatten(1).sum(1)
    assert torch.allclose(found.log_prob + found.log_volume, expected, atol=2e-3)


def test_whole_numbers_cost_the_entropy_of_a_wide_distribution():
    sigma = 3000.0
    data = Dataset((65535 / 2 + sigma * normal(40, 1, 2, 2)).round().clamp(0, 65535).to(torch.uint16))
    variance = (sigma / data.scaling.scale) ** 2
    gaussian = nidiff.GaussianModel(torch.zeros(1, 2, 2), variance * nidiff.Identity((2, 2)))
    denoiser = exact_denoiser(gaussian, covariance=nidiff.Identity((2, 2)))
    found = measure_likelihood(denoiser, data, batch=40, **EXACT)
    entropy = math.log2(sigma * math.sqrt(2 * math.pi * math.e))
    bits = found.summary()["model"]["bits_per_dim"]
    assert found.is_whole
    assert bits.value == pytest.approx(entropy, abs=4 * bits.error + 0.01)
    few = Dataset(data.values[:3])
    again, other = (
        measure_likelihood(denoiser, few, batch=batch, seed=seed, **EXACT) for batch, seed in ((2, 0), (3, 1))
    )
    assert torch.equal(again.gaussian, found.gaussian[:3])  # the noise is that of the item
    assert not torch.equal(other.gaussian, found.gaussian[:3])
    assert torch.allclose(other.gaussian, found.gaussian[:3], atol=1)


def test_errors_are_over_items_and_the_difference_is_paired():
    x = GAUSSIAN.sample((24, *SHAPE), torch.Generator().manual_seed(3), dtype=torch.float64)
    exact, found = (
        measure_likelihood(exact_denoiser(), Dataset(x), batch=24, trace=trace, rtol=1e-4, atol=1e-4)
        for trace in ("exact", "hutchinson")
    )
    exact, found = (replace(one, ordered=False) for one in (exact, found))  # they are draws
    cost, difference = (found.summary()[of]["nats_per_dim"] for of in ("model", "difference"))
    assert cost.error == pytest.approx((found.log_prob.std() / 8 / 24**0.5).item())
    paired = exact.summary()["difference"]["nats_per_dim"]
    assert paired.error < 0.05 * cost.error  # what all items have in common is no error of the difference
    assert paired.error < difference.error  # and the noise of the probes is one
    assert abs(difference.value) < 4 * difference.error
    few = measure_likelihood(exact_denoiser(), Dataset(x), num_images=1, rtol=1e-3, atol=1e-3)
    assert few.summary()["model"]["nats_per_dim"].error is None
    alone = replace(found, gaussian=None)
    assert set(alone.summary()) == {"model"}


def test_refusals_name_the_argument():
    for name in ("num_images", "batch", "seed", "rtol"):
        with refused(name):
            measure_likelihood(**{"denoiser": exact_denoiser(), "data": Dataset(normal(4, *SHAPE)), name: -1})
    process = nidiff.Process(nidiff.schedules.heat(SHAPE[1:], 20), nidiff.Identity(SHAPE[1:]))
    with refused("schedule"):  # which keeps the coarse modes
        measure_likelihood(nidiff.Denoiser(zero_net, process, "eps"), Dataset(normal(4, *SHAPE)))


# The command --------------------------------------------------------------------------------------------------------

QUICK = ("--num-images", "3", "--rtol", "0.05", "--atol", "0.05")
TINY = ("--steps", "1", "--cooldown", "0", "--widths", "8", "--attention", "--batch-size", "4", "--num-samples", "1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run on the digits, and one on floats of its own."""
    base = tmp_path_factory.mktemp("runs")
    np.save(base / "fields.npy", normal(20, 8, 8).clamp(-1, 1).float().numpy())
    for name, data in {"digits": "digits", "fields": str(base / "fields.npy")}.items():
        flags = ["--data", data, "--out", str(base / name), "--precision", "fp32", "--num-steps", "1", "--target", "v"]
        assert main(["train", *flags, *TINY]) == 0
    return base


def asked(capsys, *words):
    code = main(["likelihood", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_the_same_numbers_as_the_function(runs, capsys):
    code, out, _ = asked(capsys, runs / "digits", *QUICK, "--json")
    found = json.loads(out)
    assert code == 0
    data = nidiff.load_dataset("digits", split="test")
    direct = measure_likelihood(nidiff.load_model(runs / "digits"), data, num_images=3, rtol=0.05, atol=0.05)
    for of, row in direct.summary().items():
        for name, one in row.items():
            assert found[of][name]["value"] == pytest.approx(one.value, rel=1e-4)
    assert (found["split"], found["num_images"], found["dimensions"], found["dequantised"]) == ("test", 3, 64, True)
    code, out, _ = asked(capsys, runs / "digits" / "model", *QUICK)
    assert code == 0
    assert f"{found['gaussian']['bits_per_dim']['value']:.1f}" in out
    about = json.loads(asked(capsys, runs / "fields", *QUICK, "--json")[1])  # floats, of which none are held out
    assert (about["split"], about["dequantised"]) == ("train", False)


def test_a_model_without_a_gaussian_has_no_baseline_and_says_so(tmp_path, capsys):
    model = untrained_model(tmp_path / "plain")
    code, out, _ = asked(capsys, model, "--data", "digits", *QUICK)
    assert (code, "no baseline" in out) == (0, True)


def test_what_cannot_have_a_likelihood_exits_with_2(runs, tmp_path, capsys, monkeypatch):
    np.save(tmp_path / "large.npy", np.zeros((4, 12, 12), np.uint8))
    lone = shutil.copytree(runs / "digits" / "model", tmp_path / "lone")
    for model, flags, words in (
        (runs / "digits", ["--rtol", "0"], "--rtol"),
        (runs / "digits", ["--num-probes", "-1"], "--num-probes"),
        (runs / "digits", ["--trace", "guess"], "--trace"),
        (runs / "digits", ["--split", "x"], "--split"),
        (runs / "digits", ["--data", "nowhere"], "nowhere"),
        (runs / "fields", ["--data", tmp_path / "large.npy"], "12"),
        (lone, [], "--data"),
    ):
        code, out, err = asked(capsys, model, *QUICK, *flags)
        assert (code, out, words in err) == (2, "", True), (flags, err)
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    code, _, err = asked(capsys, runs / "digits", *QUICK)
    assert (code, "nidiff[likelihood]" in err) == (2, True)
