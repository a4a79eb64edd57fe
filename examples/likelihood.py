"""Bits per pixel of digits that a model has not seen, under white noise and a GFF: python examples/likelihood.py"""

import torch
from torch import Tensor

import nidiff
from nidiff.model.network import unet2d

GREY = 2 / 16  # the distance between two of the 17 grey values of a pixel; knowing nothing costs log2(17) = 4.09 bits


def pixels(split: str) -> Tensor:
    images = nidiff.load_dataset("digits", split=split)
    return images.batch(torch.arange(len(images)))


def continuous(images: Tensor) -> Tensor:
    """Uniform noise as wide as a grey value: a density of these bounds the probability of the grey values."""
    return images + GREY * (torch.rand_like(images) - 0.5)


def train(covariance: nidiff.Covariance, steps: int) -> nidiff.Denoiser:
    net, digits = unet2d((1, 8, 8), widths=(16, 32), layers=1, attention=()), pixels("train")
    denoiser = nidiff.Denoiser(net, nidiff.Process("ddpm_linear", covariance))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, continuous(digits[torch.randint(len(digits), (128,))])).mean().backward()
        optimizer.step()
        decay.step()
    return denoiser


def main(steps: int = 600, count: int = 100) -> dict[tuple[str, str], Tensor]:
    """Bits per pixel, one per image, of held-out digits, of the same upside down and with their pixels shuffled."""
    torch.manual_seed(0)
    real, results = continuous(pixels("test")[:count]), {}
    shuffled = real.flatten(1)[:, torch.randperm(64)].view_as(real)
    sets = {"held out": real, "upside down": real.flip(-2), "shuffled": shuffled}
    for noise, covariance in {"white": nidiff.Identity((8, 8)), "GFF": nidiff.gaussian_free_field((8, 8))}.items():
        denoiser = train(covariance, steps)
        for name, images in sets.items():
            bits = results[noise, name] = nidiff.bits_per_dim(denoiser, images, bin_width=GREY, rtol=1e-3, atol=1e-3)
            print(f"{noise}, {name}: {bits.mean():.3f} ± {bits.std() / count**0.5:.3f} bits per pixel")
    return results


if __name__ == "__main__":
    main()
