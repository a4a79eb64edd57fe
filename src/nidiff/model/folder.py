"""A model as a folder: the network, ``scheduler/`` with all that sampling needs to know, and a model card.

docs/diffusers.md shows its files, which `nidiff.interop` reads too. Nothing is unpickled.
"""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nidiff.covariance.config import SCHEDULER, save_arrays
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.errors import FileError, InputError
from nidiff.files import replace_text, replacing_folder, writing
from nidiff.model.card import model_card
from nidiff.model.config import configured, model_folder, read_json, scheduler_config, with_arrays
from nidiff.model.network import OWN, UNET, load_network, save_network

CONFIG = f"scheduler/{SCHEDULER}"
OURS = {"model_index.json", "README.md", "scheduler", UNET, OWN}


def save_model(
    denoiser: Denoiser,
    folder: str | Path,
    about: Mapping[str, str] | None = None,
    *,
    run: Mapping[str, str] | None = None,
) -> None:
    """Write the denoiser to ``folder``: its process, target, clipping, scaling and network.

    The network may be any `torch.nn.Module`. ``about`` is what else the model card shall say, such as
    ``{"data": "CIFAR-10"}``. A model that is there already stays until the new one is whole.
    """
    folder = Path(folder).resolve()  # of a link, what it leads to is replaced, not the link
    if not isinstance(denoiser, Denoiser):
        raise InputError(f"denoiser is a {type(denoiser).__name__}: wrap the network as nidiff.Denoiser(net, process).")
    net = getattr(denoiser.net, "_orig_mod", denoiser.net)  # what torch.compile wrapped
    if not isinstance(net, torch.nn.Module):
        raise InputError("denoiser.net is a function, which has no weights to save: make it a torch.nn.Module.")
    scheduler = scheduler_config(denoiser)
    known_shape(net, denoiser.process.covariance)
    check_replaceable(folder)
    with writing("folder", folder), replacing_folder(folder) as aside:
        save_process(denoiser, aside)
        save_network(net, aside)
        if type(net).__module__.startswith("diffusers."):
            index = {
                "_class_name": "NonIsotropicPipeline",
                "_diffusers_version": version("diffusers"),
                "scheduler": ["nidiff.interop.scheduler", "NonIsotropicScheduler"],
                "unet": ["diffusers", type(net).__name__],
            }
            replace_text(aside / "model_index.json", json.dumps(index, indent=2) + "\n")
        card = model_card(denoiser.process.covariance, scheduler, about, pipeline=(aside / UNET).is_dir())
        replace_text(aside / "README.md", card)


def save_process(denoiser: Denoiser, folder: Path) -> None:
    """Write ``scheduler/`` of a model's folder only: a run does so when it begins, and the network comes at its end."""
    config = scheduler_config(denoiser)
    save_arrays(config["covariance"].tensors, folder / "scheduler")
    replace_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def load_model(
    folder: str | Path, net: torch.nn.Module | None = None, *, covariance: Covariance | None = None
) -> Denoiser:
    """The denoiser in a folder that `save_model` or `nidiff train` wrote, with its clipping and scaling.

    A diffusers model is rebuilt from its own configuration. For any other network pass one that is built alike as
    ``net``: its weights are loaded into it. ``covariance`` only says what you expect: another Σ than the model's own is
    refused. Folders of version 0.1 open too; their data are 8-bit images.
    """
    place = whole_model(Path(folder))
    file = place / CONFIG
    network = load_network(place, net)
    config = with_arrays(read_json(file), file)
    try:
        model = configured(config, network)
        known_shape(network, model.process.covariance)
    except InputError as error:
        own = "(a covariance, schedule or target of your own must be registered before the model is loaded)"
        raise FileError(f"{str(file)!r} cannot be used: {error} {own}") from error
    check_same_covariance(model.process.covariance, covariance)
    return model


def whole_model(folder: Path) -> Path:
    """The model's folder in a run directory, or ``folder`` itself, if it has all that sampling needs."""
    place = model_folder(folder)
    run = next((run for run in (place, place.parent) if (run / "experiment.json").is_file()), None)
    if not folder.exists():
        raise InputError(f"folder={str(folder)!r} does not exist: give a run directory or a model folder.")
    if not (place / CONFIG).is_file() and run is None:
        raise InputError(f"folder={str(folder)!r} is not a model or a run of nidiff: it has no {CONFIG}.")
    if not (place / CONFIG).is_file() or not has_network(place):
        unfinished = f"is of a run that has not ended: continue it with nidiff train --resume --out {run}"
        missing = f"has no weights in {UNET}/ or {OWN}/: copy them again from where the model was saved"
        raise FileError(f"folder={str(folder)!r} {missing if run is None else unfinished}.")
    return place


def has_network(folder: Path) -> bool:
    """Whether a model's folder can be sampled from; that of a run holds Σ and the schedule from the beginning."""
    return any(any((folder / part).glob("*.safetensors")) for part in (UNET, OWN))


def image_shape(net: Any, covariance: Covariance) -> tuple[int, ...]:
    """The shape [C, *axes] that a diffusers model makes; any other network is refused."""
    shape = known_shape(net, covariance)
    if shape is None:
        raise InputError(
            f"{type(net).__name__} is not a diffusers model that says what shape it makes: use nidiff.sample, "
            "nidiff.save_model and nidiff.load_model for a network of your own."
        )
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
    shape = (config["in_channels"], *((size,) * axes if isinstance(size, int) else size))
    if shape[-len(event) :] != event:
        raise InputError(f"covariance is over {event}, but the network makes images {shape}: build Σ for that shape.")
    return shape


def check_replaceable(folder: Path) -> None:
    """Only a model, or an empty folder, is replaced."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or (names and not (names <= OURS and (folder / CONFIG).is_file())):
        raise InputError(f"folder={str(folder)!r} is not a model, and is not replaced by one: choose a new folder.")


def check_same_covariance(own: Covariance, other: Covariance | None) -> None:
    """Refuse to sample a model under a Σ that is not its own."""
    if other is not None and not same_covariance(own, other):
        raise InputError(f"covariance={other!r} is not the model's: it was trained with {own!r} and needs that.")


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
