"""``nidiff demo``: DDPM and NI-DDPM on the embedded digits, side by side."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.errors import InputError
from nidiff.extras import require
from nidiff.files import replace_text, writing
from nidiff.training.experiment import PRESETS

if TYPE_CHECKING:
    from nidiff.commands.train import Train

RUNS = {"DDPM": "digits-ddpm", "NI-DDPM": "digits"}
SAMPLERS = {"ancestral": 50, "dpmpp_2m": 10}  # the paper's sampler with few steps, and a fast solver with fewer
BYTES = 64 * 1024  # at least, for each image that is sampled: the activations of the network


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
        from nidiff.data.load import load_dataset
        from nidiff.evaluation.classifier import recognised, train_classifier
        from nidiff.model.folder import load_model
        from nidiff.randomness import generators_from_seeds
        from nidiff.report.panels import save_panels
        from nidiff.sampling.sampler import sample

        trainings = self._trainings()  # checked, all of them, before the first begins
        real, held_out = load_dataset("digits"), load_dataset("digits", split="test")
        assert real.labels is not None
        classifier, test = train_classifier(real.all(), real.labels), held_out.all()
        panels, rows = {"real": test}, [("real, held out", "", 0, len(test), recognised(classifier, test))]
        for title, training in trainings.items():
            print(f"training {title} ({training.experiment.covariance})", file=sys.stderr)
            training.train()
            denoiser = load_model(training.directory().folder)
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

    def _trainings(self) -> "dict[str, Train]":
        """The two runs, to begin or to resume; what would be refused later is refused now."""
        from nidiff.commands.train import Train
        from nidiff.memory import require_memory

        if self.num_samples < 1:
            raise InputError(f"num_samples={self.num_samples} must be at least 1.")
        require_memory(f"num_samples={self.num_samples}", BYTES * self.num_samples, "draw fewer samples")
        for path in (self.out / "demo.png", self.out / "demo.json"):
            if path.is_dir():
                raise InputError(f"out={str(self.out)!r} has a directory {path.name}: choose another directory.")
        trainings = {}
        for title, preset in RUNS.items():
            experiment = replace(PRESETS[preset], steps=self.steps, cooldown=self.steps // 2)
            training = Train(experiment, out=self.out / preset, preset=preset)
            run = training.directory()
            training = replace(training, resume=run.exists())
            run.check(experiment, resume=training.resume, overwrite=False)
            trainings[title] = training
        return trainings
