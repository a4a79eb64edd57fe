"""N(0, Σ) as a torch distribution: the base of a flow, as the paper suggests."""

import pytest
import torch

import nidiff
from nidiff.testing.problems import random_matrix


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


COV = nidiff.Dense(random_matrix(6), (2, 3))


def peer(channels: int) -> torch.distributions.MultivariateNormal:
    return torch.distributions.MultivariateNormal(
        torch.zeros(6 * channels), torch.kron(torch.eye(channels), COV.dense())
    )


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_it_is_the_multivariate_normal(channels):
    field, count = COV.distribution(channels), channels or 1
    x = field.rsample((4, 5))
    assert x.shape == (4, 5, *field.event_shape)
    assert torch.allclose(field.log_prob(x), peer(count).log_prob(x.reshape(4, 5, -1)), rtol=1e-10)
    assert field.log_prob(x[0, 0]).shape == ()
    assert field.entropy().item() == pytest.approx(peer(count).entropy().item(), rel=1e-10)
    assert torch.allclose(field.variance.flatten(), peer(count).variance, rtol=1e-10)
    assert (field.mean == 0).all()


def test_draws_follow_torchs_global_generator_and_have_the_covariance():
    torch.manual_seed(0)
    x = COV.distribution().sample((50000,)).reshape(-1, 6)
    torch.manual_seed(0)
    assert torch.equal(x[:1], COV.distribution().sample((50000,)).reshape(-1, 6)[:1])
    assert (torch.cov(x.T) - COV.dense()).abs().max() < 0.05
    assert (torch.cov(x.T) - torch.eye(6)).abs().max() > 0.2  # not white


def test_it_is_the_base_of_a_flow():
    """torch's own TransformedDistribution: y = 3x + 1 has log p(y) = log N((y−1)/3; 0, Σ) − D log 3."""
    base = COV.distribution(channels=2)
    shift = torch.distributions.AffineTransform(1.0, 3.0, event_dim=3)
    flow = torch.distributions.TransformedDistribution(base, [shift])
    y = flow.rsample((7,))
    expected = base.log_prob((y - 1) / 3) - 12 * torch.log(torch.tensor(3.0))
    assert torch.allclose(flow.log_prob(y), expected, rtol=1e-10)
    independent = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2, 2, 3), 1.0), 3)
    assert not torch.allclose(base.log_prob(y), independent.log_prob(y), rtol=1e-2)


def test_channels_last_are_refused_and_batches_expand():
    field = COV.distribution(3)
    with pytest.raises(nidiff.InputError, match="its last axes must be"):
        field.log_prob(torch.zeros(4, 2, 3, 3))
    expanded = field.expand(torch.Size((5,)))
    assert expanded.rsample((2,)).shape == (2, 5, 3, 2, 3)
    assert expanded.log_prob(expanded.rsample()).shape == (5,)


def test_bad_channels_are_named():
    with pytest.raises(nidiff.InputError, match="channels"):
        COV.distribution(0)
