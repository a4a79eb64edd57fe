"""A model as a folder: the network, ``scheduler/`` with all that sampling needs to know, and a model card.

docs/diffusers.md shows its files, which `nidiff.interop` reads too. Nothing is unpickled, and a file that has changed
since it was written is refused.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from nidiff.covariance.config import SCHEDULER, save_arrays
from nidiff.covariance.covariance import Covariance
from nidiff.data.grid import Grid
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.errors import FileError, InputError
from nidiff.files import as_path, blaming, read_object, replace_json, replace_text, replacing_folder, writing
from nidiff.model.card import model_card
from nidiff.model.checkpoint import CHECKPOINTS, STATE, is_checkpoint, read_averaged, run_of
from nidiff.model.config import arrays, configured, missing_modules, model_folder, scheduler_config, with_arrays
from nidiff.model.manifest import (
    DATA,
    INDEX,
    MANIFEST,
    check_manifest,
    model_sha256,
    recorded_run,
    run_identity,
    write_manifest,
)
from nidiff.model.network import OTHER, UNET, library, load_network, read_weights, save_network
from nidiff.model.sampling import SAMPLING, read_choices, write_choices
from nidiff.model.zoo import AGAIN, entry_of, find_model

CONFIG = f"scheduler/{SCHEDULER}"
OURS = {DATA, INDEX, MANIFEST, SAMPLING, "README.md", "scheduler", UNET, OTHER}


def save_model(
    denoiser: Denoiser,
    folder: str | Path,
    about: Mapping[str, str] | None = None,
    *,
    grid: Grid | None = None,
    run: Mapping[str, str] | None = None,
) -> None:
    """Write the denoiser to ``folder``: its process, target, clipping, scaling and network.

    The network may be any `torch.nn.Module`. ``about`` is what else the model card shall say, such as
    ``{"data": "CIFAR-10"}``. ``grid`` has the names, units and coordinates of its data. A model that is there already
    stays until the new one is whole; of two that are saved here at once, the last one stays. ``run`` is the identity of
    the run that trained it.
    """
    folder = as_path("folder", folder).resolve()  # a link stays, and what it leads to is replaced
    if denoiser.condition_values or denoiser.corrections:
        problem = "has conditions, guidance or an observation bound"
        raise InputError("denoiser", None, problem, "save the one without them")
    net: Any = getattr(denoiser.net, "_orig_mod", denoiser.net)  # what torch.compile wrapped
    scheduler_config(denoiser)  # refuses what could not be loaded
    check_fits(net, denoiser)
    check_replaceable(folder)
    with writing("folder", folder), replacing_folder(folder) as aside:
        save_process(denoiser, aside, grid)
        save_network(net, aside)
        if (module := library(net)) is not None:
            index = {
                "_class_name": "NonIsotropicPipeline",
                "_diffusers_version": version("diffusers"),
                "scheduler": ["nidiff.interop.scheduler", "NonIsotropicScheduler"],
                "unet": [module, type(net).__name__],
            }
            replace_json(aside / INDEX, index)
        replace_text(aside / "README.md", model_card(denoiser, known_shape(net, denoiser.process.covariance), about))
        write_manifest(aside, run)
        if denoiser.choices:
            write_choices(aside / SAMPLING, denoiser.choices, model_sha256(aside))


def save_process(denoiser: Denoiser, folder: Path, grid: Grid | None = None) -> None:
    """Write ``scheduler/`` and data.json alone, as a run does when it begins."""
    config = scheduler_config(denoiser)
    for name, tensors in arrays(config).items():
        save_arrays(tensors, folder / "scheduler", name)
    if grid is not None:
        replace_json(folder / DATA, grid.to_json())
    replace_json(folder / CONFIG, config)


def save_outline(
    denoiser: Denoiser, folder: Path, grid: Grid | None = None, run: Mapping[str, str] | None = None
) -> None:
    """Write all of a model but its weights, as a run does when it begins: each checkpoint has weights for it."""
    save_process(denoiser, folder, grid)
    if hasattr(denoiser.net, "save_config"):
        cast(Any, denoiser.net).save_config(folder / UNET)
    if not has_network(folder):
        write_manifest(folder, run)


def load_model(
    folder: str | Path,
    net: torch.nn.Module | None = None,
    *,
    covariance: Covariance | None = None,
    checkpoint: str | int | None = None,
) -> Denoiser:
    """The denoiser in a folder that `save_model` or `nidiff train` wrote, with its clipping and scaling; or the model
    of that name that ships with nidiff, as `nidiff models` lists them.

    A diffusers model is rebuilt from its own configuration. For any other network pass one that is built alike as
    ``net``: its weights are loaded into it. ``covariance`` only says what you expect: another Σ than the model's own is
    refused. ``checkpoint`` is the step of a checkpoint of a run, or "latest"; the folder of one,
    RUN/checkpoints/000500, is a model too.
    """
    model, _ = open_stored(find_model(folder, checkpoint=checkpoint), net)
    check_same_covariance(model.process.covariance, covariance)
    return model


def open_stored(path: Path, net: torch.nn.Module | None = None) -> tuple[Denoiser, str]:
    """The denoiser in a run directory, a model's folder or a checkpoint, and the checksum of what its images depend on.

    A checkpoint has no κ and no mixture, which come when training has ended, unless its weights are those of the run's
    model.
    """
    if not is_checkpoint(path):
        place = whole_model(path)
        model, sha256 = _open_whole(place, net), model_sha256(place, checked=True)
        choices = read_choices(place / SAMPLING, sha256)
        return model.with_choices(choices) if choices else model, sha256
    place = model_folder(run_of(path))
    weights, sha256 = read_averaged(path, place)
    if has_network(place) and _has_weights(place, weights):
        return open_stored(place, net)
    model = _open_whole(place, net, weights)
    return model.with_mixture(None).with_kappa(None), sha256


def _open_whole(
    place: Path, net: torch.nn.Module | None, weights: Mapping[str, torch.Tensor] | None = None
) -> Denoiser:
    """The denoiser in a model's folder; what fails for want of a module of the user's names that module."""
    try:
        return open_with(place, load_network(place, net, weights))
    except InputError as error:
        missing = missing_modules(read_object(place / CONFIG))
        if not missing:
            raise
        remedy = f"import {' and '.join(missing)} first (nidiff --import {missing[0]}), or {error.remedy}"
        raise type(error)(error.argument, error.value, error.problem, remedy) from error


def _has_weights(place: Path, weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether the weights of a model are these."""
    stored = read_weights(place / (OTHER if (place / OTHER).is_dir() else UNET))
    return stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in stored)


