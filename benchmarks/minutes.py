"""Quality per minute, against what a user would do instead: diffusers' unconditional example, on Fashion-MNIST 28×28.

Two trainings in one process take turns of a few seconds of processor time; the one that has had less is next.
`diffusers` is the loop of its unconditional example with its own settings (DDPM with linear betas, error of ε, AdamW at
1e-4 with a cosine to 0 over the whole run, average of the weights), and a U-Net of a size for this task. `ours` is
`nidiff train` with the words that are given, at a constant learning rate. Both use the same precision. The clock is the
processor time of building and training; measuring κ at the end of ours is added to it in the report.

First train, which saves the averaged weights after each of --minutes. Then --evaluate draws and measures, --report
prints. Each can be stopped at any time and started again with the same command.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from diffusers import DDPMScheduler, DPMSolverMultistepScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from timing import log
from torch import Tensor

import nidiff
from nidiff import style
from nidiff.commands.train import Train
from nidiff.commands.usage import parse
from nidiff.data.dataset import quantise
from nidiff.evaluation.features import compute_features, load_features, reference_features
from nidiff.evaluation.metrics import measure
from nidiff.evaluation.samples import SampleSet
from nidiff.files import replace_json, replacing
from nidiff.memory import keep_freed_memory
from nidiff.precision import has_bf16
from nidiff.training.build import build
from nidiff.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from nidiff.training.experiment import Experiment, read_experiment
from nidiff.training.loop import restore, step_batches, train_step, with_kappa

DATA, BATCH, WARM_UP = "fashion-mnist", 64, 500
TURN, SAVE_EVERY = 15.0, 180.0  # processor seconds
TILE = 50  # images in one call of a network
MEASURED = ("frechet", "precision", "recall", "spectrum")
NAMES = {"dpm-solver++": "DPM++", "dpmpp_2m": "DPM++"}  # one sampler, of diffusers and of ours
RESULTS, FIGURE = Path("benchmarks/results/minutes.json"), Path("docs/images/minutes.png")


# What diffusers' example does -----------------------------------------------------------------------------------


def diffusers_network() -> UNet2DModel:
    return UNet2DModel(
        sample_size=28,
        in_channels=1,
        out_channels=1,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


class Training(Protocol):
    """A training that is done a step at a time."""

    name: str
    net: torch.nn.Module
    ema: EMAModel
    optimizer: Any
    step: int
    batch: int

    def advance(self, share: float) -> None:
        """One step; ``share`` of the processor time of the whole run is over."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""


class Diffusers:
    """train_unconditional.py of diffusers with its default settings, but for the batch and the size of the network.

    Its cosine falls with the share of the time instead of the steps, whose number is not known beforehand.
    """

    name, batch = "diffusers", BATCH

    def __init__(self, seed: int, bf16: bool) -> None:
        torch.manual_seed(seed)
        images = nidiff.load_dataset(DATA).values
        self.images, self.seed, self.bf16, self.step = images.float().div(255).sub(0.5).div(0.5), seed, bf16, 0
        self.net = diffusers_network().train()
        self.scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8
        )
        self.ema = EMAModel(self.net.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4)
        self.epoch, self.order = -1, torch.empty(0)

    def _next_batch(self, generator: torch.Generator) -> Tensor:
        per_epoch = len(self.images) // BATCH
        epoch, position = divmod(self.step, per_epoch)
        if epoch != self.epoch:
            shuffle = torch.Generator().manual_seed(self.seed + epoch)
            self.epoch, self.order = epoch, torch.randperm(len(self.images), generator=shuffle)
        x = self.images[self.order[position * BATCH : (position + 1) * BATCH]]
        flip = torch.rand(BATCH, generator=generator) < 0.5
        return torch.where(flip[:, None, None, None], x.flip(-1), x)

    def advance(self, share: float) -> None:
        # All draws of a step depend on its number alone, so that a run can be resumed at any of them.
        generator = torch.Generator().manual_seed(self.seed * 2**32 + self.step)
        clean = self._next_batch(generator)
        noise = torch.randn(clean.shape, generator=generator)
        timesteps = torch.randint(0, 1000, (BATCH,), generator=generator)
        noisy = self.scheduler.add_noise(clean, noise, timesteps)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            output = self.net(noisy, timesteps).sample
        torch.nn.functional.mse_loss(output.float(), noise).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-4 * min(1.0, (self.step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * share))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.step(self.net.parameters())
        self.step += 1

    def restore(self, checkpoint: Checkpoint) -> None:
        self.net.load_state_dict(checkpoint.tensors["model"])
        for (name, _), average in zip(self.net.named_parameters(), self.ema.shadow_params, strict=True):
            average.copy_(checkpoint.tensors["ema"][name])
        self.ema.optimization_step = checkpoint.state["ema_step"]
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.step = checkpoint.step


