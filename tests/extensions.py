"""What a user writes in a module of their own: a network, a basis, fields of Σ, a schedule, a target, a sampler, …"""

import torch

import nidiff
from nidiff.covariance.basis import Basis
from nidiff.covariance.config import BASES
from nidiff.covariance.families import remembered as remembered_field
from nidiff.covariance.fields import FAMILIES, FIELDS
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.diffusion.spacing import SPACINGS
from nidiff.diffusion.target import TARGETS, Target
from nidiff.evaluation.metrics import METRICS, Metric
from nidiff.recipe import remembered
from nidiff.sampling.ancestral import mix
from nidiff.sampling.sampler import SAMPLERS


class Mine(torch.nn.Module):
    """A network with shared weights and a buffer."""

    def __init__(self, size=6):
        super().__init__()
        self.first, self.second = torch.nn.Linear(size, size), torch.nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.register_buffer("counted", torch.tensor(3))

    def forward(self, x, label):
        return self.second(torch.tanh(self.first(x) + 0.01 * label.reshape(-1, *[1] * (x.ndim - 1))))


class PairBasis(Basis):
    """Sums and differences of neighbours in pairs."""

    def __init__(self, shape):
        self.event_shape = tuple(shape)

    def analyse(self, x):
        return torch.stack([x[..., ::2] + x[..., 1::2], x[..., ::2] - x[..., 1::2]], -1).flatten(-2) / 2**0.5

    synthesise = analyse

    def arguments(self):
        return {"shape": self.event_shape}


def Pairs(shape, smooth=3.0):
    """The variance of a sum is ``smooth`` times that of a difference."""
    eigenvalues = torch.ones(shape)
    eigenvalues[..., ::2] = smooth
    return nidiff.Covariance(eigenvalues, PairBasis(shape), normalize=True)


@remembered_field
def striped(shape, strength: float = 2.0):
    return Pairs(shape, 1 + strength)


@remembered
def even(num_levels: int = 20):
    return nidiff.Schedule(torch.linspace(8, -8, num_levels, dtype=torch.float64))


def twice(x0, eps, level, covariance):
    return 2 * x0


def from_twice(signal, sigma):
    return 0.0 * signal, 0.5 + 0.0 * signal


def lazy(chain, x, x0, here, there, *, share: float = 0.2):
    return mix(x, x0, here, there, share * there.sigma) + share * there.sigma * chain.noise()


def every_other(schedule, count):
    return [2 * (count - 1 - i) + 1 for i in range(count)]


def brightness(real, generated):
    return generated.items.double().mean().item()


TARGET = Target(twice, from_twice, 0.0)
ENTRIES = (
    (BASES, "PairBasis", PairBasis),
    (FAMILIES, "Pairs", Pairs),
    (FIELDS, "striped", striped),
    (SCHEDULES, "even", even),
    (TARGETS, "twice", TARGET),
    (WEIGHTINGS, "rough", -0.25),
    (SAMPLERS, "lazy", nidiff.sampling.Sampler(lazy, "every_other", 6)),
    (SPACINGS, "every_other", every_other),
    (METRICS, "brightness", Metric(brightness)),
)
