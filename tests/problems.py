"""Closed-form problems: covariances of every family, and data whose exact denoiser, flow and density are known."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import nidiff
from nidiff.diffusion.process import broadcast
from nidiff.diffusion.schedule import Schedule


def random_matrix(size: int, seed: int = 0) -> Tensor:
    """A symmetric positive-definite matrix that commutes with nothing in particular."""
    factor = normal(size, size, seed=seed)
    return factor @ factor.T / size + 0.3 * torch.eye(size, dtype=torch.float64, device="cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")


# A new family or field needs one line here to go through the whole contract of test_covariance.py.
COVARIANCES: dict[str, Callable[[], nidiff.Covariance]] = {
    "identity": lambda: nidiff.Identity((3, 4)),
    "diagonal": lambda: nidiff.Diagonal(normal(4, 3).square() + 0.1),
    "dense 2x2": lambda: nidiff.Dense(torch.tensor([[2.0, 0.7], [0.7, 0.5]], device="cpu")),
    "dense in a shape": lambda: nidiff.Dense(random_matrix(12), (3, 4)),
    "gff even": lambda: nidiff.gaussian_free_field((8, 8)),
    "gff odd": lambda: nidiff.gaussian_free_field((7, 5), gamma=1.5),
    "gff even last, odd first": lambda: nidiff.gaussian_free_field((5, 8), gamma=0.5),
    "gff 1-D even": lambda: nidiff.gaussian_free_field((16,), gamma=2.0),
    "gff 1-D odd": lambda: nidiff.gaussian_free_field((9,)),
    "gff 3-D": lambda: nidiff.gaussian_free_field((3, 4, 6)),
    "gff tiny": lambda: nidiff.gaussian_free_field((2, 1)),
    "gff reflecting": lambda: nidiff.gaussian_free_field((5, 8), boundary="reflecting"),
    "gff reflecting 3-D": lambda: nidiff.gaussian_free_field((3, 4, 2), gamma=2.0, boundary="reflecting"),
    "gff not normalised": lambda: nidiff.gaussian_free_field((6, 6), normalize=False),
    "fourier, any even spectrum": lambda: nidiff.Fourier((6, 5), even_spectrum((6, 5))),
    "cosine, any spectrum": lambda: nidiff.Cosine((4, 7), normal(4, 7).square() + 0.1),
    "matern": lambda: nidiff.matern((8, 6), length_scale=1.5, smoothness=0.5),
    "matern aliased": lambda: nidiff.matern((5, 6), length_scale=2.0, smoothness=0.5, aliased=True),
    "matern 3-D reflecting": lambda: nidiff.matern((4, 3, 5), length_scale=1.0, boundary="reflecting"),
    "pink 1-D": lambda: nidiff.power_law((20,), 1.0),
    "blue": lambda: nidiff.power_law((6, 7), -1.0),
    "offset": lambda: nidiff.offset((6, 5), strength=0.5),
    "pyramid": lambda: nidiff.pyramid((8, 6)),
    "pyramid compounded": lambda: nidiff.pyramid((7, 8), sizes="compounded"),
    "dense, even along one axis": lambda: nidiff.Dense(
        torch.kron(torch.tensor([[2.0, 0.7], [0.7, 2.0]], device="cpu"), random_matrix(5)), (2, 5)
    ),
    "channels of gff": lambda: nidiff.Channels(random_matrix(3), nidiff.gaussian_free_field((5, 6))),
    "channels of dense": lambda: nidiff.Channels(random_matrix(2), nidiff.Dense(random_matrix(6), (2, 3))),
    "channels of cosine": lambda: nidiff.Channels(random_matrix(2), nidiff.Cosine((4, 3), normal(4, 3).square() + 0.1)),
    "from data": lambda: nidiff.from_data(normal(50, 2, 6, 8)),
    "from data, per mode": lambda: nidiff.from_data(normal(50, 6, 5), 2, average="modes", boundary="reflecting"),
    "sum": lambda: nidiff.gaussian_free_field((6, 6)) + 0.5 * nidiff.Identity((6, 6)),
    "channels in white noise": lambda: (
        nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 4))) + 0.3 * nidiff.Identity((2, 4, 4))
    ),
    "scaled": lambda: 3.0 * nidiff.Channels(random_matrix(2), nidiff.gaussian_free_field((4, 4))),
}


def even_spectrum(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A random spectrum with λ(k) = λ(−k): the periodogram of real data."""
    return torch.fft.fftn(normal(*shape, seed=seed)).abs().square() + 0.1


