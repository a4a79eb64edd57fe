"""Which network, target and weighting are best per minute? The record behind the presets that end in -cpu.

Each setting is trained for the same processor minutes: as many steps as it does in them at a speed that is measured
first, so that what else the machine does meanwhile changes little. Then the Fréchet distance of its samples to held-out
images is measured. Every result is written to --out as soon as it is there and not repeated.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from timing import log

import nidiff
from nidiff.data.dataset import quantise
from nidiff.data.spec import DataSpec
from nidiff.evaluation.features import FeatureNetwork, compute_features, load_features, reference_features
from nidiff.files import replace_text
from nidiff.memory import keep_freed_memory
from nidiff.training.build import build
from nidiff.training.experiment import Experiment
from nidiff.training.loop import averaged_weights, step_batches, train_step, with_kappa

LARGE = {"network": "unet:patch=2", "widths": (64, 96), "attention": (1,)}
SMALL = {"network": "unet:patch=2", "widths": (48, 64), "attention": (1,)}
PIXELS = {"network": "unet", "widths": (32, 64, 64), "attention": (2,)}
SHALLOW = {"network": "unet", "widths": (24, 48, 64), "attention": (2,)}
EPS = {"target": "eps", "weighting": "eps"}
V = {"target": "v", "weighting": "v"}
RESIDUAL = {"target": "residual", "weighting": "target"}
RESIDUAL_V = {"target": "residual", "weighting": "v"}
LINEAR, COSINE = ({"schedule": f"ddpm_{name}"} for name in ("linear", "cosine"))
WHITE, HALF, FREE = ({"covariance": text} for text in ("white", "gff:gamma=0.5", "gff:gamma=1"))
SETTINGS: dict[str, dict[str, Any]] = {
    "white eps linear": LARGE | WHITE | EPS | LINEAR,
    "white eps": LARGE | WHITE | EPS | COSINE,
    "white v": LARGE | WHITE | V | COSINE,
    "white residual": LARGE | WHITE | RESIDUAL | COSINE,
    "white residual v": LARGE | WHITE | RESIDUAL_V | COSINE,
    "half residual v": LARGE | HALF | RESIDUAL_V | COSINE,
    "half v": LARGE | HALF | V | COSINE,
    "free eps": LARGE | FREE | EPS | COSINE,
    "small white v": SMALL | WHITE | V | COSINE,
    "small white residual v": SMALL | WHITE | RESIDUAL_V | COSINE,
    "pixels white v": PIXELS | WHITE | V | COSINE,
    "pixels white residual v": PIXELS | WHITE | RESIDUAL_V | COSINE,
    "pixels white residual": PIXELS | WHITE | RESIDUAL | COSINE,
    "pixels half residual": PIXELS | HALF | RESIDUAL | COSINE,
    "pixels white residual 32": PIXELS | WHITE | RESIDUAL | COSINE | {"batch_size": 32},
    "pixels white v 32": PIXELS | WHITE | V | COSINE | {"batch_size": 32},
    "pixels half v 32": PIXELS | HALF | V | COSINE | {"batch_size": 32},
    "pixels white eps linear 32": PIXELS | WHITE | EPS | LINEAR | {"batch_size": 32},
    "pixels white residual sees x 32": PIXELS | WHITE | RESIDUAL | COSINE | {"batch_size": 32, "sees": "x"},
    "pixels quarter v 32": PIXELS | V | COSINE | {"batch_size": 32, "covariance": "gff:gamma=0.25"},
    "pixels white v 32 fast": PIXELS | WHITE | V | COSINE | {"batch_size": 32, "learning_rate": 2e-3},
    "pixels white v 16": PIXELS | WHITE | V | COSINE | {"batch_size": 16},
    "shallow white v 32": SHALLOW | WHITE | V | COSINE | {"batch_size": 32},
    "fast white residual v": LARGE | WHITE | RESIDUAL_V | COSINE | {"learning_rate": 3e-3},
    "slow white residual v": LARGE | WHITE | RESIDUAL_V | COSINE | {"learning_rate": 4e-4},
    "sees both residual v": LARGE | WHITE | RESIDUAL_V | COSINE | {"sees": "both"},
    "sees x residual v": LARGE | WHITE | RESIDUAL_V | COSINE | {"sees": "x"},
}
RESULTS = Path("benchmarks/results/screening.json")
CELLS = (("dpmpp_2m", 20), ("angle_2m", 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("settings", nargs="*", choices=[*SETTINGS, []], help="default: all")
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=2.0, help="processor minutes of training")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--references", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/screening"))
    parser.add_argument("--report", action="store_true", help="only print the table of what is there, and keep it")
    options = parser.parse_args()
    if options.report:
        report(options.out)
        return
    keep_freed_memory()
    features = load_features("efficientnet-lite0")
    held_out = nidiff.load_dataset(options.data, data_dir=options.data_dir, split="test")
    pixels = held_out.stored(torch.arange(options.references))
    reference = reference_features(pixels, features, name=f"{options.data} held out").features
    for name in options.settings or SETTINGS:
        file = options.out / f"{options.data} {options.minutes:g} {options.seed} {name}.json"
        if not file.exists():
            found = run(name, options, features, reference)
            replace_text(file, json.dumps(found) + "\n")
            log(f"{name}: {found}")


def report(out: Path) -> None:
    """The results in the folder as a table, the best first."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    replace_text(RESULTS, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    cells = [f"{sampler} {num_steps}" for sampler, num_steps in CELLS]
    print("| data, minutes, seed, setting | parameters | steps | " + " | ".join(cells) + " |")
    print("|" + " --- |" * (3 + len(cells)))
    for name, values in sorted(found.items(), key=lambda item: item[1][cells[0]]):
        print(
            f"| {name} | {values['parameters']:,} | {values['steps']} | "
            + " | ".join(str(values[cell]) for cell in cells)
            + " |"
        )


def run(name: str, options: argparse.Namespace, features: FeatureNetwork, reference: torch.Tensor) -> dict[str, Any]:
    """Train for the minutes, sample, and measure."""
    experiment = dataclasses.replace(
        Experiment(
            data=DataSpec(options.data, data_dir=options.data_dir), flip=True, learning_rate=1e-3, seed=options.seed
        ),
        ema_decay=0.998,
        **({"batch_size": 64} | SETTINGS[name]),
    )
    speed, trials = build(dataclasses.replace(experiment, steps=100)), []
    batches = step_batches(speed)
    for _ in range(8):
        begin = time.process_time()
        train_step(speed, batches).item()
        trials.append(time.process_time() - begin)
    steps = int(60 * options.minutes / sorted(trials)[2])
    trainer = build(dataclasses.replace(experiment, steps=steps, cooldown=steps // 2))
    batches, begin = step_batches(trainer), time.process_time()
    while trainer.step < steps:
        loss = train_step(trainer, batches)
    found: dict[str, Any] = {"steps": steps, "seconds": round(time.process_time() - begin, 1), "loss": loss.item()}
    found["parameters"] = sum(p.numel() for p in trainer.net.parameters())
    with averaged_weights(trainer) as net:
        denoiser = with_kappa(trainer, net)
        for sampler, num_steps in CELLS:
            count = options.samples
            shape = (count, *trainer.data.shape)
            x = nidiff.sample(denoiser, shape, sampler=sampler, num_steps=num_steps, generator=range(count), tile=64)
            distance = nidiff.metrics.frechet_distance(compute_features(features, quantise(x)), reference)
            found[f"{sampler} {num_steps}"] = round(distance, 2)
    return found


if __name__ == "__main__":
    main()
