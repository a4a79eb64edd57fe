"""What does a training step cost with Gaussian free field noise, beside the same step with white noise?

One U-Net of about a million parameters and one optimizer take steps with the two kinds of noise in turn.
"""

import argparse
from collections.abc import Callable

import torch
from timing import at_shape, compare, interleave, log, parse, report
from torch import Tensor

import nidiff
from nidiff.randomness import white_noise

BATCH = (64, 1, 28, 28)
GFF, WHITE = "step, Gaussian free field", "step, white noise"
GFF_NOISE, WHITE_NOISE = "noising a batch, Gaussian free field", "noising a batch, white noise"


def unet() -> torch.nn.Module:
    """A convolutional U-Net over 28, 14 and 7 pixels: 1.06 million parameters."""
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=BATCH[-1],
        in_channels=1,
        out_channels=1,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D",) * 3,
        up_block_types=("UpBlock2D",) * 3,
    )


def training_step(
    denoiser: nidiff.Denoiser, optimizer: torch.optim.Optimizer, images: Tensor, generator: torch.Generator
) -> Callable[[], None]:
    def step() -> None:
        optimizer.zero_grad()
        nidiff.denoising_loss(denoiser, images, generator=generator).mean().backward()
        optimizer.step()

    return step


def noising(process: nidiff.Process, images: Tensor, generator: torch.Generator) -> Callable[[], Tensor]:
    """What the loss does before it calls the network: the only part of the step in which the noises differ."""

    def noise() -> Tensor:
        level = process.schedule.draw(len(images), generator)
        return process.perturb(images, level, white_noise(images.shape, generator))

    return noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = parse(parser, 30, "pairs of steps")

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    net = unet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    images = 2 * torch.rand(BATCH, generator=generator) - 1
    schedule = nidiff.schedules.ddpm_cosine()
    gff = nidiff.Process(schedule, nidiff.gaussian_free_field(BATCH[-2:]))
    white = nidiff.Process(schedule, nidiff.Identity(BATCH[-2:]))
    parameters = sum(p.numel() for p in net.parameters())
    log(f"{parameters / 1e6:.2f} M parameters, {arguments.rounds} pairs of steps")

    times = interleave(
        {
            WHITE: training_step(nidiff.Denoiser(net, white), optimizer, images, generator),
            GFF: training_step(nidiff.Denoiser(net, gff), optimizer, images, generator),
            WHITE_NOISE: noising(white, images, generator),
            GFF_NOISE: noising(gff, images, generator),
        },
        arguments.rounds,
    )
    title = f"A training step of a U-Net, {parameters / 1e6:.2f} M parameters, batch {at_shape(BATCH)}, AdamW"
    rows = [
        compare(times, GFF, WHITE, bound=1.03),
        compare(times, GFF_NOISE, WHITE, note="the share of the step that could grow"),
        compare(times, WHITE_NOISE, WHITE),
    ]
    report({title: rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