class Gaussian:
    """x0 ~ N(mean, matrix), ``matrix`` not commuting with Σ: denoiser, flow and density are exact."""

    def __init__(self, covariance: nidiff.Covariance, seed: int = 1, mean_scale: float = 0.5) -> None:
        self.covariance = covariance
        self.shape = covariance.event_shape
        self.noise_matrix = covariance.dense()
        self.matrix = random_matrix(covariance.size, seed)
        self.mean = mean_scale * normal(covariance.size, seed=seed + 1)
        assert (self.matrix @ self.noise_matrix - self.noise_matrix @ self.matrix).abs().max() > 1e-2

    def marginal(self, level: nidiff.Level) -> tuple[Tensor, Tensor]:
        """Mean and covariance of x at a level."""
        return level.signal * self.mean, level.signal**2 * self.matrix + level.sigma**2 * self.noise_matrix

    def denoise(self, x: Tensor, level: nidiff.Level) -> Tensor:
        """E[x0 | x] = m + signal · C (signal² C + sigma² Σ)⁻¹ (x − signal · m), all images at one level."""
        mean, covariance = self.marginal(level)
        gain = level.signal * self.matrix @ torch.linalg.inv(covariance)
        flat = x.reshape(len(x), -1)
        return (self.mean + (flat - mean) @ gain.T).reshape(x.shape)

    def flow(self, x: Tensor, here: nidiff.Level, there: nidiff.Level) -> Tensor:
        """The probability-flow ODE from ``here`` to ``there``: a linear map in whitened coordinates."""
        values, vectors = torch.linalg.eigh(self.noise_matrix)
        root = vectors @ torch.diag(values.sqrt()) @ vectors.T
        whiten = torch.linalg.inv(root)
        c, modes = torch.linalg.eigh(whiten @ self.matrix @ whiten)
        scale = ((there.signal**2 * c + there.sigma**2) / (here.signal**2 * c + here.sigma**2)).sqrt()
        flow = root @ modes @ torch.diag(scale) @ modes.T @ whiten
        flat = x.reshape(len(x), -1) - here.signal * self.mean
        return (there.signal * self.mean + flat @ flow.T).reshape(x.shape)

    def log_prob(self, x: Tensor, level: nidiff.Level) -> Tensor:
        mean, covariance = self.marginal(level)
        return torch.distributions.MultivariateNormal(mean, covariance).log_prob(x.reshape(len(x), -1))

    def denoiser(self, process: nidiff.Process, **options: object) -> nidiff.Denoiser:
        return exact_denoiser(self, process, **options)


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
        mean = sum(w * p.mean for w, p in zip(self.weights, self.parts, strict=True))
        second = sum(
            w * (p.matrix + torch.outer(p.mean, p.mean)) for w, p in zip(self.weights, self.parts, strict=True)
        )
        return mean, second - torch.outer(mean, mean)

    def denoiser(self, process: nidiff.Process, **options: object) -> nidiff.Denoiser:
        return exact_denoiser(self, process, **options)


def broadcast_weights(weights: Tensor, like: Tensor) -> Tensor:
    return weights.reshape(*weights.shape, *[1] * (like.ndim - weights.ndim))


def exact_denoiser(problem: Gaussian | Mixture, process: nidiff.Process, **options: object) -> nidiff.Denoiser:
    """The exact denoiser of ``problem`` as a network that predicts x0 and is told a label, the same for all images."""

    def net(x: Tensor, label: Tensor) -> Tensor:
        return problem.denoise(x, process.schedule.level(label[0].item()))

    return nidiff.Denoiser(net, process, target="x0", **options)


