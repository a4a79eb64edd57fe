"""The noise of trainers is a Σ of ours: offset, perturbation and pyramid (multi-resolution) noise, as kohya's
sd-scripts, OneTrainer and Marigold draw them. The recipes are linear: unit vectors put into them give Σ."""

import math
import random
from collections import Counter

import pytest
import torch
from diffusers import DDPMScheduler
from torch import Tensor

import nidiff
from nidiff.covariance.config import as_covariance
from nidiff.interop import NonIsotropicScheduler


def recipe(shape, levels, ratio, overwrite=False):
    """The sizes of the grids of pyramid noise: ``ratio()`` is drawn for each level, and the last has one pixel along
    an axis. Some copies of the recipe overwrite the size that they divide."""
    base = shape
    for level in range(levels):
        step = ratio() ** level
        size = tuple(max(1, int(n / step)) for n in base)
        yield level, size
        base = size if overwrite else base
        if min(size) == 1:
            return


def matrix_of(shape, counts, runs, discount) -> Tensor:
    """The mean covariance of ``runs`` draws of the recipe that had these grids: unit vectors of their white noise,
    upsampled, give their matrices."""
    matrix = torch.eye(math.prod(shape), dtype=torch.float64)
    for (level, size), count in counts.items():
        unit = torch.eye(math.prod(size), dtype=torch.float64).reshape(-1, 1, *size)
        up = torch.nn.functional.interpolate(unit, size=shape, mode="bilinear").flatten(1)
        matrix += count / runs * discount ** (2 * level) * up.T @ up
    return matrix


def test_offset_noise_of_kohya_and_onetrainer():
    """randn + s · (one number per channel) is I + s² 11ᵀ; perturbation noise of weight p adds p² I."""
    size, strength, perturbation = 20, 0.3, 0.4
    white, constant = torch.eye(size).double(), strength * torch.ones(size, 1).double()
    kohya, onetrainer = (torch.cat(parts, 1) for parts in ((white, constant), (white, constant, perturbation * white)))
    offset = nidiff.offset((4, 5), strength, normalize=False)
    assert torch.allclose(offset.dense(), kohya @ kohya.T, atol=1e-12)
    more = 1 + perturbation**2
    both = more * nidiff.offset((4, 5), strength / more**0.5, normalize=False)
    assert torch.allclose(both.dense(), onetrainer @ onetrainer.T, atol=1e-12)
    assert not torch.allclose(offset.dense(), onetrainer @ onetrainer.T, atol=1e-2)


@pytest.mark.parametrize("prediction", ["noise", "v_prediction"])
def test_a_network_of_a_trainer_is_decoded_by_the_scheduler_as_it_was_trained(prediction):
    """Its target is the coloured noise that was added, or v of it: x̂0 is x0. As "epsilon", which is white, it is not.
    And a start from N(0, Σ) has the brightness of what the trainer showed at the noisiest level."""
    offset, table = nidiff.offset((8, 8), 0.8, normalize=False), DDPMScheduler()
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(500, 4, 8, 8, generator=generator)
    noise = torch.randn(x0.shape, generator=generator) + 0.8 * torch.randn(500, 4, 1, 1, generator=generator)
    t = torch.tensor([999])
    noisy = table.add_noise(x0, noise, t)
    output = noise if prediction == "noise" else table.get_velocity(x0, noise, t)
    options = {"covariance": offset, "clip_sample": False}
    ours = NonIsotropicScheduler.from_config(table.config, prediction_type=prediction, **options)
    assert torch.allclose(ours.step(output, 999, noisy).pred_original_sample, x0, atol=2e-2)
    white = NonIsotropicScheduler.from_config(table.config, prediction_type="epsilon", **options)
    assert not torch.allclose(white.step(output, 999, noisy).pred_original_sample, x0, atol=1.0)
    start = ours.init_noise(x0.shape, generator)
    shown, drawn, plain = (each.mean((2, 3)).std().item() for each in (noisy, start, torch.randn(x0.shape)))
    assert drawn == pytest.approx(shown, rel=0.1)
    assert plain < 0.3 * shown