@torch.no_grad()
def diffusers_samples(net: UNet2DModel, sampler: str, num_steps: int, count: int) -> Tensor:
    """Images as its pipelines draw them, with a seed for each batch of `TILE`."""
    scheduler: Any = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
    if sampler == "dpm-solver++":
        scheduler = DPMSolverMultistepScheduler.from_config(scheduler.config, timestep_spacing="linspace")
    parts = []
    for first in range(0, count, TILE):
        generator = torch.Generator().manual_seed(first)
        x = torch.randn((min(TILE, count - first), 1, 28, 28), generator=generator)
        scheduler.set_timesteps(num_steps)
        for t in scheduler.timesteps:
            x = scheduler.step(net(x, t).sample, t, x, generator=generator).prev_sample
        parts.append(x)
    return torch.cat(parts)


# What nidiff does -----------------------------------------------------------------------------------------------


class Ours:
    """`nidiff train` of an experiment, at a constant learning rate after the warm-up."""

    name = "ours"

    def __init__(self, experiment: Experiment) -> None:
        self.trainer = build(experiment)
        self.batches = step_batches(self.trainer)
        self.net, self.ema, self.optimizer = self.trainer.net, self.trainer.ema, self.trainer.optimizer
        self.batch = experiment.batch_size

    @property
    def step(self) -> int:
        return self.trainer.step

    def advance(self, share: float) -> None:
        train_step(self.trainer, self.batches)

    def restore(self, checkpoint: Checkpoint) -> None:
        restore(self.trainer, checkpoint)
        self.batches = step_batches(self.trainer)


# Training -------------------------------------------------------------------------------------------------------


class Clocked:
    """A training with the processor seconds it has had, its checkpoints and the weights it saves on its way."""

    def __init__(self, make: Callable[[], Training], name: str, out: Path, minutes: list[float]) -> None:
        self.folder, self.points, self.minutes = out / name, out / "points", minutes
        begin = time.process_time()
        self.training = make()
        self.seconds, self.saved = time.process_time() - begin, 0.0
        if checkpoint := load_checkpoint(self.folder):
            self.training.restore(checkpoint)
            self.seconds = self.saved = checkpoint.state["seconds"]
            log(f"{name}: resuming after step {checkpoint.step}, {self.seconds / 60:.1f} minutes")

    @property
    def whole(self) -> float:
        return 60 * max(self.minutes)

    def turn(self) -> None:
        """Train for a few seconds, or until the next of the minutes."""
        ahead = [60 * m for m in self.minutes if 60 * m > self.seconds]
        length = min(TURN, ahead[0] - self.seconds)
        begin = time.process_time()
        while (spent := time.process_time() - begin) < length:
            self.training.advance(min(1.0, (self.seconds + spent) / self.whole))
        self.seconds += spent
        if self.seconds >= ahead[0]:
            self.save_point(ahead[0] / 60)
        if self.seconds - self.saved >= SAVE_EVERY or self.seconds >= self.whole:
            self.save()

    def average(self) -> dict[str, Tensor]:
        names = (name for name, _ in self.training.net.named_parameters())
        state = dict(self.training.net.state_dict()) | dict(zip(names, self.training.ema.shadow_params, strict=True))
        return {name: tensor.detach().contiguous() for name, tensor in state.items()}

    def save_point(self, minutes: float) -> None:
        training = self.training
        about = {"minutes": minutes, "seconds": self.seconds, "steps": training.step}
        about["images"] = training.step * training.batch
        about["parameters"] = sum(p.numel() for p in training.net.parameters())
        with replacing(self.points / f"{training.name} {minutes:g}.safetensors") as file:
            file.write(safetensors.torch.save(self.average(), {"about": json.dumps(about)}))
        log(f"{training.name}: {about}")

    def save(self) -> None:
        training = self.training
        save_checkpoint(
            self.folder,
            training.step,
            tensors={"model": training.net.state_dict(), "ema": self.average()},
            state={"ema_step": training.ema.optimization_step, "scaler": None, "seconds": self.seconds},
            optimizer=training.optimizer.state_dict(),
            keep=1,
        )
        self.saved = self.seconds


