"""What does a sampling step cost outside the network, for every sampler, and where its coefficients differ from mode to
mode?

Two models that ship, ten steps of a batch, one thread; all samplers in turn. A table per mode is the model's schedule,
repeated for every mode, so that the images are the same too. The first round, which computes the tables of each sampler
and what `rescale` draws beforehand, is not measured.
"""

import argparse
import time
from functools import partial

import torch
from sampling import Timed
from timing import at_shape, interleave, parse, report, summary

import nidiff

STEPS, MOST = 10, 0.03
BATCHES = {"fashion-mnist-ddpm": (32, 1, 28, 28), "turbulence-white": (16, 1, 64, 64)}
SAMPLERS = ["ancestral", "ddim", "heun", "dpmpp_2m", "dpmpp_2m:eta=0.5", "ipndm", "angle", "angle_2m", "gaussian_2m"]
SAMPLERS += ["gaussian_2m:eta=0.5", "gaussian_2m:rescale=true"]


def per_mode(schedule: nidiff.Schedule, shape: tuple[int, ...], boundary: str) -> nidiff.Schedule:
    """The same levels as a table of every mode."""
    table = schedule.logsnr.reshape(-1, *[1] * len(shape)).expand(-1, *shape)
    return nidiff.Schedule(table, schedule.keeps, boundary=boundary)


def measure(denoiser: nidiff.Denoiser, sampler: str, batch: tuple[int, ...], shares: list[float]) -> None:
    """Draw a batch, and note the time outside over that inside the network."""
    net = denoiser.net
    net.seconds, start = 0.0, time.perf_counter()
    nidiff.sample(denoiser, batch, sampler=sampler, num_steps=STEPS, generator=0)
    shares.append((time.perf_counter() - start) / net.seconds - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = parse(parser, 9, "rounds of one call each")
    torch.set_num_threads(arguments.threads or 1)
    sections = {}
    for name, batch in BATCHES.items():
        denoiser = nidiff.load_model(f"models/{name}")
        net = Timed(denoiser.net.to(memory_format=torch.channels_last))
        process, gaussian = denoiser.process, denoiser.gaussian
        assert gaussian is not None
        table = nidiff.Process(per_mode(process.schedule, batch[2:], gaussian.spatial.boundary[0]), process.covariance)
        denoisers = {sampler: denoiser.with_net(net) for sampler in SAMPLERS}
        other = nidiff.Denoiser(
            net, table, denoiser.target_name, denoiser.clip, gaussian=gaussian, kappa=denoiser.kappa
        )
        denoisers |= {f"{sampler}, levels per mode": other for sampler in ("dpmpp_2m", "angle_2m")}
        shares: dict[str, list[float]] = {sampler: [] for sampler in denoisers}
        calls = {
            each: partial(measure, denoisers[each], each.partition(", ")[0], batch, shares[each]) for each in shares
        }
        interleave(calls, arguments.rounds)
        rows = [summary(each, "inside", shares[each][2:], bound=MOST) for each in denoisers]
        sections[f"time outside / inside the network of {name}, {STEPS} steps, batch {at_shape(batch)}"] = rows
    report(sections, as_json=arguments.json)


if __name__ == "__main__":
    main()
