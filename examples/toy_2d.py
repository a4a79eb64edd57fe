"""Two moons from correlated noise: any 2×2 Σ, a small network, a plain loop: python examples/toy_2d.py"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import nidiff
from nidiff import style


def two_moons(count: int) -> Tensor:
    angle, side = torch.pi * torch.rand(count), 2.0 * torch.randint(2, (count,)) - 1
    return torch.stack([side * (angle.cos() - 0.5), side * (angle.sin() - 0.25)], 1) + 0.05 * torch.randn(count, 2)


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2 E|a − b| − E|a − a'| − E|b − b'|: zero if and only if the two have one law."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main(out: Path = Path("out"), steps: int = 4000, count: int = 2000) -> dict[str, float]:
    """Train and sample; how far the prior, the samples and, for comparison, more data are from the data."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(128, 128), nn.SiLU())]
    net = nn.Sequential(nn.Linear(3, 128), nn.SiLU(), *hidden, nn.Linear(128, 2))  # (point, noise level) -> v
    process = nidiff.Process(
        nidiff.schedules.ddpm_cosine(100), nidiff.Dense(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))
    )  # any Σ
    denoiser = nidiff.Denoiser(lambda x, label: net(torch.cat([x, label[:, None] / 50 - 1], 1)), process, "v")
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, two_moons(256)).mean().backward()
        optimizer.step()
        decay.step()
    data, samples = two_moons(count), nidiff.sample(denoiser, (count, 2), sampler="ancestral")
    clouds = {"prior": process.prior((count, 2)), "samples": samples, "more data": two_moons(count)}
    distances = {name: energy_distance(points, data) for name, points in clouds.items()}
    for name, distance in distances.items():
        print(f"energy distance from {name} to the data: {distance:.4f}")
    draw(clouds, out)
    return distances


@style.drawn
def draw(clouds: dict[str, Tensor], out: Path) -> None:
    figure = Figure(figsize=(style.WIDTH, 3.0), layout="constrained")
    for axes, (name, points) in zip(figure.subplots(1, 3), clouds.items(), strict=True):
        axes.scatter(*points.T, s=1)
        axes.set(title=name, xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "toy_2d.png")


if __name__ == "__main__":
    main()