def open_with(place: Path, network: Any) -> Denoiser:
    """The denoiser that scheduler/ in a model's folder describes, around a network."""
    file = place / CONFIG
    with blaming(file, "copy it again, or register the covariance, schedule or target of your own that it names"):
        model = configured(with_arrays(read_object(file), file), network)
        check_fits(network, model)
    return model


def whole_model(folder: Path) -> Path:
    """The model's folder in a run directory, or ``folder`` itself, if it has all that sampling needs, unchanged."""
    place = model_folder(folder)
    is_model, is_whole = (place / CONFIG).is_file(), has_network(place)
    if (place / MANIFEST).exists() or (is_model and is_whole):
        check_manifest(place)  # before anything else is read
    if is_model and is_whole:
        return place
    run = next((run for run in (place, place.parent) if (run / "experiment.json").is_file()), None)
    if not place.exists():
        problem, remedy = "does not exist", "give a run directory or a model folder"
    elif run is not None:
        train = f"nidiff train --resume --out {run}"
        saved = any(is_checkpoint(path) for path in (run / CHECKPOINTS).glob("*"))
        problem = "is of a run that has not ended"
        remedy = f"give `checkpoint` latest, or end it with {train} --finish" if saved else f"continue it with {train}"
    elif (place / STATE).is_file():
        problem = "is a checkpoint, and the rest of the model is in its run"
        remedy = "use nidiff.load_model, with its path in the run directory"
    elif is_model:
        problem, remedy = f"has no weights in {UNET}/ or {OTHER}/", "copy them again from where the model was saved"
    else:
        problem, remedy = f"is not a model or a run of nidiff, for it has no {CONFIG}", "give one"
    raise FileError("folder", folder, problem, remedy)


def accept_model(folder: Path) -> None:
    """Write a new manifest for a model that was changed on purpose, if it can be opened."""
    place = model_folder(find_model(folder))
    if entry_of(place) is not None:
        raise InputError("folder", folder, "is a model that ships, which stays as it was packed", AGAIN)
    other = (place / OTHER).is_dir()
    if other:
        read_weights(place / OTHER)  # the network that they belong to is not stored
    open_with(place, torch.nn.Identity() if other else load_network(place))
    run = run_identity(place)
    with writing("folder", place):
        write_manifest(place, recorded_run(place) if run is None else run)


