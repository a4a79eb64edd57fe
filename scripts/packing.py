"""From a finished run to an entry of the zoo (`nidiff.model.zoo`): small, without paths, with its card and picture."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from card_picture import draw_samples, limits_of, save_picture
from safetensors.torch import save as to_bytes
from torch import Tensor

from nidiff.covariance.config import read_arrays
from nidiff.data.named import DATASETS
from nidiff.errors import InputError
from nidiff.files import (
    as_path,
    file_sha256,
    read_json,
    read_object,
    replace_json,
    replace_text,
    replacing,
    replacing_folder,
    writing,
)
from nidiff.model.card import METRICS as METRICS_TITLE
from nidiff.model.card import escaped, model_card
from nidiff.model.config import FILES
from nidiff.model.folder import image_shape, load_model, read_grid, whole_model
from nidiff.model.manifest import MANIFEST, model_sha256, write_manifest
from nidiff.model.network import UNET, WEIGHTS, read_weights
from nidiff.model.sampling import SAMPLING, read_choices, write_choices
from nidiff.model.zoo import (
    CARD,
    EXPERIMENT,
    METRICS,
    MOST_BYTES,
    PICTURE,
    Card,
    Picture,
    entry_bytes,
    read_card,
    time_words,
)
from nidiff.notation import seeds_text

LARGE = ("factors", "kappa.values", "kappa.trust")  # arrays of the mixture and of κ
TRAINING = "\n## Training\n"  # where the part of README.md begins that only entries have


def pack(
    run: str | Path,
    destination: str | Path,
    *,
    title: str,
    command: str,
    seconds: float | None,
    images: int,
    processor: str,
    picture: Picture,
    scores: Sequence[Mapping[str, Any]] = (),
    about: Mapping[str, str] | None = None,
    mixture: bool = True,
) -> Card:
    """Pack the finished ``run`` into ``destination``, whose name is that of the model, and return its card.

    The picture is drawn by the packed model, and colours of fields are chosen for it. Of metrics.json, the results of
    this model are kept. ``scores`` are for its card; ``about`` is what else README.md says. The ``mixture`` of the data
    may stay behind, which is most of the bytes.
    """
    run, destination = as_path("run", run), as_path("destination", destination)
    place = whole_model(run)
    if place.parent.resolve() != run.resolve() or not (place / UNET).is_dir():
        raise InputError("run", run, "is not the directory of a run whose network can be rebuilt", "give one")
    if destination.exists() and not (destination / CARD).is_file():
        raise InputError("destination", destination, "is not a packed model", "choose a new directory")
    experiment = read_object(run / EXPERIMENT)
    identity, facts = experiment["identity"], experiment["resolved"]
    experiment["data_dir"] = None
    trained = model_sha256(place, checked=True)
    results = _results(run / METRICS, trained)
    named = str(experiment.get("data"))
    choices = read_choices(place / SAMPLING, trained)
    stated = [experiment, results, [choice._asdict() for choice in choices]]
    for path in [*_paths(stated), *([] if named in DATASETS or named.startswith("hf:") else [named])]:
        raise InputError("run", run, f"names the path {path}, which others do not have", "use named data")
    card = Card(title, command, seconds, images, processor, int(facts["parameters"]), trained, picture, tuple(scores))
    with writing("destination", destination), replacing_folder(destination) as aside:
        replace_json(aside / EXPERIMENT, experiment)
        if results:
            replace_json(aside / METRICS, results)
        _pack_model(place, aside / "model", identity, mixture)
        if choices:
            write_choices(aside / "model" / SAMPLING, choices, model_sha256(aside / "model"))
        denoiser = load_model(aside)
        shape = image_shape(denoiser.net, denoiser.process.covariance)
        grid = read_grid(aside, shape, denoiser.scaling)
        data = draw_samples(denoiser, grid, picture)
        card = replace(card, picture=replace(picture, limits=limits_of(data, grid)))
        save_picture(data, grid, card.picture.limits, aside / PICTURE)
        files = [name for name in (EXPERIMENT, METRICS, PICTURE) if (aside / name).is_file()]
        card = replace(card, files={name: file_sha256(aside / name) for name in files})
        words = model_card(denoiser, shape, about, destination.name)
        replace_text(aside / "model" / "README.md", words + card_text(destination.name, card))
        replace_json(aside / CARD, card.to_json())
        if (size := entry_bytes(aside)) > MOST_BYTES:
            problem = f"takes {size / 1e6:.1f} MB, and {MOST_BYTES / 1e6:g} MB are the most"
            raise InputError("run", run, problem, "train a smaller network")
    return card


def rewrite_card(entry: str | Path, **changes: Any) -> Card:
    """Change what the card of an entry says, such as its title or command, in zoo.json and README.md."""
    entry = as_path("entry", entry)
    card, readme = replace(read_card(entry), **changes), entry / "model" / "README.md"
    usual = readme.read_text(encoding="utf-8").partition(TRAINING)[0]
    with writing("entry", entry):
        replace_text(readme, usual + card_text(entry.resolve().name, card))
        replace_json(entry / CARD, card.to_json())
    return card


def redraw(entry: Path) -> Card:
    """Draw the picture of an entry anew, with the seeds and sampler of its card, and write its card."""
    card, denoiser = read_card(entry), load_model(entry)
    grid = read_grid(entry, image_shape(denoiser.net, denoiser.process.covariance), denoiser.scaling)
    data = draw_samples(denoiser, grid, card.picture)
    picture = replace(card.picture, limits=limits_of(data, grid))
    with writing("entry", entry):
        save_picture(data, grid, picture.limits, entry / PICTURE)
    return rewrite_card(entry, picture=picture, files={**card.files, PICTURE: file_sha256(entry / PICTURE)})


def card_text(name: str, card: Card) -> str:
    """What README.md of an entry says beside the usual card: the training, the picture and the scores."""
    picture = card.picture
    seeds, drawn = seeds_text(picture.seeds), f"{picture.sampler}, {picture.num_steps} steps"
    text = f"""{TRAINING}
{escaped(card.title)}

