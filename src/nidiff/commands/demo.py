"""``nidiff demo``: DDPM and NI-DDPM on the embedded digits, side by side."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.extras import require
from nidiff.files import replace_text, writing
from nidiff.training.experiment import PRESETS

RUNS = {"DDPM": "digits-ddpm", "NI-DDPM": "digits"}
SAMPLERS = {"ancestral": 50, "dpmpp_2m": 10}  # the paper's sampler with few steps, and a fast solver with fewer


@dataclass(frozen=True)
class Demo:
    """Train DDPM and NI-DDPM (Gaussian free field) on the digits with the same settings, sample both, compare."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("out/demo")
    """Where the two runs, the picture and the table go. Resumes existing runs."""
    steps: int = 1000
    """Optimiser steps of each run, the second half with a falling learning rate."""
    num_samples: int = 500
    """Images sampled from each model for the table."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        from nidiff.commands.train import Train
        from nidiff.data.dataset import load_dataset
        from nidiff.evaluation.classifier import recognised, train_classifier
        from nidiff.model.folder import load_model
        from nidiff.randomness import generators_from_seeds
        from nidiff.report.panels import save_panels
        from nidiff.sampling.sampler import sample

        real, held_out = load_dataset("digits"), load_dataset("digits", split="test")
        assert real.labels is not None
        classifier, test = train_classifier(real.all(), real.labels), held_out.all()
        panels, rows = {"real": test}, [("real, held out", "", 0, len(test), recognised(classifier, test))]
        for title, preset in RUNS.items():
            folder = self.out / preset
            experiment = replace(PRESETS[preset], steps=self.steps, cooldown=self.steps // 2)
            print(f"training {title} ({experiment.covariance})", file=sys.stderr)
            Train(experiment, out=folder, preset=preset, resume=(folder / "experiment.json").exists()).train()
            denoiser = load_model(folder)
            shape, seeds = (self.num_samples, *real.shape), range(self.num_samples)
            for sampler, num_steps in SAMPLERS.items():
                images = sample(denoiser, shape, sampler=sampler, num_steps=num_steps, seeds=seeds)
                rows.append((title, sampler, num_steps, len(images), recognised(classifier, images)))
                if sampler == "ancestral":
                    noise = denoiser.process.noise((64, *real.shape), generators_from_seeds(range(64)))
                    panels |= {f"{title}: noise": noise / 3, f"{title}: samples": images}
        keys = ("model", "sampler", "num_steps", "images", "recognised")
        found = json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2)
        with writing("out", self.out):
            save_panels(self.out / "demo.png", panels)
            replace_text(self.out / "demo.json", found + "\n")
        print(f"wrote {self.out / 'demo.png'}", file=sys.stderr)
        accuracy = (classifier(test).argmax(1) == held_out.labels).double().mean().item()
        print(f"the classifier names {accuracy:.1%} of the held-out digits correctly", file=sys.stderr)
        head = ("model", "sampler", "steps", "images", "named with probability above 0.9")
        cells = [(row[0], row[1], str(row[2] or ""), str(row[3]), f"{row[4]:.1%}") for row in rows]
        print(found if self.json else aligned([head, *cells]))
