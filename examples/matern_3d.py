"""Log-normal fields in three dimensions out of Matérn noise: Σ over three axes: python examples/matern_3d.py"""

import torch
from torch import Tensor, nn

import nidiff
from nidiff.covariance.waves import radial_mean, wavenumber

SHAPE = (12, 12, 12)
FIELD = nidiff.matern(SHAPE, length_scale=2.0)
NOISE = nidiff.matern(SHAPE, length_scale=1.0, smoothness=0.5)  # rougher than the data


def log_normal(count: int) -> Tensor:
    """e^(g/2) − 1 of a Gaussian field g [count, 1, 12, 12, 12], as densities and permeabilities are."""
    return torch.expm1(FIELD.sample((count, 1, *SHAPE)) / 2)


def spectrum(fields: Tensor) -> Tensor:
    """The mean power at |k| = 0, 1, …"""
    power = torch.fft.fftn(fields, dim=(-3, -2, -1), norm="ortho").abs().square().mean((0, 1))
    return radial_mean(power, wavenumber(SHAPE).round().long())


def main(steps: int = 800, count: int = 100) -> dict[str, tuple[float, float]]:
    """(error of the spectrum, skewness) of the noise, the samples and, for comparison, more data."""
    torch.manual_seed(0)
    ring = {"padding": 1, "padding_mode": "circular"}
    layers = [layer for c in (2, 16, 16, 16) for layer in (nn.Conv3d(c, 16, 3, **ring), nn.SiLU())]  # 2: field, level
    net = nn.Sequential(*layers, nn.Conv3d(16, 1, 1))
    conditioned = lambda x, label: net(torch.cat([x, (label / 50 - 1).view(-1, 1, 1, 1, 1).expand_as(x)], 1))  # noqa: E731
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(100), NOISE)
    denoiser, results = nidiff.Denoiser(conditioned, process, target="v"), {}
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, log_normal(16), weighting="target").mean().backward()
        optimizer.step()
    shape, wanted = (count, 1, *SHAPE), spectrum(log_normal(20 * count))
    noise, samples = process.prior(shape), nidiff.sample(denoiser, shape, sampler="ancestral")
    fields = {"noise": noise, "samples": samples, "more data": log_normal(count)}
    for name, x in fields.items():
        error = (spectrum(x) / wanted).log().square().mean().sqrt().item()
        results[name] = error, ((x - x.mean()) / x.std()).pow(3).mean().item()
        print("{}: error of the log spectrum {:.2f}, skewness {:.2f}".format(name, *results[name]))
    return results


if __name__ == "__main__":
    main()
