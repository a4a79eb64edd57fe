"""``nidiff demo``: samples of a model that ships; then DDPM and NI-DDPM on the embedded digits, side by side."""

import json
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from nidiff.aligned import aligned
from nidiff.commands.flags import QuietFlag
from nidiff.extras import require
from nidiff.files import replace_text, writing
from nidiff.locks import claimed
from nidiff.training.experiment import PRESETS

if TYPE_CHECKING:
    from nidiff.commands.train import Train

FIRST, SHOWN = "turbulence", 16  # the model of the first picture, and how many of its samples are in it
RUNS = {"DDPM": "digits-ddpm", "NI-DDPM": "digits"}
SAMPLERS = {"ancestral": 50, "dpmpp_2m": 10}  # the paper's sampler with few steps, and a fast solver with fewer
BYTES = 64 * 1024  # at least, for each image that is sampled: the activations of the network


@dataclass(frozen=True)
class Demo:
    """Draw samples of a model that ships; train DDPM and NI-DDPM on the digits with the same settings, and compare."""

    out: Annotated[Path, arg(metavar="DIR")] = Path("out/demo")
    """Where the two runs, the pictures and the table go. Resumes existing runs."""
    steps: int = 1000
    """Optimiser steps of each run, the second half with a falling learning rate."""
    num_samples: int = 500
    """Images sampled from each model for the table."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of a table."""
    quiet: QuietFlag = False

    def run(self) -> None:
        require("accelerate")  # its extra brings whatever else is missing
        trainings = self._trainings()  # checked, all of them, before the first begins
        with claimed(self.out):
            self._compare(trainings)

    def _compare(self, trainings: "dict[str, Train]") -> None:
        started = time.monotonic()
        from nidiff.data.load import load_dataset
        from nidiff.evaluation.classifier import recognised, train_classifier
        from nidiff.model.folder import load_model
        from nidiff.randomness import generators_from_seeds
        from nidiff.report.contact import save_panels
        from nidiff.sampling.sampler import sample

        if self._draw_first():
            seconds = time.monotonic() - started
            _say(f"wrote {self.out / 'first.png'} after {seconds:.1f} s: {FIRST}, a model that ships")
        real, held_out = load_dataset("digits"), load_dataset("digits", split="test")
        assert real.labels is not None
        classifier, test = train_classifier(real.all(), real.labels), held_out.all()
        panels, rows = {"real": test}, [("real, held out", "", 0, len(test), recognised(classifier, test))]
        for title, training in trainings.items():
            _say(f"training {title} ({training.experiment.covariance})")
            training.train()
            denoiser = load_model(training.directory().folder)
            shape, seeds = (self.num_samples, *real.shape), range(self.num_samples)
            for sampler, num_steps in SAMPLERS.items():
                images = sample(denoiser, shape, sampler=sampler, num_steps=num_steps, generator=seeds)
                rows.append((title, sampler, num_steps, len(images), recognised(classifier, images)))
                if sampler == "ancestral":
                    noise = denoiser.process.noise((64, *real.shape), generators_from_seeds(range(64)))
                    panels |= {f"{title}: noise": noise / 3, f"{title}: samples": images}
        keys = ("model", "sampler", "num_steps", "images", "recognised")
        table = json.dumps([dict(zip(keys, row, strict=True)) for row in rows], indent=2)
        with writing("out", self.out):
            save_panels(self.out / "demo.png", panels)
            replace_text(self.out / "demo.json", table + "\n")
        _say(f"wrote {self.out / 'demo.png'}")
        accuracy = (classifier(test).argmax(1) == held_out.labels).double().mean().item()
        _say(f"the classifier names {accuracy:.1%} of the held-out digits correctly")
        head = ("model", "sampler", "steps", "images", "named with probability above 0.9")
        cells = [(row[0], row[1], str(row[2] or ""), str(row[3]), f"{row[4]:.1%}") for row in rows]
        print(table if self.json else aligned([head, *cells]), flush=True)
        _say("\nTo try next:\n" + aligned([(f"  {command}", what) for command, what in self.next_commands().items()]))

    def next_commands(self) -> dict[str, str]:
        """Three commands to go on with, and what each does."""
        out, run = shlex.quote(str(self.out)), shlex.quote(str(self.out / RUNS["NI-DDPM"]))
        return {
            f"nidiff explore {out}": "play with both, in the browser",
            f"nidiff sample {run} --seeds 0-63": "64 more digits",
            "nidiff noise --data digits": "noise that fits given pictures",
        }

    def _draw_first(self) -> bool:
        """Samples of a model that ships beside the noise they begin with; false if this install has no models."""
        from nidiff.model.zoo import zoo_models

        if FIRST not in zoo_models():
            return False
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.randomness import generators_from_seeds, white_noise
        from nidiff.report.contact import save_panels
        from nidiff.sampling.sampler import sample

        model = open_model(Path(FIRST), process_state())
        assert model.card is not None
        picture, shape, seeds = model.card.picture, (SHOWN, *model.shape), range(SHOWN)
        noise = model.denoiser.process.noise(shape, generators_from_seeds(seeds))
        images = sample(model.denoiser, shape, sampler=picture.sampler, num_steps=picture.num_steps, generator=seeds)
        panels = {"white noise": white_noise(shape, generators_from_seeds(seeds)), f"{FIRST}: noise": noise}
        panels[f"{FIRST}: samples, {picture.num_steps} steps"] = images
        with writing("out", self.out):
            save_panels(self.out / "first.png", {title: each / 3 for title, each in panels.items()}, side=4)
        return True

    def _trainings(self) -> "dict[str, Train]":
        """The two runs, to begin or to resume; what would be refused later is refused now."""
        from nidiff.commands.train import Train
        from nidiff.memory import require_memory
        from nidiff.recipe import check_whole

        check_whole("num_samples", self.num_samples)
        require_memory("num_samples", self.num_samples, BYTES * self.num_samples, "draw fewer samples")
        trainings = {}
        for title, preset in RUNS.items():
            experiment = replace(PRESETS[preset], steps=self.steps, cooldown=self.steps // 2)
            training = Train(experiment, out=self.out / preset, preset=preset)
            run = training.directory()
            training = replace(training, resume=run.exists())
            run.check(experiment, resume=training.resume, overwrite=False)
            trainings[title] = training
        return trainings


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