```
{card.command}
```

{training_words(card)}. `nidiff train --config {name}` repeats it. The weights are stored in float16.

## Picture

![Samples of {name}](../{PICTURE})

Seeds {seeds}, {escaped(drawn)}: `nidiff sample {name} --seeds {seeds}` draws the same ones.
"""
    if not card.scores:
        return text
    names = list(dict.fromkeys(metric for score in card.scores for metric in score["metrics"]))
    rows = [["sampler", "steps", *names], ["---"] * (2 + len(names))]
    for score in card.scores:
        cells = [number_words(score["metrics"].get(metric)) for metric in names]
        rows.append([str(score["sampler"]), str(score["num_steps"]), *cells])
    lines = "\n".join(f"| {' | '.join(row if row[0] == '---' else map(escaped, row))} |" for row in rows)
    sources = " ".join(dict.fromkeys(str(score["source"]) for score in card.scores if score.get("source")))
    note = "Of the weights before they were rounded to float16; ± is the error over samples."
    return f"{text}{METRICS_TITLE}{lines}\n\n{escaped(sources)} {note}\n"


def training_words(card: Card) -> str:
    """How much was trained, for how long, and on what."""
    time = "" if card.seconds is None else f" in {time_words(card.seconds)}"
    return f"{card.images:,} items seen{time} on {card.processor}, {card.parameters:,} parameters"


def _pack_model(place: Path, packed: Path, identity: Mapping[str, str], mixture: bool) -> None:
    """Copy a model with the weights of its network, the factors of its mixture and κ in float16."""
    for file in sorted(place.rglob("*")):
        name = file.relative_to(place)
        is_weights = name.parts[0] == UNET and file.suffix == ".safetensors"
        skipped = is_weights or name.parts[0] in (MANIFEST, "README.md", SAMPLING)
        if file.is_file() and not skipped and not file.name.startswith("."):
            (packed / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, packed / name)
    halved = {packed / UNET / WEIGHTS[UNET]: {name: _halved(name, t) for name, t in read_weights(place / UNET).items()}}
    for name, owner in FILES.values():
        for file in place.glob(f"*/{name}"):
            tensors = read_arrays(file, owner)
            large = {array: _halved(array, tensors[array]) for array in LARGE if array in tensors}
            halved[packed / file.relative_to(place)] = tensors | large
    if not mixture:
        for config in packed.glob("*/scheduler_config.json"):
            values = read_object(config)
            kappa = values["gaussian"].get("kappa") or {}
            kappa.get("losses", {}).pop("mixture", None)
            replace_json(config, {key: value for key, value in values.items() if key != "mixture"})
        for file in packed.glob(f"*/{FILES['mixture'][0]}"):
            file.unlink()
            del halved[file]
    for file, tensors in halved.items():
        with replacing(file) as stream:
            stream.write(to_bytes(tensors, metadata={"format": "pt"}))
    write_manifest(packed, identity)


def _halved(name: str, tensor: Tensor) -> Tensor:
    half = tensor.half() if tensor.is_floating_point() else tensor
    if not bool(torch.isfinite(half).all()):
        raise InputError("run", None, f"has weights {name!r} that float16 cannot hold", "train it again")
    return half.contiguous()


def _results(file: Path, sha256: str) -> list[Any]:
    """The results in metrics.json that are of this model, as they are."""
    values = read_json(file) if file.exists() else []
    return [result for result in values if result.get("provenance", {}).get("model_sha256") == sha256]


def _paths(values: Any) -> Iterator[str]:
    """The absolute paths among the words in values of JSON."""
    if isinstance(values, str) and (os.path.isabs(values) or values.startswith("~")):
        yield values
    for value in values.values() if isinstance(values, Mapping) else values if isinstance(values, list) else ():
        yield from _paths(value)


def number_words(metric: Mapping[str, Any] | None) -> str:
    """A metric with its error."""
    if not metric or metric.get("value") is None:
        return ""
    error = metric.get("error")
    return f"{metric['value']:.4g}" + ("" if error is None else f" ± {error:.2g}")
