"""A trained model as a folder: ``unet/`` as diffusers saves it, ``scheduler/`` with Σ, schedule and target."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.errors import InputError
from nidiff.experiment import Experiment

ARRAYS = "covariance.safetensors"  # what the "covariance" of the scheduler's configuration refers to, if anything


def save_model(folder: Path, unet: Any, covariance: Covariance, experiment: Experiment) -> None:
    """Write ``unet`` and what it needs to be sampled to ``folder``; the old one stays until the new one is whole."""
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    unet.save_pretrained(aside / "unet", safe_serialization=True)
    (aside / "scheduler").mkdir()
    if tensors := covariance.tensors():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, aside / "scheduler" / ARRAYS)
    scheduler = {
        "_class_name": "NonIsotropicScheduler",
        "covariance": covariance.to_config(),
        "schedule": experiment.schedule,
        "prediction": experiment.target,
    }
    (aside / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler, indent=2) + "\n")
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(aside, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_model(path: str | Path, covariance: Covariance | None = None, clip: float | None = None) -> Denoiser:
    """The denoiser in a run directory or a model folder. A ``covariance`` other than the model's own is refused."""
    from diffusers import UNet2DModel

    folder = Path(path) / "model" if (Path(path) / "model").is_dir() else Path(path)
    config = folder / "scheduler" / "scheduler_config.json"
    if not config.is_file() and (Path(path) / "experiment.json").is_file():
        raise InputError(f"path={str(path)!r} is a run that has not ended: go on with it by nidiff train --resume.")
    if not config.is_file():
        raise InputError(f"path={str(path)!r} is not a run or a model of nidiff: it has no {config.name}.")
    values = json.loads(config.read_text())
    arrays = folder / "scheduler" / ARRAYS
    own = Covariance.from_config(values["covariance"], load_file(arrays) if arrays.exists() else {})
    if covariance is not None and not same_covariance(own, covariance):
        raise InputError(f"covariance={covariance!r} is not the model's: it was trained with {own!r} and needs that.")
    schedule = Experiment(schedule=values["schedule"]).build_schedule()
    unet = UNet2DModel.from_pretrained(folder / "unet", use_safetensors=True).eval()
    return Denoiser(unet, Process(schedule, own), target=values["prediction"], clip=clip)


def same_covariance(a: Covariance, b: Covariance) -> bool:
    """Whether two covariances do the same to a vector that has a part in every mode."""
    if a.event_shape != b.event_shape:
        return False
    probe = torch.linspace(1, 2, a.size, dtype=torch.float64).square().sin().reshape(a.event_shape)
    return torch.allclose(a.matmul(probe), b.matmul(probe), rtol=1e-9, atol=1e-9)
