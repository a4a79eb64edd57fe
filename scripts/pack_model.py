"""Pack a finished run as a model that ships: `python scripts/pack_model.py RUN NAME --title "What it is." --to wheel`.

The entry goes to src/nidiff/zoo/NAME, which is part of the wheel, or to models/NAME, which only a checkout has.
`nidiff.model.zoo` says what it holds. An entry of that name is replaced. `--card NAME` writes the card of one anew:
its command, which names a preset, and what --title, --seconds and --processor say.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from packing import pack, rewrite_card

from nidiff.errors import InputError
from nidiff.evaluation.results import Result, known_results
from nidiff.model.zoo import NAME, PICTURE, Picture, entry_bytes, find_model
from nidiff.notation import parse_seeds
from nidiff.training.experiment import Experiment, read_experiment
from nidiff.training.run import RunDirectory

ROOT = Path(__file__).parent.parent
PLACES = {"wheel": ROOT / "src/nidiff/zoo", "models": ROOT / "models"}
MOST_SCORES, MOST_METRICS = 6, 4


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", nargs="?", help="a finished run; none with --card")
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--card", action="store_true", help="only write the card of the entry NAME anew")
    parser.add_argument("--title", help="what it is, in a sentence (default: from its settings)")
    parser.add_argument("--sampler", help="of the picture (default: that of the run's grids)")
    parser.add_argument("--num-steps", type=int, help="of the picture (default: the run's, or the sampler's own)")
    parser.add_argument("--seeds", default="0-15", help="of the picture (default: 0-15)")
    parser.add_argument("--seconds", type=float, help="the time of the training (default: from log.jsonl)")
    parser.add_argument("--processor", help="what it was trained on (default: the processor of this machine)")
    parser.add_argument("--no-mixture", action="store_true", help="leave out the data's mixture, most of the bytes")
    parser.add_argument("--to", choices=PLACES, default="wheel", help="in the wheel, or beside it in the repository")
    parser.add_argument("--into", type=Path, help="another directory for the entry, instead of --to")
    options = parser.parse_args(words)
    try:
        destination = (options.into or PLACES[options.to]) / options.name
        if not NAME.fullmatch(options.name):
            raise InputError("NAME", options.name, "cannot be used", "give letters, digits and hyphens")
        if options.card:
            destination = recarded(options, find_model(options.name) if options.into is None else destination)
        elif options.run is None:
            raise InputError("RUN", None, "is missing", "give a run directory, or --card")
        else:
            packed(options, destination)
    except InputError as error:
        print(f"pack_model: {error}", file=sys.stderr)
        return 2
    print(destination)
    return 0


def packed(options: argparse.Namespace, destination: Path) -> None:
    run = RunDirectory.open(options.run)
    experiment = run.experiment
    card = pack(
        run.folder,
        destination,
        title=options.title or title_of(experiment),
        command=experiment.command(),
        seconds=options.seconds or seconds_of(run.log_file, experiment),
        images=experiment.steps * experiment.batch_size,
        processor=options.processor or processor(),
        picture=picture_of(run, options),
        scores=headline(known_results(run.folder)),
        about=experiment.about,
        mixture=not options.no_mixture,
    )
    size = f"{entry_bytes(destination) / 1e6:.2f} MB"
    print(f"{size}, {card.parameters} parameters, picture {destination / PICTURE}", file=sys.stderr)
    print(card.command, file=sys.stderr)


def recarded(options: argparse.Namespace, entry: Path) -> Path:
    changes = {key: value for key in ("title", "seconds", "processor") if (value := getattr(options, key)) is not None}
    card = rewrite_card(entry, command=read_experiment(entry).command(), **changes)
    print(card.command, file=sys.stderr)
    return entry


def title_of(experiment: Experiment) -> str:
    return f"{experiment.data.source} with noise {experiment.covariance} and schedule {experiment.schedule}."


def picture_of(run: RunDirectory, options: argparse.Namespace) -> Picture:
    """The sampler that is asked for, else that of the run's grids, with a number of steps in any case."""
    from nidiff.sampling.sampler import as_sampler, default_steps

    stored = run.stored()
    if stored is None:
        raise InputError("run", run.folder, "has lost its schedule", "train it again")
    experiment, schedule = run.experiment, stored.process.schedule
    sampler = options.sampler or experiment.sampler
    steps = options.num_steps or (experiment.num_steps if options.sampler is None else None)
    steps = steps or default_steps(as_sampler(sampler)[0], schedule)
    return Picture(tuple(parse_seeds(options.seeds)), sampler, min(steps, len(schedule)))


def seconds_of(log: Path, experiment: Experiment) -> float | None:
    """The time of all steps, from the speed that each line of the log has; None without a log."""
    if not log.is_file():
        return None
    seconds, before = 0.0, 0
    for line in log.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        seconds += (found["step"] - before) * experiment.batch_size / found["images_per_s"]
        before = found["step"]
    return round(seconds, 1)


def processor() -> str:
    """The name of this machine's processor and the number of its cores."""
    names = []
    if Path("/proc/cpuinfo").is_file():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    count = os.cpu_count() or 1
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name}, {count} core{'s' if count > 1 else ''}"


def headline(results: Iterable[Result]) -> list[dict[str, Any]]:
    """The results over most samples, the best first by their first metric, a distance or an error."""
    results = [result for result in results if result.metrics]
    most = max((result.provenance.get("num_generated", 0) for result in results), default=0)
    scores = []
    for result in results:
        if result.provenance.get("num_generated", 0) == most:
            finite = {name: metric for name, metric in result.metrics.items() if metric.finite is not None}
            metrics = {name: {"value": m.finite, "error": m.error} for name, m in list(finite.items())[:MOST_METRICS]}
            score = {"sampler": result.sampler_text, "num_steps": result.num_steps, "num_generated": most}
            score |= {"metrics": metrics}
            scores += [{**score, "source": result.source}] if metrics else []
    return sorted(scores, key=lambda score: next(iter(score["metrics"].values()))["value"])[:MOST_SCORES]


if __name__ == "__main__":
    sys.exit(main())
