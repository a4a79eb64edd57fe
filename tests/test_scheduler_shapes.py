"""One scheduler for all shapes of a bucketed data set: for each it is the scheduler of `covariance.at(shape)`."""

import pytest
import torch
from problems import refused

import nidiff
from nidiff.interop import NonIsotropicScheduler
from nidiff.testing.problems import normal

BUCKETS = [(8, 8), (4, 12), (12, 8), (6, 6)]
COVARIANCES = {
    "offset": nidiff.offset((8, 8), strength=0.5, normalize=False),
    "pyramid": nidiff.pyramid((8, 8), discount=0.6),
    "matern": nidiff.matern((8, 8), 2.0),
    "fitted": nidiff.from_data(normal(50, 1, 8, 8)),
    "channels": nidiff.Channels(torch.eye(4) + 0.3, nidiff.offset((8, 8), strength=0.5)),
}
OPTIONS = {"algorithm": "ddpm", "clip_sample": False}


def ran(scheduler, shape):
    """What the scheduler makes of latents of this shape: noised, a target, and two steps from its start."""
    x0, noise, t = normal(*shape), normal(*shape, seed=1), torch.tensor([500, 20])
    scheduler.set_timesteps(2)
    x = scheduler.init_noise(shape, torch.Generator().manual_seed(2), dtype=torch.float64)
    results = [x, scheduler.add_noise(x0, noise, t), scheduler.get_velocity(x0, noise, t)]
    for t in scheduler.timesteps:
        x = scheduler.step((x - 0.2).tanh(), t, x, variance_noise=noise).prev_sample
    return [*results, x]


@pytest.mark.parametrize("name", COVARIANCES)
def test_latents_of_every_shape_have_the_covariance_of_their_shape(name):
    """Also after another shape; not that of another shape."""
    covariance = COVARIANCES[name]
    one = NonIsotropicScheduler(covariance, **OPTIONS)
    white = NonIsotropicScheduler(nidiff.Identity((8, 8)), **OPTIONS)
    for event in (*BUCKETS, *BUCKETS[:2]):
        shape = (2, 4, *event)
        results = ran(one, shape)
        alone = ran(NonIsotropicScheduler(covariance.at(event), **OPTIONS), shape)
        assert all(map(torch.equal, results, alone))
        for mine, other in zip(results, ran(white, shape), strict=True):
            assert not torch.allclose(mine, other, atol=1e-2)


def test_a_step_with_a_denoiser_takes_that_of_the_shape():
    ours = NonIsotropicScheduler(COVARIANCES["offset"], **OPTIONS)
    x = ours.init_noise((2, 4, 4, 12), dtype=torch.float64)
    denoiser = ours.denoiser(lambda x, label: (x - 0.2).tanh(), x.shape)
    there = ours.step_with(denoiser, 500, x, variance_noise=torch.zeros_like(x)).prev_sample
    assert torch.equal(there, ours.step((x - 0.2).tanh(), 500, x, variance_noise=torch.zeros_like(x)).prev_sample)
    with refused("denoiser"):
        ours.step_with(ours.denoiser(lambda x, label: x), 500, x)


def test_pyramid_and_offset_are_the_recipe_at_every_shape_and_not_its_spectrum():
    """What a trainer adds to the latents of a bucket."""
    for name in ("offset", "pyramid"):
        again = COVARIANCES[name].at((4, 12))
        recipe = getattr(nidiff, name)(**{**COVARIANCES[name].origin.arguments, "shape": (4, 12)})
        assert torch.equal(again.dense(), recipe.dense())
    wide = nidiff.gaussian_free_field((8, 8)).at((8, 16))  # a field keeps the modes of its domain instead
    assert not torch.allclose(wide.dense(), nidiff.gaussian_free_field((8, 16)).dense(), atol=1e-2)


def test_the_last_32_shapes_are_kept():
    ours = NonIsotropicScheduler(COVARIANCES["offset"], **OPTIONS)
    first = ours.denoiser(torch.nn.Identity(), (1, 4, 2, 3)).process
    for width in range(10, 50):
        assert ours.denoiser(torch.nn.Identity(), (1, 4, 2, width)).process.covariance.event_shape == (2, width)
        assert ours.denoiser(torch.nn.Identity(), (1, 4, 2, 3)).process is first
    assert len(ours._models) == 32
    assert (2, 10) not in ours._models
    assert ours.denoiser(torch.nn.Identity(), (1, 4, 2, 10)).process.covariance.event_shape == (2, 10)


def test_a_covariance_without_a_form_for_other_shapes_is_refused():
    mask = nidiff.Diagonal(normal(8, 8).square() + 0.1)
    schedule = nidiff.schedules.heat((8, 8), 20, boundary="periodic")
    gff, data = nidiff.gaussian_free_field((8, 8)), nidiff.fit_gaussian(normal(50, 1, 8, 8))
    cases = [
        NonIsotropicScheduler(mask),
        NonIsotropicScheduler(nidiff.Dense(mask.dense(), (8, 8))),
        NonIsotropicScheduler(gff, schedule, gaussian=data),
    ]
    for ours in cases:
        x = torch.zeros(1, 1, 4, 12)
        for act in (lambda: ours.add_noise(x, x, torch.tensor([3])), lambda: ours.init_noise(x.shape)):  # noqa: B023
            with refused("covariance"):
                act()
        ours.add_noise(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 8, 8), torch.tensor([3]))
