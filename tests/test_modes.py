"""Modes are diagonal operators: their arithmetic is that of their matrices, image by image."""

import math

import pytest
import torch
from problems import refused

import nidiff
from nidiff.covariance import Eigen, Modes, PerMode, Pixels, Product, Waves
from nidiff.testing.problems import normal, random_matrix

SHAPE = (2, 4, 3)  # channels, and the event
WAVES, EVENT = Waves((4, 3)), 12
ROTATION = torch.linalg.eigh(random_matrix(2))[1]
BASES = {
    "waves": WAVES,
    "mixed boundaries": Waves((4, 3), ("reflecting", "periodic")),
    "pixels": Pixels((4, 3)),
    "eigenvectors": Eigen(torch.linalg.eigh(random_matrix(12))[1], (4, 3)),
    "product": Product(Eigen(torch.linalg.eigh(random_matrix(4))[1]), Waves((3,), "fixed")),
}
NUMBERS = {
    "one number": Modes(1.7),
    "one per image": Modes(torch.tensor([0.5, 2.0, 3.0])),
    "per mode": Modes(WAVES.evened(normal(4, 3).square() + 0.1), WAVES),
    "per image and mode": Modes(WAVES.evened(normal(3, 4, 3, seed=1).square() + 0.1), WAVES),
    "per channel and mode": Modes(normal(*SHAPE, seed=2).square() + 0.1, PerMode(ROTATION, WAVES)),
}


def matrices(modes: Modes) -> torch.Tensor:
    """The operator on [channels, *event] as one matrix per image of a batch of three, by unit vectors."""
    unit = torch.eye(24, dtype=torch.float64).reshape(24, 1, *SHAPE).expand(24, 3, *SHAPE)
    return torch.stack([modes @ vector for vector in unit]).reshape(24, 3, 24).permute(1, 2, 0)


@pytest.mark.parametrize("left", NUMBERS.values(), ids=NUMBERS)
def test_arithmetic_is_that_of_the_matrices(left):
    a, x = matrices(left), normal(3, *SHAPE, seed=4)
    assert torch.allclose(matrices(1 - left**2), torch.eye(24, dtype=torch.float64) - a @ a, atol=1e-10)
    assert torch.allclose((left * x).reshape(3, 24), torch.einsum("bij,bj->bi", a, x.reshape(3, 24)), atol=1e-10)
    assert torch.equal(left * x, x * left)
    assert torch.allclose(x / left, left**-1 * x)
    for right in NUMBERS.values():
        b = matrices(right)
        ratio = a @ torch.linalg.inv(b)
        assert torch.allclose(matrices(left * right), a @ b, atol=1e-10)
        assert torch.allclose(matrices(left + 2 * right), a + 2 * b, atol=1e-10)
        assert torch.allclose(matrices(left / right), ratio, atol=1e-9)
        assert torch.allclose(matrices(left.map(torch.atan2, right).map(torch.tan)), ratio, atol=1e-9)


@pytest.mark.parametrize("basis", BASES.values(), ids=BASES)
def test_a_multiple_of_the_identity_fits_every_basis_and_other_operators_only_their_own(basis):
    per_mode = Modes(basis.evened(normal(4, 3).square() + 0.1), basis)
    white = nidiff.Identity((4, 3)) * 3.0
    assert torch.allclose((per_mode * white).values, 3 * per_mode.values)
    both = Modes(torch.full((4, 3), 2.0, dtype=torch.float64), basis) * white  # two multiples, in two bases
    assert torch.allclose(both @ normal(4, 3), 6 * normal(4, 3))
    other = Modes(normal(4, 3).square(), Waves((4, 3), "fixed"))
    with refused("basis"):
        per_mode + other


def test_what_does_not_vary_over_the_event_fits_every_basis_of_the_event():
    """M ⊗ I commutes with every operator over the event alone; with M ⊗ Σ it is another matter."""
    matrix, cosines = random_matrix(2), Modes(normal(4, 3).square(), Waves((4, 3), "reflecting"))
    white = nidiff.Channels(matrix, nidiff.Identity((4, 3)), normalize=False)
    product = Modes(white.values, white.basis) * cosines
    assert torch.allclose(matrices(product)[0], white.dense() @ matrices(cosines)[0], atol=1e-10)
    with refused("basis"):
        cosines * nidiff.Channels(matrix, nidiff.gaussian_free_field((4, 3)))


def test_a_number_costs_no_transform(monkeypatch):
    monkeypatch.setattr(torch.fft, "rfftn", None)
    level = nidiff.schedules.ddpm_linear(10).level(torch.tensor([1, 2, 3]))
    assert (level.signal * torch.ones(3, 1, 8, 8) + level.sigma * torch.ones(3, 1, 8, 8)).isfinite().all()


def test_root_and_ratio_take_what_rounding_leaves():
    modes = Modes(torch.tensor([4.0, -1e-18, 0.0]), Pixels((3,)))
    assert modes.root().values.tolist() == [2.0, 0.0, 0.0]
    assert Modes(torch.tensor([1.0, 1.0, 3.0]), Pixels((3,))).ratio(modes).values[2] == 0
    assert float(Modes(2.0)) == 2.0
    assert Modes(torch.tensor([[1.0, -3.0], [2.0, 1.0]]), Pixels((2,))).largest.tolist() == [3.0, 2.0]
    assert math.isclose(float(2 - Modes(0.5)), 1.5)
