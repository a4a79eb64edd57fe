"""A trained model as a folder that diffusers opens: ``unet/``, ``scheduler/`` with Σ, schedule and prediction, an index
of the two and a model card. `nidiff.interop` reads the same files; nothing of it is imported here."""

import json
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Schedule
from nidiff.errors import InputError, one_of
from nidiff.experiment import Experiment
from nidiff.report.card import model_card

ARRAYS = "covariance.safetensors"  # what the "covariance" of the scheduler's configuration refers to, if anything
CONFIG = "scheduler_config.json"
# diffusers' word for what a network predicts, and ours.
PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v_prediction": "v", "noise": "noise", "score": "score"}


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


def scheduler_config(covariance: Covariance, experiment: Experiment) -> dict[str, Any]:
    """The arguments of `nidiff.interop.NonIsotropicScheduler` that sample the model as `nidiff.sample` does, x̂0 clipped
    to the range of images."""
    words = {ours: theirs for theirs, ours in PREDICTIONS.items()}
    return {
        "_class_name": "NonIsotropicScheduler",
        "covariance": covariance.to_config(),
        "schedule": experiment.schedule,
        "prediction_type": words[one_of("target", experiment.target, words)],
        "algorithm": "ddpm",
        "timestep_spacing": "linspace",
        "clip_sample": True,
        "clip_sample_range": 1.0,
    }


def load_model(path: str | Path, covariance: Covariance | None = None, clip: float | None = None) -> Denoiser:
    """The denoiser in a run directory or a model folder. A ``covariance`` other than the model's own is refused."""
    from diffusers import UNet2DModel

    folder = Path(path) / "model" if (Path(path) / "model").is_dir() else Path(path)
    config = folder / "scheduler" / CONFIG
    if not config.is_file() and (Path(path) / "experiment.json").is_file():
        raise InputError(f"path={str(path)!r} is a run that has not ended: go on with it by nidiff train --resume.")
    if not config.is_file():
        raise InputError(f"path={str(path)!r} is not a run or a model of nidiff: it has no {config.name}.")
    values = json.loads(config.read_text())
    for key in ("covariance", "schedule", "prediction_type"):
        if key not in values:
            raise InputError(f"path={str(path)!r} has no {key!r} in its {config.name}: train it with this version.")
    arrays = config.with_name(ARRAYS)
    own = Covariance.from_config(values["covariance"], load_file(arrays) if arrays.exists() else {})
    check_same_covariance(own, covariance)
    unet = UNet2DModel.from_pretrained(folder / "unet", use_safetensors=True).eval()
    target = PREDICTIONS[one_of("prediction_type", values["prediction_type"], PREDICTIONS)]
    return Denoiser(unet, Process(build_schedule(values["schedule"]), own), target=target, clip=clip)


def build_schedule(text: str) -> Schedule:
    """The schedule written as NAME:key=value,…"""
    return Experiment(schedule=text).build_schedule()


def save_arrays(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the arrays of a Σ, where it has any, beside the configuration that names them."""
    if tensors:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ARRAYS)


def check_same_covariance(own: Covariance, other: Covariance | None) -> None:
    """Refuse to sample a model under a Σ that is not its own."""
    if other is not None and not same_covariance(own, other):
        raise InputError(f"covariance={other!r} is not the model's: it was trained with {own!r} and needs that.")


def same_covariance(a: Covariance, b: Covariance) -> bool:
    """Whether two covariances do the same to a vector that has a part in every mode."""
    if a.event_shape != b.event_shape:
        return False
    probe = torch.linspace(1, 2, a.size, dtype=torch.float64).square().sin().reshape(a.event_shape)
    return torch.allclose(a.matmul(probe), b.matmul(probe), rtol=1e-9, atol=1e-9)
