"""NI-DDPM in a plain PyTorch loop: digits out of a Gaussian free field: python examples/gff_loop.py"""

from pathlib import Path

import torch

import nidiff
from nidiff.evaluation.classifier import recognised, train_classifier
from nidiff.model.network import unet2d
from nidiff.report.contact import save_panels


def main(out: Path = Path("out"), steps: int = 800, count: int = 500) -> torch.Tensor:
    """Train, sample, and print the share of samples that a classifier of digits names with confidence."""
    torch.manual_seed(0)
    images = nidiff.load_dataset("digits")
    digits = images.batch(torch.arange(len(images)))  # [N, 1, 8, 8] in [-1, 1]

    covariance = nidiff.gaussian_free_field((8, 8), gamma=1.0)
    process = nidiff.Process("ddpm_cosine", covariance)
    net = unet2d((1, 8, 8), layers=1)
    denoiser = nidiff.Denoiser(net, process, target="eps", clip=1.0)

    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        x0 = digits[torch.randint(len(digits), (128,))]
        loss = nidiff.denoising_loss(denoiser, x0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    net.eval()
    noise = process.noise((count, 1, 8, 8))
    samples = nidiff.sample(denoiser, (count, 1, 8, 8), sampler="ancestral", num_steps=50, generator=range(count))
    save_panels(out / "gff_loop.png", {"real": digits, "noise": noise / 3, "samples": samples})

    classifier = train_classifier(digits, images.labels)
    print(f"{recognised(classifier, samples):.1%} of {count} samples are named with a probability above 0.9")
    return samples


if __name__ == "__main__":
    main()
