"""With `rescale` every mode has the variance that is known of it, though the network or the sampler would lose it."""

import pytest
import torch
from problems import refused

import nidiff
from nidiff.design import sampler_candidates
from nidiff.diffusion.gaussian import smooth
from nidiff.evaluation.tune import count_calls
from nidiff.sampling.rescale import PILOTS

SHAPE = (8, 8)
GAUSSIAN = nidiff.GaussianModel(torch.linspace(-1, 1, 64).reshape(SHAPE), nidiff.matern(SHAPE, 1.5))
PROCESS = nidiff.Process("ddpm_linear", nidiff.gaussian_free_field(SHAPE, 0.5))
COUNT = 4000


class Damped(torch.nn.Module):
    """A network of Gaussian data that takes away a part of every mode: of x, where the exact one would return 0."""

    def __init__(self, share=0.3):
        super().__init__()
        self.share = torch.nn.Parameter(torch.tensor(share))
        self.calls = 0

    def forward(self, x, label):
        self.calls += len(x)
        return -self.share * x


def damped(**arguments):
    return nidiff.Denoiser(Damped(**arguments), PROCESS, "residual", gaussian=GAUSSIAN, clip=None, sees="z")


def variances(x):
    """E z² of samples over the modes of each wavenumber; 1 is right."""
    power = GAUSSIAN.powers(GAUSSIAN.whiten(x).double()).mean(0)
    return smooth(power, GAUSSIAN.spatial)


def draw(denoiser, sampler, count=COUNT, **arguments):
    return nidiff.sample(denoiser, (count, *SHAPE), sampler=sampler, generator=0, dtype=torch.float64, **arguments)


@pytest.mark.parametrize(
    "sampler", ["gaussian_2m", "angle_2m:spacing=trailing", "gaussian_2m:eta=0.5", "dpmpp_2m:spacing=logsnr"]
)
def test_every_mode_has_its_variance(sampler):
    # The factors are means over at least PILOTS times a shell's modes; the coarsest shell is the constant alone.
    scatter = 4 * (2 / PILOTS) ** 0.5
    plain = variances(draw(damped(), sampler, num_steps=6))
    text = sampler + (",rescale=true" if ":" in sampler else ":rescale=true")
    kept = variances(draw(damped(), text, num_steps=6))
    fine = GAUSSIAN.spatial.wavenumbers > 1.5
    assert (kept - 1).abs().max() < scatter
    assert (kept - 1)[fine].abs().mean() < 0.1
    assert (plain - 1)[fine].abs().mean() > 0.25


def test_the_mean_stays():
    mean = draw(damped(), "gaussian_2m:rescale=true", num_steps=6).mean(0)
    assert (mean - GAUSSIAN.mean).abs().max() < 5 * GAUSSIAN.covariance.values.mean().sqrt() / COUNT**0.5


def test_exact_sampler_is_changed_by_the_scatter_of_the_factors_alone():
    exact = GAUSSIAN.denoiser(PROCESS)
    plain, kept = (draw(exact, "gaussian_2m", num_steps=4, rescale=rescale) for rescale in (False, True))
    assert 0 < (kept - plain).abs().mean() < 0.1 * (plain - GAUSSIAN.mean).abs().mean()


def test_a_sample_depends_on_its_seed_alone():
    arguments = {"sampler": "gaussian_2m:eta=0.5,rescale=true", "num_steps": 3, "tile": 2}
    denoiser = damped()
    together = nidiff.sample(denoiser, (3, *SHAPE), generator=[5, 6, 7], **arguments)
    alone = nidiff.sample(damped(), (1, *SHAPE), generator=[7], **arguments)
    assert torch.equal(together[2:], alone)


def test_factors_are_measured_once_for_the_same_weights():
    denoiser = damped()
    nidiff.sample(denoiser, (2, *SHAPE), sampler="gaussian_2m:rescale=true", num_steps=3)
    assert denoiser.net.calls == 3 * (PILOTS + 2)
    nidiff.sample(denoiser.clipped(None), (2, *SHAPE), sampler="gaussian_2m:rescale=true", num_steps=3)
    assert denoiser.net.calls == 3 * (PILOTS + 4)
    with torch.no_grad():
        denoiser.net.share.mul_(0.5)
    changed = nidiff.sample(denoiser, (2, *SHAPE), sampler="gaussian_2m:rescale=true", num_steps=3, generator=0)
    assert denoiser.net.calls == 3 * (2 * PILOTS + 6)
    afresh = nidiff.sample(
        damped(share=0.15), (2, *SHAPE), sampler="gaussian_2m:rescale=true", num_steps=3, generator=0
    )
    assert torch.allclose(changed, afresh)


def test_a_trial_counts_the_calls_of_one_image():
    assert count_calls(damped(), SHAPE, "gaussian_2m:rescale=true", 5) == 5


def test_candidates_rescale_where_the_variance_is_known():
    assert any("rescale=true" in text for text in sampler_candidates(damped()))
    without = nidiff.Denoiser(Damped(), PROCESS, "eps")
    assert not any("rescale" in text for text in sampler_candidates(without))


def test_refused():
    arguments = {"sampler": "ddim:rescale=true", "num_steps": 3}
    with refused("rescale"):
        nidiff.sample(nidiff.Denoiser(Damped(), PROCESS, "eps"), (1, *SHAPE), **arguments)
    with refused("rescale"):
        nidiff.sample(damped(), (1, *SHAPE), start=torch.zeros(1, *SHAPE), **arguments)
    with refused("rescale"):
        nidiff.sample(damped(), (1, *SHAPE), sampler="ddim:rescale=3", num_steps=3)
    with refused("rescale"):
        nidiff.walk(damped(), torch.zeros(1, *SHAPE), PROCESS.schedule.levels(3, "trailing"), "ddim:rescale=true")
    seen = nidiff.Observation(torch.zeros(1, *SHAPE), nidiff.operators.mask(torch.ones(SHAPE)), 0.1)
    with refused("rescale"):
        nidiff.sample(nidiff.posterior(damped(), seen), (1, *SHAPE), **arguments)
