"""``nidiff models``: the models that ship with nidiff."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.aligned import aligned
from nidiff.commands.flags import QuietFlag
from nidiff.errors import InputError, one_of

HEAD = ("model", "noise", "training", "parameters", "size", "score", "what it is")


@dataclass(frozen=True)
class Models:
    """List the models that ship with nidiff and draw their pictures; or print all that is known about one of them."""

    name: Annotated[Positional[str | None], arg(metavar="NAME", help_behavior_hint="(default: all of them)")] = None
    """The model to describe: its noise, schedule, data, the command that trained it, its scores and its picture."""
    out: Path = Path("out/models.png")
    """The picture of all of them, with --json too."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of words."""
    quiet: QuietFlag = False

    def run(self) -> None:
        from nidiff.model.zoo import zoo_models

        models = zoo_models()
        if not models:
            remedy = "train one with nidiff train, or use a checkout of the repository"
            raise InputError(None, None, "no model ships with this install", remedy)
        if self.name is not None:
            entry = models[one_of("name", self.name, models)]
            print(json.dumps(described(entry), indent=2) if self.json else "\n".join(_words(entry)))
            return
        from PIL import Image

        from nidiff.report.contact import save_sheet

        cards = [described(entry) for entry in models.values()]
        pictures = [(card["name"], Image.open(card["picture"]["file"]).convert("RGB")) for card in cards]
        save_sheet(pictures, self.out, min(5, len(cards)))
        print(f"wrote {self.out}", file=sys.stderr)
        print(json.dumps(cards, indent=2) if self.json else aligned([HEAD, *map(_cells, cards)]))


def described(entry: Path) -> dict[str, Any]:
    """All that is known about an entry, as JSON can hold it; one whose files have changed is refused."""
    from nidiff.model.zoo import PICTURE, check_entry, entry_bytes
    from nidiff.training.experiment import read_experiment

    card, experiment = check_entry(entry), read_experiment(entry)
    facts = {key: value for key, value in asdict(card).items() if key != "files"}
    return {
        "name": entry.name,
        "path": str(entry),
        **facts,
        "picture": {"file": str(entry / PICTURE), **facts["picture"]},
        "bytes": entry_bytes(entry),
        "experiment": experiment.to_json(),
    }


def _cells(card: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, in plain ASCII; of the scores the first metric of the first, and how it was drawn."""
    from nidiff.model.zoo import time_words

    experiment, score = card["experiment"], ""
    time = "" if card["seconds"] is None else f", {time_words(card['seconds'])}"
    for first in card["scores"][:1]:
        name, metric = next(iter(first["metrics"].items()))
        amount = f"; {first['num_generated']} samples" if "num_generated" in first else ""
        score = f"{name} {metric['value']:.4g} ({first['sampler']}, {first['num_steps']}{amount})"
    return (
        card["name"],
        experiment["covariance"],
        f"{card['images']:,} items{time}",
        f"{card['parameters'] / 1e6:.2f} M",
        f"{card['bytes'] / 1e6:.2f} MB",
        score,
        card["title"],
    )


def _words(entry: Path) -> list[str]:
    """The whole card, a line for each fact."""
    from nidiff.evaluation.results import read_results
    from nidiff.evaluation.table import text
    from nidiff.model.zoo import METRICS, PICTURE, check_entry, entry_bytes, time_words
    from nidiff.notation import seeds_text
    from nidiff.training.experiment import read_experiment

    card, experiment, name = check_entry(entry), read_experiment(entry), entry.name
    picture, seeds = card.picture, seeds_text(card.picture.seeds)
    took = "time not recorded" if card.seconds is None else time_words(card.seconds)
    amount = f"{experiment.steps} steps of {experiment.batch_size}, {card.images} items seen"
    weighting = "what is predicted" if experiment.weighting == "target" else experiment.weighting
    facts = [
        ("noise", f"N(0, Sigma), Sigma = {experiment.covariance}"),
        ("schedule", experiment.schedule),
        ("target", f"{experiment.target}, loss weighted as the error of {weighting}"),
        ("data", experiment.data.source + (", mirrored at random" if experiment.flip else "")),
        ("network", f"{card.parameters} parameters, float16, {entry_bytes(entry) / 1e6:.2f} MB with all files"),
        ("training", f"{amount}, seed {experiment.seed}; {took} on {card.processor}"),
        ("trained by", card.command),
        ("picture", str(entry / PICTURE)),
        ("", f"seeds {seeds}, {picture.sampler}, {picture.num_steps} steps"),
        ("sample it", f"nidiff sample {name} --seeds {seeds}"),
        ("in Python", f'nidiff.load_model("{name}")'),
        ("train it again", f"nidiff train --config {name}"),
        ("files", str(entry)),
    ]
    lines = [f"{name}: {card.title}", "", aligned(facts), ""]
    if not (entry / METRICS).is_file():
        return [*lines, "It has not been measured."]
    note = "Measured with the weights as they were trained, before they were rounded to float16."
    results = [replace(result, run=name) for result in read_results(entry / METRICS)]
    return [*lines, text(results), note]