def train(experiment: Experiment, options: argparse.Namespace) -> None:
    """Both trainings in turns, until each has had its minutes."""
    minutes, bf16 = sorted(options.minutes), experiment.precision == "bf16" and has_bf16()
    settings, file = {"minutes": minutes, "threads": options.threads}, options.out / "settings.json"
    if file.is_file() and (other := json.loads(file.read_text())) != settings:
        raise SystemExit(f"{options.out} was begun with {other}, not {settings}: choose another --out.")
    replace_json(file, settings)
    made: dict[str, Callable[[], Training]] = {
        "diffusers": lambda: Diffusers(experiment.seed, bf16),
        "ours": lambda: Ours(experiment),
    }
    trainings = [Clocked(make, name, options.out, minutes) for name, make in made.items()]
    ends = {"diffusers": 60 * minutes[-1], "ours": 60 * min(options.ours_until, minutes[-1])}
    while unfinished := [each for each in trainings if each.seconds < ends[each.training.name]]:
        min(unfinished, key=lambda each: each.seconds).turn()


# Evaluation -----------------------------------------------------------------------------------------------------


def read_point(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safetensors.safe_open(file, "pt") as stored:
        return json.loads(stored.metadata()["about"]), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118


def cells(experiment: Experiment, options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Method, sampler and steps, the dearest last."""
    yield "diffusers", "dpm-solver++", 20
    asked = [(experiment.sampler, 10), (experiment.sampler, 20), ("dpmpp_2m", 20)]
    yield from (("ours", sampler, num_steps) for sampler, num_steps in dict.fromkeys(asked))
    if options.ancestral_steps:
        yield "diffusers", "ancestral", options.ancestral_steps


def points(sampler: str, options: argparse.Namespace) -> list[float]:
    """The minutes at which a sampler is measured: the ancestral one takes many evaluations, so the last only."""
    if sampler == "ancestral":
        return options.ancestral_at or [max(options.minutes)]
    return sorted(options.minutes)


def evaluate(experiment: Experiment, options: argparse.Namespace) -> None:
    """Measure every saved point with every sampler. What is in results.json is not measured again."""
    bench = Bench(options)
    file = options.out / "results.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}

    def keep(key: str, measured: dict[str, Any]) -> None:
        found[key] = measured
        replace_json(file, found)
        log(f"{key}: {measured}")

    if (key := f"real {options.samples} {options.references}") not in found:
        real = nidiff.load_dataset(DATA).stored(torch.arange(options.samples))
        keep(key, {"method": "real", **bench.measure(real)})
    trainer = build(dataclasses.replace(experiment, precision="fp32"))
    theirs = diffusers_network().eval()
    count, kappas = options.samples, {}
    for method, sampler, num_steps in cells(experiment, options):
        for minutes in points(sampler, options):
            stored = options.out / "points" / f"{method} {minutes:g}.safetensors"
            key = f"{method} {minutes:g} {sampler} {num_steps} {count} {options.references}"
            if key in found or not stored.is_file():
                continue
            about, weights = read_point(stored)
            extra: dict[str, Any] = {}
            if method == "ours":
                trainer.net.load_state_dict(weights)
                trainer.net.eval()
                begin = time.process_time()
                denoiser = trainer.denoiser.with_net(trainer.net)
                if minutes not in kappas:
                    measured = with_kappa(trainer, trainer.net)
                    kappas[minutes] = (measured.kappa, time.process_time() - begin)
                kappa, extra["kappa_seconds"] = kappas[minutes]
                denoiser = denoiser.with_kappa(kappa)
            begin = time.process_time()
            if method == "ours":
                shape, seeds = (count, *trainer.data.shape), range(count)
                x = nidiff.sample(denoiser, shape, sampler=sampler, num_steps=num_steps, generator=seeds, tile=TILE)
            else:
                theirs.load_state_dict(weights)
                x = diffusers_samples(theirs, sampler, num_steps, count)
            extra["seconds_per_image"] = (time.process_time() - begin) / count
            keys = {"method": method, "sampler": sampler, "num_steps": num_steps, "samples": count}
            keep(key, {**about, **keys, "references": options.references, **extra, **bench.measure(quantise(x))})


class Bench:
    """Held-out images and the features of EfficientNet-lite0, which are kept in the cache folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.network = load_features("efficientnet-lite0")
        pixels = nidiff.load_dataset(DATA, split="test").stored(torch.arange(options.references))
        self.real = SampleSet(pixels, reference_features(pixels, self.network, name=f"{DATA} held out").features)

    def measure(self, pixels: Tensor) -> dict[str, Any]:
        """Each metric as [value, standard error]."""
        generated = SampleSet(pixels, compute_features(self.network, pixels))
        found = measure(self.real, generated, bootstrap=20, keys=MEASURED)
        return {"FD" if "FD" in name else name: [one.value, one.error] for name, one in found.items()}


# Report ---------------------------------------------------------------------------------------------------------


def in_lines(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], list[dict[str, Any]]]:
    """What was measured by method, sampler and its steps, each a line over minutes."""
    lines: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["minutes"]):
        lines.setdefault((row["method"], row["sampler"], row["num_steps"]), []).append(row)
    return {key: lines[key] for key in sorted(lines)}


