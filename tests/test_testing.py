"""The checks that users run on their own pieces: right ones pass, and each kind of mistake fails where it should."""

from inspect import signature

import pytest
import torch
from problems import COVARIANCES, refused

import nidiff
from nidiff.covariance.basis import Basis
from nidiff.covariance.config import BASES
from nidiff.diffusion.schedules import SCHEDULES, as_schedule, schedule_facts
from nidiff.diffusion.target import TARGETS, Target
from nidiff.sampling.ancestral import ancestral, mix
from nidiff.sampling.sampler import SAMPLERS
from nidiff.testing import Findings, check_covariance, check_sampler, check_schedule, check_target
from nidiff.testing.problems import normal


def failures(report: Findings) -> set[str]:
    """The statements that do not hold, as printed."""
    assert report.passed == ("FAILED" not in str(report))
    return {line.split("  ")[1] for line in str(report).splitlines() if line.startswith("FAILED")}


@pytest.mark.parametrize("make", COVARIANCES.values(), ids=COVARIANCES.keys())
def test_our_own_covariances_pass(make):
    assert failures(check_covariance(make())) == set()


def test_a_singular_covariance_passes_without_its_inverse():
    assert failures(check_covariance(nidiff.gaussian_free_field((4, 5), zero_mode="zero"))) == set()


class Rolled(Basis):
    """A cyclic shift; ``wrong`` makes one mistake."""

    def __init__(self, shape, wrong=""):
        self.event_shape, self.wrong = tuple(shape), wrong

    def analyse(self, x):
        return x.roll(1, -1) * (1.1 if self.wrong == "scale" else 1.0)

    def synthesise(self, coefficients):
        return coefficients.roll(1 if self.wrong == "direction" else -1, -1)

    def diagonal(self, values):
        true = super().diagonal(values)
        return true.flip(-1) if self.wrong == "diagonal" else true

    def arguments(self):
        return {"shape": self.event_shape, "wrong": self.wrong}


def shifted(shape, wrong=""):
    return nidiff.Covariance(torch.tensor([1.0, 2.0, 3.0, 4.0]), Rolled(shape, wrong))


def test_a_mistake_in_a_basis_is_found(monkeypatch):
    monkeypatch.setitem(BASES, "Rolled", Rolled)
    inverted = "the basis is inverted: synthesise(analyse(x)) = x"
    for wrong, expected in {
        "": set(),
        "scale": {inverted, "the basis is orthonormal", "Σ has the eigenvalues"},
        "direction": {inverted, "Σ is symmetric"},
        "diagonal": {"its diagonal is marginal_variance"},
    }.items():
        assert failures(check_covariance(shifted((4,), wrong))) >= expected
        assert check_covariance(shifted((4,), wrong)).passed == (not wrong)


def test_a_basis_without_a_name_is_found():
    assert 'BASES["Rolled"] = Rolled' in str(check_covariance(shifted((4,))))
    with pytest.raises(nidiff.InputError):
        check_covariance(nidiff.Identity((65, 65)))


OTHERS = {"smld_geometric": "num_levels=20,sigma_max=50,sigma_min=0.01"}


@pytest.mark.parametrize(
    "name", [name for name in SCHEDULES if name not in ("from_betas", "from_alphas_cumprod", "table")]
)
def test_our_own_schedules_pass(name):
    text = f"{name}:{OTHERS.get(name, 'num_levels=30,shift=-0.4')}"
    gaussian = nidiff.GaussianModel(torch.zeros(4, 5), nidiff.power_law((4, 5), 3.0))
    facts = schedule_facts(nidiff.matern((4, 5), 1.5), gaussian)
    assert failures(check_schedule(as_schedule(text, facts))) == set()
    if "per_mode" in signature(SCHEDULES[name]).parameters:
        assert failures(check_schedule(as_schedule(f"{text},per_mode=true", facts))) == set()


def test_a_single_level_is_a_schedule():
    assert failures(check_schedule(nidiff.Schedule([0.0]))) == set()


def test_a_schedule_whose_clock_is_not_its_table_is_found():
    wrong = nidiff.Schedule([3.0, 1.0, -2.0], logsnr_of_time=lambda time: 2 - 5 * time)
    assert any(statement.startswith("logsnr_at") for statement in failures(check_schedule(wrong)))


def test_our_own_samplers_pass():
    """The others are in test_sampling.py."""
    assert failures(check_sampler("cas", keeps="signal")) == set()
    assert failures(check_sampler(SAMPLERS["euler"].step, order=1, keeps="variance")) == set()


def white(chain, x, x0, here, there):
    """White noise where coloured belongs: the mistake this library exists for."""
    beta = here.sigma**2 - (here.signal / there.signal * there.sigma) ** 2
    fresh = (beta * there.sigma**2 / here.sigma**2) ** 0.5
    return mix(x, x0, here, there, fresh) + fresh * torch.randn_like(x)


def too_much(chain, x, x0, here, there):
    """Fresh noise on top of all the old one: white noise or coloured, the variance is wrong."""
    return mix(x, x0, here, there, 0.0) + 0.5 * there.sigma * chain.noise()


def biased(chain, x, x0, here, there):
    return ancestral(chain, x, 0.9 * x0, here, there)


def test_a_mistake_in_a_sampler_is_found():
    assert any("whitened" in statement for statement in failures(check_sampler(white, keeps="variance")))
    found = failures(check_sampler(too_much, keeps="variance"))
    assert any("covariance of Gaussian data" in statement for statement in found)
    assert not any("whitened" in statement for statement in found)
    assert any("mean of Gaussian data" in statement for statement in failures(check_sampler(biased, keeps="signal")))
    with refused("keeps"):
        check_sampler("euler", keeps="energy")
    found = failures(check_sampler("euler", order=2, keeps="signal"))
    assert any("order of convergence is 2" in statement for statement in found)


def test_our_own_targets_pass():
    assert all(check_target(name).passed for name in TARGETS if name != "residual")


def test_a_mistake_in_a_target_is_found():
    """With a level per image: a coefficient forgotten, and the wrong power of Σ."""
    right = Target(lambda x0, eps, level, cov: level.signal * eps, lambda s, sigma: (1 / s, -sigma / s**2), 0.5)
    assert check_target(right).passed
    assert failures(check_target(right._replace(encode=lambda x0, eps, level, cov: eps))) == {
        "VP: decode inverts encode"
    }
    assert not check_target(right._replace(power=0.0)).passed


def test_a_target_that_uses_the_level_trains_right_where_batch_and_width_are_equal():
    """A level per image must not be taken for one per column: the loss is that of each image alone."""
    target = Target(lambda x0, eps, level, cov: level.signal * eps, lambda s, sigma: (1 / s, -sigma / s**2), 0.5)
    process = nidiff.Process("ddpm_linear:num_levels=40", nidiff.gaussian_free_field((5,)))
    denoiser = nidiff.Denoiser(lambda x, label: 0 * x, process, target=target)
    x0, eps, rows = normal(5, 5), normal(5, 5, seed=1), torch.tensor([0, 10, 20, 30, 39])
    level = process.schedule.level(rows)
    together = nidiff.denoising_loss(denoiser, x0, level=level, eps=eps, weighting="target")
    assert torch.allclose(together, (level.signal * eps).square().mean(1))
