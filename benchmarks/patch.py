"""What does patch=2 bring? Images per second of networks with and without it, and quality after equal minutes.

First a training step of each network is timed in turn, in one process. Then each is trained for as many steps as it
does in --minutes at that speed, so that what else the machine does meanwhile changes nothing, and the Fréchet distance
of its samples to held-out images is measured. Every measurement is written to --out as soon as it is there, and not
repeated: the script can be stopped and started again at any time. Fashion-MNIST is 28×28, CIFAR-10 32×32.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timing import log
from torch import Tensor

import nidiff
from nidiff.evaluation.features import load_features
from nidiff.files import replace_text
from nidiff.model.network import build_network
from nidiff.randomness import mixed_seed
from nidiff.training.draws import image_indices

NETWORKS = ("unet", "unet:patch=2", "unet2d", "unet:patch=2,widths=64/128")
SIZES: dict[str, Any] = {"widths": (32, 64), "layers": 1, "attention": (1,)}
BATCH, LEARNING_RATE, WARM_UP, EMA, CLIP = 32, 1e-3, 50, 0.995, 1.0
SAMPLER: dict[str, Any] = {"sampler": "dpmpp_2m", "num_steps": 20, "tile": 250}


class Training:
    """A network that is trained as `nidiff train` does by default: free field, cosine schedule, eps."""

    def __init__(self, network: str, data: Any, seed: int) -> None:
        torch.manual_seed(mixed_seed(seed))
        self.net = build_network(network, data.shape, **SIZES)
        self.data, self.seed, self.step = data, seed, 0
        process = nidiff.Process(
            nidiff.schedules.ddpm_cosine(1000), nidiff.gaussian_free_field(data.shape[1:], gamma=1.0)
        )
        self.denoiser = nidiff.Denoiser(self.net, process, "eps", clip=1.0)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), weight_decay=0.0, fused=True)

    def advance(self, share: float = 0.0) -> None:
        """One step; ``share`` of the training is done, over whose second half the rate falls to 0."""
        x0 = self.data.batch(image_indices(self.seed, len(self.data), self.step * BATCH, BATCH))
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.step))
        nidiff.denoising_loss(self.denoiser, x0, generator=generator).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (self.step + 1) / WARM_UP, 2 * (1 - share))
        self.optimizer.step()
        self.optimizer.zero_grad()
        decay = min(EMA, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_([*self.average.parameters()], [*self.net.parameters()], 1 - decay)
        self.step += 1


def seconds_per_step(data: Any, rounds: int) -> dict[str, float]:
    """The median processor time of a step of each network; in every round each takes one, after one unmeasured."""
    trainings = {network: Training(network, data, 0) for network in NETWORKS}
    seconds: dict[str, list[float]] = {network: [] for network in NETWORKS}
    for number in range(rounds + 1):
        for network in NETWORKS if number % 2 else reversed(NETWORKS):
            begin = time.process_time()
            trainings[network].advance()
            seconds[network].append(time.process_time() - begin)
    return {network: statistics.median(each[1:]) for network, each in seconds.items()}


class Bench:
    """A data set, the speed of the networks on it, and the Fréchet distance to its held-out images in the features of
    EfficientNet-lite0."""

    def __init__(self, name: str, options: argparse.Namespace, results: "Results") -> None:
        folder = options.data_dir if name == "cifar10" else None
        self.train, held_out = (nidiff.load_dataset(name, data_dir=folder, split=split) for split in ("train", "test"))
        self.options, self.features = options, load_features("efficientnet-lite0")
        self.seconds = results.add(f"{name} seconds per step", lambda: seconds_per_step(self.train, options.rounds))
        self.reference = self._features(held_out.batch(torch.arange(options.references)))
        real = self.train.batch(torch.arange(options.samples))
        results.add(f"{name} real", lambda: {"frechet_distance": self.distance(real)})

    def distance(self, x: Tensor) -> float:
        return round(nidiff.metrics.frechet_distance(self._features(x), self.reference), 4)

    def _features(self, x: Tensor) -> Tensor:
        pixels = ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return torch.cat([self.features(part) for part in pixels.split(50)])

    def run(self, network: str, seed: int) -> dict[str, float]:
        """Train for as many steps as fit in the minutes, sample, and measure."""
        training, steps = Training(network, self.train, seed), int(60 * self.options.minutes / self.seconds[network])
        begin = time.process_time()
        while training.step < steps:
            training.advance(training.step / steps)
        seconds = round(time.process_time() - begin, 1)
        denoiser, count = training.denoiser.with_net(training.average.eval()), self.options.samples
        x = nidiff.sample(denoiser, (count, *self.train.shape), generator=range(count), **SAMPLER)
        return {"steps": steps, "processor_seconds": seconds, "frechet_distance": self.distance(x)}


class Results:
    """What was measured, in a file."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"settings": settings}
        if self.found["settings"] != settings:
            raise SystemExit(
                f"{file} was measured with {self.found['settings']}, not {settings}: choose another --out."
            )

    def add(self, key: str, measure: Callable[[], Any]) -> Any:
        if key not in self.found:
            self.found[key] = measure()
            replace_text(self.file, json.dumps(self.found, indent=2, ensure_ascii=False) + "\n")
            log(f"{key}: {self.found[key]}")
        return self.found[key]

    def table(self, datasets: list[str], seeds: list[int]) -> Iterator[str]:
        yield "| data | network | images per second | images seen | Fréchet distance | seeds |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for data in datasets:
            for network in NETWORKS:
                runs = [run for seed in seeds if (run := self.found.get(f"{data} {network} {seed}"))]
                speed = BATCH / self.found[f"{data} seconds per step"][network]
                distances = [run["frechet_distance"] for run in runs]
                spread = f" ± {statistics.stdev(distances):.2g}" if len(runs) > 1 else ""
                mean, seen = (f"{statistics.mean(distances):.3g}", BATCH * runs[0]["steps"]) if runs else ("", "")
                yield f"| {data} | `{network}` | {speed:.0f} | {seen} | {mean}{spread} | {len(runs)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "cifar10"])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=3.0, help="of training, of one thread")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--references", type=int, default=2000, help="held-out images")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each network that are timed")
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--out", type=Path, default=Path("out/patch.json"))
    parser.add_argument("--report", action="store_true", help="only print the table of what is there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: getattr(options, name) for name in ("minutes", "samples", "references", "rounds")}
    results = Results(options.out, settings)
    benches = {} if options.report else {name: Bench(name, options, results) for name in options.datasets}
    for seed in options.seeds:
        for network in options.networks:
            for name, bench in benches.items():
                results.add(f"{name} {network} {seed}", partial(bench.run, network, seed))
    print("\n".join(results.table(options.datasets, options.seeds)))


if __name__ == "__main__":
    main()
