"""A scheduler that is started from white noise under another Σ says so, once, and does not say it of a right start."""

import math
import warnings

import pytest
import torch

import nidiff
from nidiff.interop import NonIsotropicScheduler, packed

GFF = nidiff.gaussian_free_field((4, 4))
GUARDED = {
    "gff": (nidiff.gaussian_free_field((8, 8)), "ddpm_linear"),
    "blue": (nidiff.power_law((16, 16), -1.0), "ddpm_linear"),
    "smld": (nidiff.gaussian_free_field((8, 8)), "smld_geometric:num_levels=20,sigma_max=9,sigma_min=0.02"),
    "white smld": (nidiff.Identity((8, 8)), "smld_geometric:num_levels=20,sigma_max=9,sigma_min=0.02"),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def started(scheduler, x):
    """Whether the first step from x gives the warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step(torch.zeros_like(x), scheduler.timesteps[0], x, seeded())
    assert all("init_noise" in str(each.message) for each in caught)
    return len(caught) == 1


@pytest.mark.parametrize("case", GUARDED)
def test_a_white_start_is_warned_of_and_a_right_one_is_not(case):
    covariance, schedule = GUARDED[case]
    shape = (4, 3, *covariance.event_shape)
    for wrong in (torch.randn(shape, generator=seeded()), torch.zeros(shape)):
        ours = NonIsotropicScheduler(covariance, schedule)
        ours.set_timesteps(10)
        for seed in range(20):
            x = ours.init_noise(shape, seeded(seed))
            assert not started(ours, x)
            assert not started(ours, x.half())
            assert not started(ours, 1.001 * x)  # not what init_noise drew
        with warnings.catch_warnings(action="error"):
            ours.step(wrong, ours.timesteps[1], wrong)  # not the first step
        assert started(ours, wrong)
        assert not started(ours, wrong)  # it is said once


OFFSET = nidiff.offset((8, 8), strength=0.8, normalize=False)  # as strength 0.1 on 64×64: 1 + s² N is 42


def test_one_image_under_offset_noise_is_mostly_noticed_and_the_next_ones_always():
    """The mean of four channels is all that tells: 5.5 nats for an image, and a chance of 0.87 to pass 4."""
    first = 0
    for seed in range(60):
        ours = NonIsotropicScheduler(OFFSET)
        ours.set_timesteps(5)
        x, *others = torch.randn(4, 1, 4, 8, 8, generator=seeded(seed))
        noticed = started(ours, x)
        first += noticed
        assert noticed or any(started(ours, other) for other in others)
    assert first / 60 == pytest.approx(0.87, abs=0.13)


def test_right_starts_from_elsewhere_are_warned_of_with_a_probability_below_e_to_the_minus_4():
    """Over all starts of a scheduler together."""
    wrongly = 0
    for seed in range(150):
        ours, generator = NonIsotropicScheduler(OFFSET), seeded(1000 + seed)
        ours.set_timesteps(5)
        wrongly += any(started(ours, OFFSET.sample((1, 4, 8, 8), generator)) for _ in range(3))
    assert wrongly / 150 <= math.exp(-4)


def test_a_right_start_is_counted_once_for_however_many_prompts():
    """The evidence of a start against the prior, here some 2 nats, is that of one start if it is used again."""
    ours = NonIsotropicScheduler(OFFSET)
    ours.set_timesteps(5)
    x = OFFSET.sample((1, 4, 8, 8), seeded()).float()
    x -= 0.7 * x.mean((2, 3), keepdim=True)  # a rare one, which looks rather white
    assert not any(started(ours, x) for _ in range(20))
    assert started(ours, 0.99 * x) or started(ours, 0.98 * x) or started(ours, 0.97 * x)


def test_what_init_noise_drew_is_known_and_no_other_tensor():
    """Also earlier ones, cast or packed; white noise after a draw that was not used is noticed."""
    ours = NonIsotropicScheduler(OFFSET)
    ours.set_timesteps(5)
    drawn = [ours.init_noise((8, 4, 8, 8), seeded(seed)) for seed in range(3)]
    for x in drawn:
        assert ours._start.shape_of(packed(x.bfloat16())) == x.shape
        assert ours._start.shape_of(x[:4]) is None
        assert not started(ours, x)
    assert ours._start.shape_of(OFFSET.sample((8, 4, 8, 8), seeded(9))) is None
    assert started(ours, torch.randn(8, 4, 8, 8, generator=seeded(2)))


def test_a_white_start_where_hardly_a_number_tells_and_a_start_from_an_image_pass():
    """The limits of the warning, as documented: few modes that differ from white noise, or few numbers in all. And
    image to image: the first of the chosen timesteps is not the noisiest, so nobody starts from the prior there."""
    for covariance in (nidiff.offset((64, 64), 0.1), GFF, nidiff.Identity((8, 8))):
        ours = NonIsotropicScheduler(covariance)
        ours.set_timesteps(10)
        assert not started(ours, torch.randn(1, 1, *covariance.event_shape, generator=seeded()))
    ours = NonIsotropicScheduler(nidiff.gaussian_free_field((16, 16)), algorithm="ddim")
    board = (torch.arange(16)[:, None] + torch.arange(16)) % 2 * 2.0 - 1
    x = ours.add_noise(board.expand(4, 1, 16, 16), torch.randn(4, 1, 16, 16, generator=seeded()), torch.tensor([300]))
    ours.set_timesteps(timesteps=[300, 100])
    assert not started(ours, x)
    ours.set_timesteps(timesteps=[999, 300])
    assert started(ours, x)