def read_grid(folder: Path, shape: Sequence[int], scaling: Scaling | None) -> Grid:
    """The grid of the model in a folder, whose items are [C, *event] = ``shape``. One that says nothing has the usual
    axes; its data are 8-bit images if it has their scaling."""
    file = model_folder(folder) / DATA
    if not file.is_file():
        return Grid.usual(shape, "uint8" if scaling == PIXELS and len(shape) == 3 else "float32")
    with blaming(file):
        grid = Grid.from_json(read_object(file))
        grid.check(shape)
    return grid


def has_network(folder: Path) -> bool:
    """Whether a model's folder can be sampled from; that of a run holds Σ and the schedule from the beginning."""
    return any(any((folder / part).glob("*.safetensors")) for part in (UNET, OTHER))


def image_shape(net: Any, covariance: Covariance) -> tuple[int, ...]:
    """The shape [C, *axes] that a diffusers model makes; any other network is refused."""
    shape = known_shape(net, covariance)
    if shape is None:
        problem = f"is a {type(net).__name__}, which does not say what shape it makes"
        raise InputError("net", None, problem, "use nidiff.sample and nidiff.load_model with a network of your own")
    return shape


def known_shape(net: Any, covariance: Covariance) -> tuple[int, ...] | None:
    """The same, or None where only the network itself knows; a Σ over another shape is refused."""
    config = getattr(net, "config", None)
    if not isinstance(config, Mapping) or config.get("in_channels") is None or config.get("sample_size") is None:
        return None
    size, event = config["sample_size"], covariance.event_shape
    axes = max((parameter.ndim for parameter in net.parameters()), default=4) - 2  # of its convolutions
    if axes == 1:  # a U-Net of signals takes any length; its default, 65536, says nothing
        size = event[-1:]
    sizes = tuple(size) if isinstance(size, list | tuple) else (size,) * axes
    shape = (config.get("out_channels", config["in_channels"]), *sizes)
    if shape[-len(event) :] != event:
        problem = f"is over {event}, but the network makes images {shape!s:.80}"
        raise InputError("covariance", None, problem, "build Σ for that shape")
    return shape


def check_fits(net: Any, denoiser: Denoiser) -> None:
    """Refuse a Σ over another shape than the network's, where it says one, and a Gaussian of other data."""
    shape, gaussian = known_shape(net, denoiser.process.covariance), denoiser.gaussian
    if shape is None or gaussian is None:
        return
    taken, needed = net.config["in_channels"], shape[0] * (2 if denoiser.sees == "both" else 1)
    if (gaussian.shape, needed) != (shape, taken):
        problem = f"is of items {gaussian.shape}, and a network that sees {denoiser.sees} takes {needed} channels"
        raise InputError("gaussian", None, problem, f"this one takes {taken}, and makes {shape}")


def check_replaceable(folder: Path) -> None:
    """Only a model, or an empty folder, is replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (names and not (names <= OURS and (folder / CONFIG).is_file())):
        raise InputError("folder", folder, "is not a model, so it is not replaced by one", "choose a new folder")


def check_same_covariance(model: Covariance, other: Covariance | None) -> None:
    """Refuse to sample a model under a Σ that is not its own."""
    if other is not None and not same_covariance(model, other):
        raise InputError("covariance", other, "is not the model's", f"it was trained with {model!r} and needs that")


def same_covariance(a: Covariance, b: Covariance) -> bool:
    """Whether Σ, and Σ⁻¹ where there is one, do the same to a vector that has a part in every mode: the former shows
    the large modes, the latter the small ones."""
    if a.event_shape != b.event_shape or a.is_singular != b.is_singular:
        return False
    probe = torch.linspace(1, 2, a.size, dtype=torch.float64).square().sin().reshape(a.event_shape)
    if not torch.allclose(a.matmul(probe), b.matmul(probe), rtol=1e-9, atol=1e-9):
        return False
    if a.is_singular:
        return True
    mine, other = a.solve(probe), b.solve(probe)
    return bool((mine - other).abs().max() <= 1e-6 * mine.abs().max())
