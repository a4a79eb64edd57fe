"""Covariances of every family, samplers, a mixture with its exact denoiser, a model folder to try things on, and a
Python that lacks packages."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import nidiff
from nidiff.errors import InputError
from nidiff.testing.problems import Gaussian, normal, random_matrix

# A new family or field needs one line here to go through the whole contract of test_covariance.py.
COVARIANCES: dict[str, Callable[[], nidiff.Covariance]] = {
    "identity": lambda: nidiff.Identity((3, 4)),
    "diagonal": lambda: nidiff.Diagonal(normal(4, 3).square() + 0.1),
    "dense 2x2": lambda: nidiff.Dense(torch.tensor([[2.0, 0.7], [0.7, 0.5]], device="cpu")),
    "dense in a shape": lambda: nidiff.Dense(random_matrix(12), (3, 4)),
    "gff even": lambda: nidiff.gaussian_free_field((8, 8)),
    "gff odd": lambda: nidiff.gaussian_free_field((7, 5), gamma=1.5),
    "gff 1-D even": lambda: nidiff.gaussian_free_field((16,), gamma=2.0),
    "gff 3-D": lambda: nidiff.gaussian_free_field((3, 4, 6)),
    "gff tiny": lambda: nidiff.gaussian_free_field((2, 1)),
    "fourier, any even spectrum": lambda: nidiff.Fourier((6, 5), even_spectrum((6, 5))),
    "cosine, any spectrum": lambda: nidiff.Cosine((4, 7), normal(4, 7).square() + 0.1),
    "gff reflecting and periodic": lambda: nidiff.gaussian_free_field((5, 6), boundary=("reflecting", "periodic")),
    "gff in 3-D, all boundaries": lambda: nidiff.gaussian_free_field((4, 3, 5), boundary="periodic/fixed/reflecting"),
    "spectral, any spectrum": lambda: nidiff.Spectral(
        (4, 6, 5), even_spectrum((4, 6), 1).unsqueeze(-1) * (normal(5).square() + 0.1), "periodic/periodic/fixed"
    ),
    "spectral tiny": lambda: nidiff.Spectral((1, 2, 1), [[[1.0], [2.0]]], ("fixed", "fixed", "periodic")),
    "matern of two lengths": lambda: nidiff.matern((8, 6), (1.0, 3.0), 0.5, boundary=("fixed", "periodic")),
    "ar1": lambda: nidiff.ar1(7, 0.8),
    "ou": lambda: nidiff.ou((0.0, 0.5, 2.0, 2.25, 7.0), 1.5),
    "brownian bridge": lambda: nidiff.brownian_bridge(range(6)),
    "graph": lambda: nidiff.graph(path_laplacian(4), 1.5),
    "frames of gff": lambda: nidiff.Kronecker(nidiff.ar1(4, 0.7), nidiff.gaussian_free_field((3, 6))),
    "waves times waves": lambda: nidiff.Kronecker(nidiff.power_law((6,), 1.0), nidiff.matern((4, 3), 1.0)),
    "frames of channels": lambda: nidiff.Kronecker(
        nidiff.Dense(random_matrix(3)), nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 3)))
    ),
    "product in white noise": lambda: (
        nidiff.Kronecker(nidiff.ar1(3, -0.5), nidiff.gaussian_free_field((4, 4), boundary="fixed"))
        + 0.5 * nidiff.Identity((3, 4, 4))
    ),
    "correlated channels": lambda: nidiff.correlated(
        [nidiff.power_law((5, 6), p) for p in (1.0, 2.0, 3.0)], [[1, 0.5, 0.2], [0.5, 1, -0.3], [0.2, -0.3, 1]]
    ),
    "a matrix per mode": lambda: nidiff.CrossSpectral(
        torch.stack([random_matrix(2, seed) for seed in range(12)]).reshape(4, 3, 2, 2),
        nidiff.gaussian_free_field((4, 3), boundary=("reflecting", "fixed")),
    ),
    "lagging channels": lambda: lagging((5, 6), 1),
    "lagging channels, mixed edges": lambda: lagging((3, 5), 2, boundary=("fixed", "periodic")),
    "matern aliased": lambda: nidiff.matern((5, 6), length_scale=2.0, smoothness=0.5, aliased=True),
    "blue": lambda: nidiff.power_law((6, 7), -1.0),
    "offset": lambda: nidiff.offset((6, 5), strength=0.5),
    "pyramid": lambda: nidiff.pyramid((8, 6)),
    "pyramid compounded": lambda: nidiff.pyramid((7, 8), sizes="compounded"),
    "dense, even along one axis": lambda: nidiff.Dense(
        torch.kron(torch.tensor([[2.0, 0.7], [0.7, 2.0]], device="cpu"), random_matrix(5)), (2, 5)
    ),
    "channels of gff": lambda: nidiff.Channels(random_matrix(3), nidiff.gaussian_free_field((5, 6))),
    "channels of dense": lambda: nidiff.Channels(random_matrix(2), nidiff.Dense(random_matrix(6), (2, 3))),
    "from data": lambda: nidiff.from_data(normal(50, 2, 6, 8)),
    "from data, per mode": lambda: nidiff.from_data(normal(50, 6, 5), 2, average="modes", boundary="reflecting"),
    "channels in white noise": lambda: (
        nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 4))) + 0.3 * nidiff.Identity((2, 4, 4))
    ),
    "scaled": lambda: 3.0 * nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 4))),
}

# (name, options) of samplers that need to know nothing of the data: one line for a new one. (Euler is DDIM with
# eta = 0, and ancestral DDIM with eta = 1.)
SAMPLER_CASES: list[tuple[str, dict[str, Any]]] = [
    ("ancestral", {}),
    ("ancestral", {"variance": "beta"}),
    ("ddim", {"eta": 0.5}),
    ("churn", {"amount": 0.5}),
    ("euler", {}),
    ("heun", {}),
    ("dpmpp_2m", {}),
    ("dpmpp_2m", {"eta": 0.5}),
    ("ipndm", {}),
    ("euler_maruyama", {}),
    ("pc", {"eta": 0.2}),
]


def lagging(shape: tuple[int, int], pixels: int, boundary="periodic", axis: int = 1) -> nidiff.Covariance:
    """Two channels: a field, and the same so many pixels further along the axis, with 0.3 of white noise."""
    spatial = nidiff.matern(shape, 1.5, boundary=boundary)
    turn = 2 * torch.pi * pixels * torch.fft.fftfreq(shape[axis], dtype=torch.float64, device="cpu").unsqueeze(1 - axis)
    both = torch.stack([turn.cos(), turn.sin()], -1) * spatial.eigenvalues.unsqueeze(-1)  # λ e^(iφ) between them
    matrices = torch.zeros(*shape, 2, 2, dtype=torch.float64, device="cpu")
    quadrature = torch.zeros_like(matrices)
    matrices[..., 0, 0], matrices[..., 1, 1] = spatial.eigenvalues, spatial.eigenvalues + 0.3
    matrices[..., 0, 1] = matrices[..., 1, 0] = both[..., 0]
    quadrature[..., 0, 1] = both[..., 1]
    if shape[axis] % 2 == 0:  # the wave of two pixels stands still
        quadrature.select(axis, shape[axis] // 2).zero_()
    return nidiff.CrossSpectral(matrices, spatial, quadrature=quadrature - quadrature.mT, normalize=False)


def path_laplacian(n: int) -> Tensor:
    """Degrees minus adjacency of n nodes in a row."""
    near = torch.ones(n - 1, dtype=torch.float64, device="cpu")
    adjacency = near.diag(1) + near.diag(-1)
    return adjacency.sum(0).diag() - adjacency


def even_spectrum(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A random spectrum with λ(k) = λ(−k): the periodogram of real data."""
    return torch.fft.fftn(normal(*shape, seed=seed)).abs().square() + 0.1


