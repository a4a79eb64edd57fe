"""What does sampling cost beside diffusers' DDPMPipeline, outside the network, and with Gaussian free field noise?

The same U-Net, batch and number of ancestral steps for all, in turn. Each call ends with images as uint8 arrays.
"""

import argparse
import time

import torch
from diffusers import DDPMPipeline, DDPMScheduler
from timing import at_shape, compare, interleave, log, parse, report, summary
from training_step import unet

import nidiff
from nidiff.data.dataset import quantise
from nidiff.diffusion.denoiser import as_tensor

BATCH = (64, 1, 28, 28)
OURS, GFF, SEEDS = "nidiff.sample, white noise", "nidiff.sample, free field", "the same, a seed per image"
PEER, INSIDE = "DDPMPipeline", "inside the network"


class Timed(torch.nn.Module):
    """A network that adds up the time spent in it."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net, self.seconds = net, 0.0

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        output: torch.Tensor = as_tensor(self.net(x, label))
        self.seconds += time.perf_counter() - start
        return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="ancestral steps of a call")
    arguments = parse(parser, 15, "rounds of one call each")

    torch.manual_seed(0)
    net, steps = unet().eval(), arguments.steps
    pipeline = DDPMPipeline(net, DDPMScheduler(1000, beta_schedule="linear", clip_sample=True))
    pipeline.set_progress_bar_config(disable=True)
    timed = Timed(net)

    def ours(covariance: nidiff.Covariance, net: torch.nn.Module, seeds: range | None = None) -> object:
        process = nidiff.Process(nidiff.schedules.ddpm_linear(1000), covariance)
        denoiser = nidiff.Denoiser(net, process, clip=1.0)
        images = nidiff.sample(denoiser, BATCH, sampler="ancestral", num_steps=steps, generator=seeds)
        return quantise(images).movedim(1, -1).numpy()

    white, gff = nidiff.Identity(BATCH[-2:]), nidiff.gaussian_free_field(BATCH[-2:])
    shares: list[float] = []

    def outside() -> None:
        timed.seconds, start = 0.0, time.perf_counter()
        ours(gff, timed)
        shares.append(1 - timed.seconds / (time.perf_counter() - start))

    parameters = sum(p.numel() for p in net.parameters())
    log(f"{parameters / 1e6:.2f} M parameters, {arguments.rounds} rounds of {steps} steps")
    times = interleave(
        {
            PEER: lambda: pipeline(batch_size=BATCH[0], num_inference_steps=steps, output_type="np"),
            OURS: lambda: ours(white, net),
            GFF: lambda: ours(gff, net),
            SEEDS: lambda: ours(gff, net, range(BATCH[0])),
            INSIDE: outside,
        },
        arguments.rounds,
    )
    title = f"{steps} ancestral steps, a U-Net of {parameters / 1e6:.2f} M parameters, batch {at_shape(BATCH)}"
    rows = [
        compare(times, OURS, PEER, bound=1.0),
        compare(times, GFF, OURS, bound=1.03),
        compare(times, SEEDS, GFF),
        summary("outside the network, free field", "the whole call", shares[2:], bound=0.05),
    ]
    report({title: rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
