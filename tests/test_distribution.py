"""N(0, Σ) as a torch distribution: the base of a flow, as the paper suggests."""

import pytest
import torch
from problems import refused
from torch.distributions import Independent, kl_divergence

import nidiff
from nidiff.covariance.distribution import GaussianField
from nidiff.testing.problems import random_matrix


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


COV = nidiff.Dense(random_matrix(6), (2, 3))


def peer(channels: int, cov: nidiff.Covariance = COV) -> torch.distributions.MultivariateNormal:
    return torch.distributions.MultivariateNormal(
        torch.zeros(cov.size * channels), torch.kron(torch.eye(channels), cov.dense())
    )


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


@pytest.mark.parametrize(("batch", "channels"), [((), 3), ((7,), None), ((2, 1, 3), 1)])
def test_expanding_keeps_torchs_contract(batch, channels):
    """Everything has the shapes and the values that torch's own MultivariateNormal has, expanded likewise."""
    ours, theirs = COV.distribution(channels).expand(batch), peer(channels or 1).expand(batch)
    assert ours.batch_shape == theirs.batch_shape == torch.Size(batch)
    assert ours.rsample((4,)).shape == (4, *batch, *ours.event_shape)
    for name in ("mean", "mode", "variance", "stddev"):
        assert getattr(ours, name).shape == (*batch, *ours.event_shape)
        assert torch.allclose(getattr(ours, name).flatten(len(batch)), getattr(theirs, name), rtol=1e-10)
    assert torch.allclose(ours.entropy(), theirs.entropy(), rtol=1e-10)
    assert ours.entropy().shape == torch.Size(batch)
    x = ours.sample((4,))
    assert torch.allclose(ours.log_prob(x), theirs.log_prob(x.flatten(-len(ours.event_shape))), rtol=1e-10)
    one = ours.log_prob(x.reshape(-1, *ours.event_shape)[0])
    assert one.shape == torch.Size(batch)  # broadcast against the batch, as torch does
    together = Independent(ours, len(batch))
    assert torch.allclose(together.entropy(), Independent(theirs, len(batch)).entropy(), rtol=1e-10)
    assert torch.allclose(together.log_prob(x), ours.log_prob(x).reshape(4, -1).sum(1), rtol=1e-10)
    if batch == (7,):
        assert ours.expand((3, 7)).entropy().shape == (3, 7)
        with pytest.raises(RuntimeError, match="7"):
            ours.expand((3,))


def test_arguments_are_validated_if_asked():
    nothing = torch.full((2, 3), float("nan"))
    with pytest.raises(ValueError, match="support|constraint"):
        GaussianField(COV, validate_args=True).expand((4,)).log_prob(nothing.expand(4, 2, 3))
    assert GaussianField(COV, validate_args=False).log_prob(nothing).isnan()


OTHER = {
    "itself": lambda: COV,
    "scaled": lambda: 2.5 * COV,
    "white": lambda: 0.7 * nidiff.Identity((2, 3)),
    "another basis": lambda: nidiff.matern((2, 3), 1.0),
    "another matrix": lambda: nidiff.Dense(random_matrix(6, seed=1), (2, 3), normalize=False),
}


@pytest.mark.parametrize("make", OTHER.values(), ids=OTHER.keys())
@pytest.mark.parametrize("channels", [None, 2])
def test_kl_divergence_is_that_of_the_multivariate_normals(make, channels):
    other, count = make(), channels or 1
    for p, q in ((COV, other), (other, COV)):
        mine = kl_divergence(p.distribution(channels), q.distribution(channels).expand((5,)))
        theirs = kl_divergence(peer(count, p), peer(count, q))
        assert mine.shape == (5,)
        assert torch.allclose(mine, theirs.expand(5), rtol=1e-9, atol=1e-9)
    assert (theirs > 0.1) == (make is not OTHER["itself"])


def test_kl_divergence_between_fields_with_one_basis_needs_no_matrix():
    """Two periodic fields over 65,536 pixels: the sum over modes."""
    p, q = nidiff.gaussian_free_field((256, 256), 0.5), nidiff.gaussian_free_field((256, 256), 1.0)
    ratio = p.eigenvalues / q.eigenvalues
    expected = 0.5 * (ratio - 1 - ratio.log()).sum()
    assert kl_divergence(p.distribution(), q.distribution()).item() == pytest.approx(expected.item())
    with refused("p"):
        kl_divergence(p.distribution(), nidiff.power_law((256, 256), 1.0, boundary="reflecting").distribution())


def test_kl_divergence_sees_channels_wherever_they_are():
    colours = nidiff.Channels(random_matrix(2), COV, normalize=False)
    p, q = colours.distribution(), COV.distribution(channels=2)
    theirs = kl_divergence(peer(1, colours), peer(2))
    assert kl_divergence(p, q).item() == pytest.approx(theirs.item())
    with refused("p"):
        kl_divergence(p, COV.distribution(channels=3))


def test_shapes_that_do_not_fit_are_refused():
    with refused("value"):
        COV.distribution(3).log_prob(torch.zeros(4, 2, 3, 3))
    with refused("channels"):
        COV.distribution(0)
