"""``nidiff tune``: the best sampler of a model for few evaluations of its network."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from nidiff.commands.flags import CheckpointFlag, Comparing, QuietFlag
from nidiff.errors import Interrupted
from nidiff.progress import progress_bar

if TYPE_CHECKING:
    from nidiff.evaluation.tune import Tuning


@dataclass(frozen=True)
class Tune:
    """Find the best sampler of a model for few evaluations of its network, and store it with the model.

    Samplers, amounts of fresh noise, spacings, starts and endings are tried against held-out data: a few samples of all
    of them, more of the best. 8-bit images are compared by the Fréchet distance of features, all other data by their
    spectrum, values and increments. The choice is made on one half of the held-out data, and reported on the other half
    with other samples. From then on nidiff sample MODEL --num-steps 5 uses it, unless --sampler is given. A choice is
    stored when it is made, and stays if the command is stopped.
    """

    model: Annotated[Positional[Path], arg(metavar="RUN_OR_MODEL")]
    """A run directory of nidiff train, its model folder, or the name of a model that ships, whose choice is stored in
    out/NAME."""
    comparing: Annotated[Comparing, arg(name="")]
    evaluations: Annotated[tuple[int, ...], arg(metavar="INT ...")] = (5, 10)
    """Calls of the network for an image: one for each number a sampler is chosen."""
    candidates: Annotated[tuple[str, ...], arg(metavar="STR ...", help_behavior_hint="(default: by the model)")] = ()
    """Samplers to try, as in nidiff sample. The default depends on what the model knows of its data."""
    metric: Annotated[tuple[str, ...], arg(metavar="STR ...", help_behavior_hint="(default: by the data)")] = ()
    """Of nidiff evaluate, with 0 as the best value: frechet, kernel, spectrum, values, tails, …; of several, their
    mean. Default: frechet for 8-bit images, else spectrum, values and increments."""
    budget: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: see below)")] = None
    """Samples to draw in all, at most. Default: up to 64 of each candidate, 256 of a third, 1024 of a ninth, and half
    or an eighth of these for data that are no 8-bit images."""
    seed: int = 0
    """Another one has other samples."""
    batch: int = 128
    """Samples at a time. It changes the speed and the memory, not the samples."""
    checkpoint: CheckpointFlag = None
    dry_run: Annotated[bool, arg(help_behavior_hint="")] = False
    """Only list the candidates, and how often the network would be called."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of tables."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.evaluation.evaluator import open_held_out
        from nidiff.evaluation.tune import plan_tuning
        from nidiff.generation.job import default_sampler
        from nidiff.generation.loaded_model import open_model, process_state
        from nidiff.model.sampling import store_choices

        model = open_model(self.model, process_state(), self.checkpoint)
        evaluator = open_held_out(model, **vars(self.comparing))
        evaluator.check(model.shape, len(evaluator.items))
        plan = plan_tuning(
            model.denoiser,
            evaluator,
            self.evaluations,
            metric=self.metric or None,
            candidates=self.candidates or None,
            default=default_sampler(model)[0],
            budget=self.budget,
            seed=self.seed,
            batch=self.batch,
        )
        amount = f"at most {plan.samples:,} samples in {plan.calls:,} calls of the network"
        print(f"{plan.num_candidates} candidates, {amount}", file=sys.stderr)
        if self.dry_run:
            print("\n".join(f"{trial.evaluations} {trial.sampler}" for trial in plan.trials))
            return
        stored: list[str] = []

        def store(tuning: "Tuning") -> None:
            store_choices(model.sampling_file, tuning.choices, model.sha256)
            stored[:] = map(str, tuning.chosen)

        try:
            with progress_bar("tuning", "calls") as progress:
                tuning = plan.run(progress, store)
        except KeyboardInterrupt:
            kept = (
                f"the choice for {', '.join(stored)} is in {model.sampling_file}" if stored else "nothing was changed"
            )
            raise Interrupted(f"stopped: {kept}.") from None
        print(f"wrote {model.sampling_file}", file=sys.stderr)
        print(json.dumps(tuning.to_json(), indent=2) if self.json else tuning.text())
