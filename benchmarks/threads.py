"""How fast is a training step on two threads, alone and beside one busy process, by how long idle threads spin?

Threads of GNU's OpenMP spin at every barrier before they sleep. Beside other work a spinning thread holds the core that
the thread it waits for needs. The settings are read when torch is imported, so each runs in processes of its own, in
turn.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from timing import log

SETTINGS = {
    "default": {},
    "GOMP_SPINCOUNT=10000 (ours)": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def measure(threads: int, seconds: float) -> float:
    """The median time of a training step of the digits network, over about ``seconds`` and three steps or more."""
    import torch

    import nidiff
    from nidiff.diffusion.schedules import as_schedule
    from nidiff.model.network import unet2d
    from nidiff.training.build import build_covariance
    from nidiff.training.experiment import PRESETS

    torch.set_num_threads(threads)
    experiment, images = PRESETS["digits"], nidiff.load_dataset("digits")
    net = unet2d(images.shape, widths=experiment.widths, layers=experiment.layers, attention=experiment.attention)
    process = nidiff.Process(as_schedule(experiment.schedule), build_covariance(experiment, images))
    denoiser = nidiff.Denoiser(net, process, experiment.target)
    optimizer = torch.optim.AdamW(net.parameters(), lr=experiment.learning_rate, fused=True)
    x0 = images.batch(torch.arange(experiment.batch_size))
    times: list[float] = []
    while len(times) < 4 or sum(times) < seconds:
        start = time.perf_counter()
        nidiff.denoising_loss(denoiser, x0).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first step allocates


def in_process(setting: dict[str, str], arguments: argparse.Namespace, *, beside: bool) -> float:
    """The same in a process with the setting, alone or beside one that is busy."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside else None
    flags = ["--measure", "--threads", str(arguments.threads), "--seconds", str(arguments.seconds)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *flags], env=inherited | setting, capture_output=True, check=True
        )
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of a measurement")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each setting")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.threads, arguments.seconds))
        return
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5:
        log(f"the machine is busy (load {os.getloadavg()[0]:.1f}): nothing here is measured alone")
    times: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside": []} for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name, setting in SETTINGS.items():
            for place, found in times[name].items():
                found.append(in_process(setting, arguments, beside=place == "beside"))
                log(f"{name}, {place}: {found[-1]:.3f} s")
    medians = {name: {place: statistics.median(found) for place, found in times[name].items()} for name in times}
    if arguments.json:
        print(json.dumps(medians, indent=2))
        return
    print(f"seconds per training step of the digits network, {arguments.threads} threads: median")
    print(f"{'':<30}{'alone':>10}{'beside one busy process':>27}")
    for name, found in medians.items():
        print(f"{name:<30}{found['alone']:>10.3f}{found['beside']:>27.3f}")


if __name__ == "__main__":
    main()
