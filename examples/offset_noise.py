"""Trained with offset noise, sampled with white noise: the mismatch and its fix: python examples/offset_noise.py"""

from pathlib import Path

import torch

import nidiff
from nidiff.model.network import unet2d
from nidiff.report.contact import save_panels

DIGITS = nidiff.load_dataset("digits").batch(torch.arange(1498))
OFFSET = nidiff.offset((8, 8), strength=0.8, normalize=False)  # the law of randn(1, 8, 8) + 0.8 * randn(1, 1, 1)


def data(count: int) -> torch.Tensor:
    """Digits in faint ink on paper of any tone from black to white."""
    return 0.7 * (2 * torch.rand(count, 1, 1, 1) - 1) + 0.3 * DIGITS[torch.randint(len(DIGITS), (count,))]


def train(covariance: nidiff.Covariance, steps: int) -> nidiff.Denoiser:
    torch.manual_seed(0)
    net = unet2d((1, 8, 8), widths=(16, 32), layers=1, attention=())
    denoiser = nidiff.Denoiser(net, nidiff.Process("ddpm_linear", covariance), target="noise", clip=1.0)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, data(128), weighting="target").mean().backward()
        optimizer.step()
        decay.step()
    return denoiser


def main(out: Path = Path("out"), steps: int = 800, count: int = 1000, sampler: str = "ddim", noise=OFFSET):
    """The standard deviation of the brightness of images and its standard error, for the data and three models."""
    white, offset = train(nidiff.Identity((8, 8)), steps), train(noise, steps)
    mismatch = nidiff.Denoiser(offset.net, white.process, target="noise", clip=1.0)  # nothing in the net tells its Σ
    models = {"data": None, "all white": white, "trained offset, sampled white": mismatch, "own Σ in both": offset}
    panels, spreads = {}, {}
    for name, model in models.items():
        x = nidiff.sample(model, (count, 1, 8, 8), sampler=sampler, num_steps=50) if model else data(count)
        spread = x.mean((1, 2, 3)).view(10, -1).std(1)  # of ten groups, which tell the error too
        spreads[name], panels[name] = (spread.mean().item(), spread.std().item() / 10**0.5), x
        print("{}: standard deviation of brightness {:.3f} ± {:.3f}".format(name, *spreads[name]))
    save_panels(out / "offset_noise.png", panels)
    return spreads


if __name__ == "__main__":
    main()
