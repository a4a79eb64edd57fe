"""What does a step cost whose coefficients differ from mode to mode, and a step of the angle samplers?

The same U-Net, batch and number of steps for all, in turn. The table per mode is a scalar schedule, repeated for every
mode, so that the images are the same too.
"""

import argparse

import torch
from timing import at_shape, compare, interleave, log, parse, report
from training_step import unet

import nidiff

BATCH = (64, 1, 28, 28)
SCALAR, MODES = "dpmpp_2m, one number per level", "dpmpp_2m, one per mode"
ANCESTRAL, ANCESTRAL_MODES = "ancestral, one number per level", "ancestral, one per mode"
ANGLE, RESIDUAL = "angle_2m", "angle_2m, target residual"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="sampling steps of a call")
    arguments = parse(parser, 15, "rounds of one call each")

    torch.manual_seed(0)
    net, steps, shape = unet().eval(), arguments.steps, BATCH[-2:]
    cov, scalar = nidiff.gaussian_free_field(shape), nidiff.schedules.ddpm_linear(1000)
    table = nidiff.Schedule(scalar.logsnr.reshape(-1, 1, 1).expand(-1, *shape))
    gaussian = nidiff.GaussianModel(torch.zeros(BATCH[1:]), nidiff.power_law(shape, 2.5))

    def call(schedule: nidiff.Schedule, sampler: str, **options: object) -> object:
        process = nidiff.Process(schedule, cov)
        denoiser = nidiff.Denoiser(net, process, clip=1.0, gaussian=gaussian, **options)
        return lambda: nidiff.sample(denoiser, BATCH, sampler=sampler, num_steps=steps)

    parameters = sum(p.numel() for p in net.parameters())
    log(f"{parameters / 1e6:.2f} M parameters, {arguments.rounds} rounds of {steps} steps")
    times = interleave(
        {
            SCALAR: call(scalar, "dpmpp_2m"),
            MODES: call(table, "dpmpp_2m"),
            ANCESTRAL: call(scalar, "ancestral"),
            ANCESTRAL_MODES: call(table, "ancestral"),
            ANGLE: call(scalar, "angle_2m"),
            RESIDUAL: call(scalar, "angle_2m", target="residual"),
        },
        arguments.rounds,
    )
    title = f"{steps} steps, a U-Net of {parameters / 1e6:.2f} M parameters, batch {at_shape(BATCH)}"
    rows = [
        compare(times, MODES, SCALAR, bound=1.05),
        compare(times, ANCESTRAL_MODES, ANCESTRAL, bound=1.05),
        compare(times, ANGLE, SCALAR, bound=1.05),
        compare(times, RESIDUAL, SCALAR, bound=1.05),
    ]
    report({title: rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