class Mixture:
    """A mixture of Gaussians with covariances that do not commute with Σ: the exact denoiser is nonlinear."""

    def __init__(self, covariance: nidiff.Covariance) -> None:
        self.parts = [Gaussian(covariance, seed, mean_scale) for seed, mean_scale in ((3, 1.5), (5, 2.5))]
        for part in self.parts:
            part.matrix = 0.2 * part.matrix
        self.weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
        self.covariance = covariance

    def denoise(self, x: Tensor, level: nidiff.Level) -> Tensor:
        logits = torch.stack([p.log_prob(x, level) for p in self.parts]) + self.weights.log()[:, None]
        means = torch.stack([p.denoise(x, level) for p in self.parts])
        return (broadcast_weights(logits.softmax(0), means) * means).sum(0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x0."""
        means, matrices = (torch.stack([getattr(p, name) for p in self.parts]) for name in ("mean", "matrix"))
        mean, second = self.weights @ means, torch.einsum("p,pi,pj->ij", self.weights, means, means)
        return mean, torch.einsum("p,pij->ij", self.weights, matrices) + second - torch.outer(mean, mean)

    def share_of_the_first(self, x: Tensor) -> float:
        """How many of the images are nearer to the mean of the first part."""
        distances = torch.stack([(x.flatten(1) - part.mean).norm(dim=1) for part in self.parts])
        return (distances.argmin(0) == 0).double().mean().item()

    denoiser = Gaussian.denoiser


def broadcast_weights(weights: Tensor, like: Tensor) -> Tensor:
    return weights.reshape(*weights.shape, *[1] * (like.ndim - weights.ndim))


def untrained_model(folder, shape=(1, 8, 8), num_levels=40):
    """A model folder with a small network that was never trained: its images are noise, but a function of the seed."""
    from nidiff.diffusion.scaling import PIXELS
    from nidiff.model.folder import save_model
    from nidiff.model.network import unet2d

    torch.manual_seed(0)
    network = unet2d(shape, widths=(8, 16), layers=1, attention=(1,))
    process = nidiff.Process(nidiff.schedules.ddpm_linear(num_levels), nidiff.gaussian_free_field(shape[1:]))
    save_model(nidiff.Denoiser(network, process, clip=1.0, scaling=PIXELS), folder)
    return folder


def write_run(folder, experiment, data="a"):
    """The experiment.json of a run on these data, with the identity that its model, if it has one, was made with."""
    import json

    from nidiff.model.manifest import write_manifest
    from nidiff.sealed import digest
    from nidiff.training.identity import settings_digest

    folder.mkdir(parents=True, exist_ok=True)
    identity = {part: digest(part) for part in ("process", "network")}
    identity |= {"settings": settings_digest(experiment), "data": digest(data)}
    (folder / "experiment.json").write_text(json.dumps(experiment.to_json() | {"identity": identity}))
    if (folder / "model").is_dir():
        write_manifest(folder / "model", identity)
    return folder


def conditional_model(folder, dropout=0.1):
    """A model that was never trained, whose images depend on their class."""
    from nidiff.diffusion.scaling import PIXELS
    from nidiff.model.folder import save_model

    torch.manual_seed(0)
    net = nidiff.FieldUNet((8, 8), widths=(8,), layers=1, attention=(), num_classes=10)
    with torch.no_grad():
        for weight in net.parameters():  # some are 0, so that what a block is told would not matter
            weight.normal_(0, 0.1)
        net.classes.weight.normal_()
    process = nidiff.Process(nidiff.schedules.ddpm_linear(40), nidiff.gaussian_free_field((8, 8)))
    conditions = {"class_labels": nidiff.Condition(10, (), -1, dropout)}
    save_model(nidiff.Denoiser(net, process, "x0", 1.0, PIXELS, conditions=conditions), folder)
    return folder


BLOCKED = """
import sys

class Lacking:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *arguments):
        missing = name.partition(".")[0] in sys.argv[1].split(",")
        return None if missing else self.finder.find_spec(name, *arguments)

