"""Heartbeats from pink noise: Σ over one axis, a small convolutional network: python examples/pink_noise_1d.py"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import nidiff
from nidiff import style


def heartbeats(count: int) -> Tensor:
    """[count, 1, 64]: 2 to 4 beats of three waves and a dip, and a little white noise."""
    phase = ((2 + 2 * torch.rand(count, 1)) * torch.arange(64) / 64 + torch.rand(count, 1)) % 1 - 0.5  # of the beat
    waves = [(-0.2, 0.05, 0.4), (0.0, 0.03, 2.0), (0.08, 0.03, -0.5), (0.28, 0.06, 0.6)]  # centre, width, height
    signal = sum(height * torch.exp(-(((phase - centre) / width) ** 2) / 2) for centre, width, height in waves)
    return (signal - 0.3 + 0.05 * torch.randn(count, 64))[:, None]


def main(out: Path = Path("out"), steps: int = 1500, count: int = 500) -> dict[str, float]:
    """Train and sample; the root mean square over frequencies of log(power / power of the data)."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 48, 5, padding=2)]  # two channels: the signal and its noise level
    layers += [f for n in (1, 2, 4, 8, 4) for f in (nn.SiLU(), nn.Conv1d(48, 48, 5, padding=2 * n, dilation=n))]
    net = nn.Sequential(*layers, nn.SiLU(), nn.Conv1d(48, 1, 5, padding=2))
    conditioned = lambda x, label: net(torch.cat([x, (label / 50 - 1)[:, None, None].expand_as(x)], dim=1))  # noqa: E731
    pink = nidiff.power_law((64,), exponent=1.0)
    denoiser = nidiff.Denoiser(conditioned, nidiff.Process(nidiff.schedules.ddpm_cosine(100), pink), target="v")
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, heartbeats(64), weighting="target").mean().backward()
        optimizer.step()
    shape, real = (count, 1, 64), torch.fft.rfft(heartbeats(count)).abs().square().mean((0, 1))
    noise, samples = pink.sample(shape), nidiff.sample(denoiser, shape, sampler="ancestral")
    panels = {"noise": noise, "samples": samples, "more data": heartbeats(count)}
    errors = {}
    for name, signals in panels.items():
        power = torch.fft.rfft(signals).abs().square().mean((0, 1))
        errors[name] = (power / real).log().square().mean().sqrt().item()
        print(f"error of the log spectrum of {name}: {errors[name]:.3f}")
    draw(panels, out)
    return errors


@style.drawn
def draw(panels: dict[str, Tensor], out: Path) -> None:
    figure = Figure(figsize=(style.WIDTH, 3.6), layout="constrained")
    for axes, (name, signals) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        axes.plot(signals[:4, 0].T + 4 * torch.arange(4), color=style.BLUE, linewidth=1)
        axes.set(title=name, yticks=[], xlabel="place in the signal")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "pink_noise_1d.png")


if __name__ == "__main__":
    main()
