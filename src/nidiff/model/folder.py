"""A trained model as a folder that diffusers opens: ``unet/``, ``scheduler/`` with Σ, schedule and prediction, an index
of the two and a model card. `nidiff.interop` reads the same files; nothing of it is imported here."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nidiff.covariance.config import ARRAYS, FileError, names_arrays, read_arrays, save_arrays
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.errors import InputError
from nidiff.model.card import model_card
from nidiff.model.config import PREDICTIONS, check_config, has_network, model_folder, schedule_of, scheduler_config
from nidiff.training.experiment import Experiment

CONFIG = "scheduler_config.json"


def save_model(folder: Path, unet: Any, covariance: Covariance, experiment: Experiment) -> None:
    """Write ``unet`` and what it needs to be sampled to ``folder``; the old one stays until the new one is whole."""
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    unet.save_pretrained(aside / "unet", safe_serialization=True)
    (aside / "scheduler").mkdir()
    save_arrays(covariance.tensors(), aside / "scheduler")
    diffusers = {"_diffusers_version": version("diffusers")}
    index = {
        "_class_name": "NonIsotropicPipeline",
        **diffusers,
        "scheduler": ["nidiff.interop.scheduler", "NonIsotropicScheduler"],
        "unet": ["diffusers", type(unet).__name__],
    }
    scheduler = scheduler_config(covariance, experiment)
    for name, values in (("model_index.json", index), (f"scheduler/{CONFIG}", {**scheduler, **diffusers})):
        (aside / name).write_text(json.dumps(values, indent=2) + "\n")
    (aside / "README.md").write_text(model_card(covariance, scheduler, experiment), encoding="utf-8")
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_model(path: str | Path, covariance: Covariance | None = None, clip: float | None = None) -> Denoiser:
    """The denoiser in a run directory or a model folder. A ``covariance`` other than the model's own is refused."""
    folder = model_folder(Path(path))
    file = folder / "scheduler" / CONFIG
    if not has_network(folder) and any((place / "experiment.json").is_file() for place in (folder, folder.parent)):
        raise InputError(f"path={str(path)!r} is a run that has not ended: continue it with nidiff train --resume.")
    if not file.is_file():
        raise InputError(f"path={str(path)!r} is not a run or a model of nidiff: it has no {file.name}.")
    config = read_json(file)
    for key in ("covariance", "schedule", "prediction_type"):
        if key not in config:
            raise InputError(f"path={str(path)!r} has no {key!r} in its {file.name}: train it with this version.")
    arrays = read_arrays(file.with_name(ARRAYS)) if names_arrays(config["covariance"]) else {}
    with _naming(file):
        check_config(config)
        process = Process(schedule_of(config), Covariance.from_config(config["covariance"], arrays))
    check_same_covariance(process.covariance, covariance)
    unet = _read_unet(folder / "unet")
    with _naming(file):
        image_shape(unet, process.covariance)
    return Denoiser(unet, process, target=PREDICTIONS[config["prediction_type"]], clip=clip)


def _read_unet(folder: Path) -> Any:
    from diffusers import UNet2DModel

    again = "copy it again from where the model was saved."
    if not folder.is_dir():
        raise FileError(f"{str(folder)!r} is missing, which holds the network: {again}")
    local = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    try:
        unet, info = UNet2DModel.from_pretrained(folder, **local)
    except (OSError, ValueError, RuntimeError) as error:
        raise FileError(f"{str(folder)!r} is damaged ({_first_line(error)}): {again}") from error
    if info["missing_keys"]:
        raise FileError(f"{str(folder)!r} has no weights for {info['missing_keys'][0]!r}: {again}")
    return unet.eval()


def image_shape(unet: Any, covariance: Covariance) -> tuple[int, ...]:
    """The shape (channels, height, width) that the U-Net makes; a Σ that is over another is refused."""
    size = unet.config["sample_size"]
    if size is None:
        raise InputError("unet has no sample_size in its configuration: build it with sample_size=(height, width).")
    shape = (unet.config["in_channels"], *((size, size) if isinstance(size, int) else size))
    event = covariance.event_shape
    if shape[-len(event) :] != event:
        raise InputError(f"covariance is over {event}, but the U-Net makes images {shape}: build Σ for that shape.")
    return shape


# The files of a scheduler ----------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(f"{str(file)!r} cannot be read ({error}): copy it again from where it was saved.") from error
    if not isinstance(values, dict):
        raise FileError(f"{str(file)!r} does not hold a configuration: copy it again from where it was saved.")
    return values


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Put the name of the file before what is wrong with its contents."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{str(file)!r} cannot be used: {error}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Only under its own Σ --------------------------------------------------------------------------------------------


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