@pytest.mark.parametrize("shape", [(32, 32), (8, 6), (7, 12)])
def test_pyramid_noise_with_a_fixed_ratio(shape):
    """White noise at falling resolutions, upsampled bilinearly and added, in the two variants found in trainers."""
    grids = (Counter(recipe(shape, 10, lambda: 2, overwrite)) for overwrite in (False, True))
    powers, compounded = (matrix_of(shape, each, 1, 0.8) for each in grids)
    assert torch.allclose(nidiff.pyramid(shape, 0.8, normalize=False).dense(), powers, atol=1e-11)
    other = nidiff.pyramid(shape, 0.8, normalize=False, sizes="compounded")
    assert torch.allclose(other.dense(), compounded, atol=1e-11)
    assert not torch.allclose(powers, compounded, atol=0.1)


@pytest.mark.parametrize("shape", [(16, 12), (9, 20)])
@pytest.mark.parametrize("sizes", ["powers", "compounded"])
def test_pyramid_noise_with_a_ratio_drawn_for_every_level(sizes, shape):
    """ratio=(2, 4) is the covariance over all that trainers draw, scaled to unit variance as they do. The mean of 4000
    draws of the sizes is off by about 1/√4000; a fixed ratio, and the other variant, by more."""
    draw, grids = random.Random(0), Counter()
    for _ in range(4000):
        grids.update(recipe(shape, 6, lambda: 2 + 2 * draw.random(), sizes == "compounded"))
    mean = matrix_of(shape, grids, 4000, 0.9)
    mean /= mean.diagonal().mean()

    def error(ratio, sizes):
        matrix = nidiff.pyramid(shape, 0.9, 6, ratio, sizes=sizes).dense()
        return ((mean - matrix).norm() / matrix.norm()).item()

    assert error((2, 4), sizes) < 0.015
    for wrong in ((2.0, sizes), (3.0, sizes), ((2, 4), "powers" if sizes == "compounded" else "compounded")):
        assert error(*wrong) > 0.03


@pytest.mark.parametrize(("discount", "nats"), [(0.9, 2.5e-3), (0.3, 2e-5)])
@pytest.mark.parametrize("ratio", [2.0, (2, 4)])
def test_above_5000_pixels_pyramid_noise_is_diagonal_in_cosines_at_a_stated_price(discount, nats, ratio):
    """Each cosine has its variance. The divergence from the law itself, per pixel, is what the docstring says."""
    options = {"discount": discount, "num_levels": 10, "ratio": ratio, "normalize": False}
    exact, cosines = (nidiff.pyramid((24, 24), exact=exact, **options) for exact in (True, False))
    basis = cosines.basis
    modes = basis.synthesise(torch.eye(576).double().reshape(-1, 24, 24))
    variances = (modes * exact.matmul(modes)).sum((1, 2)).reshape(24, 24)
    assert torch.allclose(variances, cosines.eigenvalues, rtol=1e-9)
    divergence = 0.5 * (cosines.logdet() - exact.logdet()) / 576  # of Gaussians with the same variances in a basis
    assert 0 < divergence < nats
    assert divergence < 0.1 * 0.5 * (576 * math.log(cosines.eigenvalues.mean()) - exact.logdet()) / 576  # than white


def test_pyramid_noise_above_128_is_drawn_with_its_variances():
    large = nidiff.pyramid((128, 160), discount=0.4, num_levels=6, ratio=(2, 4))
    assert large.eigenvalues.mean() == pytest.approx(1.0)
    draws = large.sample((200, 128, 160), torch.Generator().manual_seed(0))
    power = large.basis.power(draws.double()).mean(0)
    coarse = (power / large.eigenvalues)[:16, :16]
    assert coarse.mean() == pytest.approx(1.0, abs=4 * (2 / 200 / 256) ** 0.5)
    assert (power[:4, :4]).mean() > 2  # white noise has 1


def test_a_pyramid_is_saved_by_its_call_and_read_from_text():
    pyramid = nidiff.pyramid((128, 96), 0.4, 6, (2, 4))
    again = nidiff.Covariance.from_config(pyramid.to_config())
    assert torch.equal(again.eigenvalues, pyramid.eigenvalues)
    text = as_covariance("pyramid:discount=0.4,num_levels=6,ratio=2/4", (128, 96))
    assert torch.equal(text.eigenvalues, pyramid.eigenvalues)
    assert not pyramid.tensors()