def report(experiment: Experiment, options: argparse.Namespace) -> None:
    """The table and the factors on stdout, and the same in files."""
    found = json.loads((options.out / "results.json").read_text())
    wanted = {"samples": options.samples, "references": options.references}
    rows = [row for row in found.values() if wanted.items() <= row.items()]
    for row in rows:
        row["clock"] = (row["seconds"] + row.get("kappa_seconds", 0.0)) / 60
    lines = in_lines(rows)
    print("| minutes | method | sampler | steps | images | FD | precision | recall | ms per image |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in sorted(rows, key=lambda row: (row["minutes"], row["method"], row["sampler"], row["num_steps"])):
        numbers = (f"{value:.3g} ± {error:.1g}" for value, error in (row["FD"], row["precision"], row["recall"]))
        drawn = f"{row['sampler']}, {row['num_steps']}"
        cost = f"{1000 * row['seconds_per_image']:.0f}"
        about = (f"{row['minutes']:g}", row["method"], drawn, f"{row['steps']:,}", f"{row['images']:,}")
        print(f"| {' | '.join((*about, *numbers, cost))} |")
    real = found.get(f"real {options.samples} {options.references}")
    if real:
        print(f"\nFD of {options.samples} real images of the training set: {real['FD'][0]:.3g}.")
    factors = compared(lines)
    for factor in factors:
        print(factor["text"])
    kept = {"experiment": experiment.to_json(), "rows": rows, "real": real, "factors": factors}
    replace_json(options.results, kept)
    draw(lines, real, options.figure)
    log(f"wrote {options.results} and {options.figure}")


def compared(lines: dict[tuple[str, str, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The minutes that ours needs, with each sampler, for the best FD of diffusers after all its minutes."""
    theirs = [line for (method, *_), line in lines.items() if method == "diffusers"]
    last = max((line[-1]["minutes"] for line in theirs), default=0.0)
    final = [line[-1] for line in theirs if line[-1]["minutes"] == last]
    if not final:
        return []
    best = min(final, key=lambda row: row["FD"][0])
    factors = []
    for (method, sampler, num_steps), line in lines.items():
        if method != "ours":
            continue
        minutes, exact = minutes_to(line, best["FD"][0])
        ours = f"ours ({sampler}, {num_steps} steps)"
        goal = f"the FD of {best['FD'][0]:.3g} that diffusers has after {last:g} ({best['sampler']}, "
        goal += f"{best['num_steps']} steps)"
        if minutes is None:
            text = f"{ours} does not reach {goal}."
        else:
            few, many = ("", "") if exact else ("at most ", "at least ")
            factor = f"a factor of {many}{best['clock'] / minutes:.1f}"
            text = f"{ours} needs {few}{minutes:.2g} minutes for {goal}: {factor}."
        found = {"sampler": sampler, "num_steps": num_steps, "minutes": minutes, "exact": exact, "goal": best["FD"][0]}
        factors.append({**found, "factor": minutes and best["clock"] / minutes, "text": text})
    return factors


def minutes_to(line: list[dict[str, Any]], goal: float) -> tuple[float | None, bool]:
    """When ``line`` first reaches an FD, and whether that is more than a bound; linear in log FD and log minutes."""
    for before, after in zip([None, *line], line, strict=False):
        if after["FD"][0] > goal:
            continue
        if before is None:
            return after["clock"], False
        high, low = math.log(before["FD"][0]), math.log(after["FD"][0])
        share = (high - math.log(goal)) / (high - low)
        return math.exp((1 - share) * math.log(before["clock"]) + share * math.log(after["clock"])), True
    return None, False


@style.drawn
def draw(lines: dict[tuple[str, str, int], list[dict[str, Any]]], real: dict[str, Any] | None, file: Path) -> None:
    """FD against minutes."""
    from matplotlib.figure import Figure

    figure = Figure((style.WIDTH, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {"diffusers": iter((style.ORANGE, style.RED)), "ours": iter((style.BLUE, style.SKY, style.GREEN))}
    for ((method, sampler, num_steps), line), marker, dash in zip(
        lines.items(), style.MARKERS, cycle(style.DASHES), strict=False
    ):
        axes.errorbar(
            [row["clock"] for row in line],
            [row["FD"][0] for row in line],
            [row["FD"][1] for row in line],
            color=next(colours[method]),
            marker=marker,
            linestyle=dash,
            label=f"{method}: {NAMES.get(sampler, sampler)}, {num_steps} steps",
        )
    if real:
        axes.axhline(real["FD"][0], color=style.look().soft, linewidth=1.0, label="real images")
    axes.set(xscale="log", yscale="log", xlabel="training (processor minutes)", ylabel="Fréchet distance")
    ticks = sorted({row["minutes"] for line in lines.values() for row in line})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    steps = [a * 10**e for e in range(-1, 5) for a in (1, 2, 5) if low <= a * 10**e <= high]
    axes.set_yticks(steps, [f"{step:g}" for step in steps])
    axes.grid()
    axes.legend(handlelength=4)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


# The command line -----------------------------------------------------------------------------------------------


def settled(options: argparse.Namespace) -> Experiment:
    """The experiment of the words, or of the run in --out; another one there is refused."""
    file = options.out / "experiment.json"
    if not options.words:
        return read_experiment(file)
    experiment = parse(Train, options.words, prog="minutes.py --", default=Train.defaults(options.words)).experiment
    # No cool-down, and so many steps that the end does not matter.
    experiment = dataclasses.replace(experiment, cooldown=0, steps=10_000_000).resolved()
    if experiment.data.source != DATA:
        raise SystemExit(f"the words have --data {experiment.data.source}: use {DATA}.")
    if file.is_file() and (other := read_experiment(file).differences(experiment)):
        raise SystemExit(f"{options.out} has another experiment ({'; '.join(other)}): choose another --out.")
    replace_json(file, experiment.to_json())
    return experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("words", nargs="*", help="after --: the words of `nidiff train` for ours; once is enough")
    parser.add_argument("--minutes", nargs="+", type=float, default=[1, 2, 5, 10, 15, 30, 45], help="processor minutes")
    parser.add_argument("--ours-until", type=float, default=math.inf, help="stop ours earlier; it can go on later")
    parser.add_argument("--evaluate", action="store_true", help="draw and measure, instead of training")
    parser.add_argument("--report", action="store_true", help="print the table of what was measured")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--references", type=int, default=10_000, help="held-out images")
    parser.add_argument("--ancestral-steps", type=int, default=100, help="of diffusers' DDPMScheduler; 0: leave it out")
    parser.add_argument(
        "--ancestral-at", nargs="+", type=float, help="the minutes it is measured at; default: the last"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/minutes"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    experiment = settled(options)
    if options.evaluate:
        evaluate(experiment, options)
    elif not options.report:
        train(experiment, options)
    if options.report:
        report(experiment, options)


if __name__ == "__main__":
    main()
