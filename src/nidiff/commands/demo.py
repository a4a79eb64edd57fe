"""``nidiff demo``: DDPM and NI-DDPM on the embedded digits, side by side."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from nidiff.experiment import PRESETS

RUNS = {"DDPM": "digits-ddpm", "NI-DDPM": "digits"}


@dataclass(frozen=True)
class Demo:
    """Train DDPM and NI-DDPM (Gaussian free field) on the digits with the same settings, sample both, compare."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("out/demo")
    """Where the two runs, the picture and the table go. Runs that are there already are gone on with."""
    steps: int = 0
    """Optimiser steps of each; 0: the preset's."""
    num_samples: int = 500
    """Images sampled from each model for the table."""
    sample_steps: int = 20
    """Steps of DPM-Solver++(2M)."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        import torch

        from nidiff.commands.train import Train
        from nidiff.data.dataset import load_dataset
        from nidiff.evaluation.classifier import recognised, train_classifier
        from nidiff.report.demo import save_demo
        from nidiff.sampling.sampler import sample
        from nidiff.training.model import load_model

        real, held_out = load_dataset("digits"), load_dataset("digits", split="test")
        assert real.labels is not None
        classifier = train_classifier(real.batch(torch.arange(len(real))), real.labels)
        test = held_out.batch(torch.arange(len(held_out)))
        named = classifier(test).argmax(1) == held_out.labels
        rows: list[dict[str, Any]] = [
            {"model": "real, held out", "recognised": recognised(classifier, test), "images": len(test)}
        ]
        pictures = {}
        for title, preset in RUNS.items():
            folder = self.out / preset
            experiment = PRESETS[preset]
            if self.steps:
                experiment = dataclasses.replace(experiment, steps=self.steps)
            print(f"training {title} ({experiment.covariance})", file=sys.stderr)
            Train(experiment, out=folder, preset=preset, resume=(folder / "experiment.json").exists()).train()
            denoiser = load_model(folder)
            shape = (self.num_samples, *real.shape)
            images = sample(
                denoiser, shape, sampler="dpmpp_2m", num_steps=self.sample_steps, seeds=range(self.num_samples)
            )
            pictures[title] = (images, denoiser.process.covariance)
            rows.append({"model": title, "recognised": recognised(classifier, images), "images": len(images)})
        save_demo(self.out / "demo.png", test, pictures)
        (self.out / "demo.json").write_text(json.dumps(rows, indent=2) + "\n")
        print(f"wrote {self.out / 'demo.png'}", file=sys.stderr)
        accuracy = named.double().mean().item()
        print(f"the classifier names {accuracy:.1%} of the held-out digits rightly", file=sys.stderr)
        print(json.dumps(rows, indent=2) if self.json else _table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'model':16}{'images':>8}  named with probability above 0.9"]
    lines += [f"{row['model']:16}{row['images']:>8}  {row['recognised']:.1%}" for row in rows]
    return "\n".join(lines)