def smooth_net(event_shape: tuple[int, ...], channels: int = 1, seed: int = 0) -> Callable[[Tensor, Tensor], Tensor]:
    """An arbitrary smooth nonlinear float64 network of (x, label)."""
    size = channels * int(torch.Size(event_shape).numel())
    first, second = normal(size, size, seed=seed) / size**0.5, normal(size, size, seed=seed + 1) / size**0.5

    def net(x: Tensor, label: Tensor) -> Tensor:
        hidden = torch.tanh(x.flatten(1) @ first + broadcast(0.01 * label.double(), x.flatten(1)))
        return (hidden @ second).reshape(x.shape)

    return net


def uniform_in_logsnr(num_levels: int, keeps: str, low: float = -14.0, high: float = 7.0) -> Schedule:
    return Schedule(torch.linspace(high, low, num_levels, dtype=torch.float64), keeps)


class Impulses(nidiff.Process):
    """A process whose noise, draw by draw, is the columns of ``root``, one per image of the batch.

    Every step is affine in x and in its noise. For data with mean 0 the images are then the responses to one unit of
    noise each, and their outer products add up to the exact covariance of the sampler's output: no Monte Carlo.
    """

    def __init__(self, schedule: Schedule, covariance: nidiff.Covariance, root: Tensor) -> None:
        super().__init__(schedule, covariance)
        self.root, self.used = root, 0

    def noise(self, shape: Sequence[int], *args: object, **kwargs: object) -> Tensor:
        noise = torch.zeros(shape[0], self.covariance.size, dtype=torch.float64)
        noise[self.used : self.used + self.root.shape[1]] = self.root.T
        self.used += self.root.shape[1]
        return noise.reshape(tuple(shape))


def output_covariance(
    problem: Gaussian,
    schedule: Schedule,
    name: str,
    options: dict[str, object],
    root: Tensor | None = None,
    max_draws: int | None = None,
) -> Tensor:
    """The exact covariance of the sampler's state at the last level, for data with mean 0."""
    values, vectors = torch.linalg.eigh(problem.noise_matrix)
    root = vectors @ torch.diag(values.sqrt()) if root is None else root
    process = Impulses(schedule, problem.covariance, root)
    batch = problem.covariance.size * (max_draws or len(schedule) + 1)
    x = nidiff.sample(
        problem.denoiser(process),
        (batch, *problem.shape),
        sampler=name,
        denoise=False,
        dtype=torch.float64,
        **options,
    ).reshape(batch, -1)
    return x.T @ x


def whitened_paths(
    cov: nidiff.Covariance, schedule: Schedule, name: str, options: dict[str, object]
) -> list[tuple[Tensor, Tensor]]:
    """Σ^-½ x and y along the path of the same sampler, for an arbitrary nonlinear network: eps_y(y, t) = eps(Σ^½ y, t).

    The isotropic twin has the same basis and all eigenvalues 1, so that equal seeds mean equal white noise.
    """
    twin = cov.with_eigenvalues(torch.ones_like(cov.eigenvalues))
    net = smooth_net(cov.event_shape)
    coloured = nidiff.Denoiser(net, nidiff.Process(schedule, cov))
    white = nidiff.Denoiser(lambda y, label: net(cov.sqrt(y), label), nidiff.Process(schedule, twin))
    paths: list[list[Tensor]] = [[], []]
    for denoiser, path in zip((coloured, white), paths, strict=True):
        nidiff.sample(
            denoiser,
            (3, *cov.event_shape),
            sampler=name,
            num_steps=15,
            seeds=[5, 6, 7],
            dtype=torch.float64,
            callback=lambda progress, path=path: path.append(progress.x),
            **options,
        )
    return [(cov.inv_sqrt(x), y) for x, y in zip(*paths, strict=True)]


def slope(steps: list[int], errors: list[float]) -> float:
    """Order of convergence: minus the least-squares slope of log error against log steps."""
    x = torch.tensor(steps, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    return -(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


def untrained_model(folder, shape=(1, 8, 8), num_levels=40):
    """A model folder with a small network that was never trained: its images are noise, but a function of the seed."""
    from nidiff.model.folder import save_model
    from nidiff.model.network import unet
    from nidiff.training.experiment import Experiment

    torch.manual_seed(0)
    network = unet(shape, widths=(8, 16), layers=1, attention=(1,))
    experiment = Experiment(schedule=f"ddpm_linear:num_levels={num_levels}")
    save_model(folder, network, nidiff.gaussian_free_field(shape[1:]), experiment)
    return folder