sys.meta_path[:] = map(Lacking, sys.meta_path)
"""


def without(modules, code, *arguments, **options):
    """Run ``code`` in a Python that lacks the modules."""
    command = [sys.executable, "-c", BLOCKED + code, ",".join(modules), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@contextlib.contextmanager
def refused(*arguments: str | None) -> Iterator[None]:
    """The code inside raises an `InputError` about one of these arguments."""
    with pytest.raises(InputError) as caught:
        yield
    assert caught.value.argument in arguments, str(caught.value)


def load(path, **options):
    return nidiff.load_dataset(path, progress=False, **options)


def refuse(path, argument: str, *words: str, **options) -> None:
    """Whatever reads ``path`` is refused for this argument, in a sentence with these words."""
    with pytest.raises(InputError) as error:
        load(path, **options).all()
    assert error.value.argument == argument, str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


class Unconditional(torch.nn.Module):
    """A network of x alone, as one that ignores the level: s(x, σ) = −Σ^-½ ε(x) / σ (eq. 87, 99).

    With the training schedule as ``harmonic``, ε is multiplied by σ_H / σ, σ_H the harmonic mean of its sigmas: the
    paper's correction (eq. 108). The network's optimum averages 1/σ over p(σ | x), not over the training levels; at the
    dimension of images that is 1/σ within a percent, and the correction is wrong by the factor σ_H / σ: 0.0017 to 8.4
    for the paper's own 232 levels (E32).
    """

    def __init__(self, net: Callable[[Tensor], Tensor], harmonic: nidiff.Schedule | None = None) -> None:
        super().__init__()
        self.net, self.harmonic = net, harmonic

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        output = self.net(x)
        if self.harmonic is None:
            return output
        factor = 1 / (1 / self.harmonic.sigma).mean() / self.harmonic.level(label).sigma.values
        return broadcast_weights(factor, output).to(output) * output
