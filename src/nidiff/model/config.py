"""scheduler_config.json, the one place where a model keeps Σ, schedule, prediction, clipping and scaling of data."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nidiff.covariance.config import ARRAYS, Config, as_covariance, describe, names_arrays, read_arrays
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.diffusion.schedule import SCHEDULES
from nidiff.diffusion.target import TARGETS, Target
from nidiff.errors import FileError, InputError, one_of, shown
from nidiff.files import REPLACED, as_path
from nidiff.recipe import fits

# Our names, and diffusers' words for the same. A target that diffusers does not have keeps its own name.
WORDS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
ALGORITHMS = {"ddpm": "ancestral", "ddim": "ddim", "dpmsolver++": "dpmpp_2m"}
VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}
SPACINGS = ("leading", "linspace", "trailing")

# A scheduler of diffusers ignores the fields it does not know and would sample with white noise. This one it knows, and
# refuses: "nidiff (needs …) is not implemented for DDIMScheduler".
BETA_SCHEDULE = "nidiff (needs nidiff.interop.NonIsotropicScheduler)"

# The fields that may be missing in a file. Version 0.1 wrote no scaling: it knew only 8-bit images.
DEFAULTS: dict[str, Any] = {
    "algorithm": "dpmsolver++",
    "variance_type": "fixed_small",
    "timestep_spacing": "trailing",
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "scaling": PIXELS,
    "num_train_timesteps": None,
    "beta_schedule": BETA_SCHEDULE,
}
FIELDS = ("covariance", "schedule", "prediction_type", *DEFAULTS)


def model_folder(path: Path) -> Path:
    """The model's folder in a run directory, or ``path`` itself.

    A kill while the model is replaced can leave the old one under another name, where it is found.
    """
    places = [path / "model", path / f"{REPLACED}model", path]
    places += [path.with_name(f"{REPLACED}{path.name}")] if path.name else []
    return next((place for place in places if os.path.isdir(place)), path)  # false for a name that is too long, too


def predictions() -> dict[str, str]:
    """Every word that ``prediction_type`` may be, and the name in `TARGETS` that it stands for."""
    return {WORDS.get(name, name): name for name in TARGETS}


def scheduler_config(denoiser: Denoiser) -> dict[str, Any]:
    """The arguments of `nidiff.interop.NonIsotropicScheduler` that sample this denoiser as `nidiff.sample` does."""
    target, schedule = denoiser.target_name, denoiser.process.schedule.to_config()
    if target is None:
        raise InputError(
            "target is not registered, so what is saved could not be loaded: give it a name by "
            'nidiff.diffusion.target.TARGETS["my_target"] = ….'
        )
    if (name := schedule["schedule"]) not in SCHEDULES:
        raise InputError(
            f"schedule {name!r} is not registered, so what is saved could not be loaded: add it by "
            f'nidiff.diffusion.schedule.SCHEDULES["{name}"] = {name}.'
        )
    config = {
        "_class_name": "NonIsotropicScheduler",
        "covariance": describe(denoiser.process.covariance),
        "schedule": schedule,
        "prediction_type": WORDS.get(target, target),
        "algorithm": "dpmsolver++",
        "timestep_spacing": "trailing",
        "clip_sample": denoiser.clip is not None,
        "clip_sample_range": 1.0 if denoiser.clip is None else denoiser.clip,
        "scaling": None if denoiser.scaling is None else dataclasses.asdict(denoiser.scaling),
        "num_train_timesteps": len(denoiser.process.schedule),
        "beta_schedule": BETA_SCHEDULE,
    }
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"denoiser cannot be saved as JSON ({error}): use plain finite numbers and words.") from error
    return config


def configured(config: Mapping[str, Any], net: Callable[..., Any]) -> Denoiser:
    """The denoiser around ``net`` that the configuration describes: the inverse of `scheduler_config`."""
    check_fields(config)
    config = {**dict.fromkeys(FIELDS), **DEFAULTS, **config}
    for field, known in (("algorithm", ALGORITHMS), ("variance_type", VARIANCES), ("timestep_spacing", SPACINGS)):
        one_of(field, config[field], known)
    covariance, target, scaling = config["covariance"], config["prediction_type"], config["scaling"]
    if not isinstance(target, Target):
        target = predictions()[one_of("prediction_type", target, predictions())]
    covariance = as_path("covariance", covariance) if isinstance(covariance, str | Path) else covariance
    process, count = Process(config["schedule"], as_covariance(covariance)), config["num_train_timesteps"]
    schedule = process.schedule
    if count not in (None, len(schedule)):
        found = f"num_train_timesteps={shown(count)}"
        raise InputError(f"{found} differs from {schedule!r}: write num_levels={shown(count)} there.")
    clip, limit = config["clip_sample"], config["clip_sample_range"]
    if not isinstance(clip, bool) or (clip and not (fits(limit, float) and limit > 0)):
        raise InputError(
            f"clip_sample={shown(clip)} must be True or False, and clip_sample_range={shown(limit)} positive."
        )
    if isinstance(scaling, Mapping) and set(scaling) == {"scale", "shift"}:
        scaling = Scaling(**scaling)
    if not isinstance(scaling, Scaling | None):
        raise InputError(f"scaling={shown(scaling)} must be a nidiff.Scaling, or its scale and shift.")
    return Denoiser(net, process, target, limit if clip else None, scaling)


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse an unknown field; those that begin with _ are diffusers' own."""
    for field in config:
        if not field.startswith("_") and field not in FIELDS:
            raise InputError(f"the configuration has the unknown field {shown(field)}: known are {', '.join(FIELDS)}.")
    if (betas := config.get("beta_schedule", BETA_SCHEDULE)) != BETA_SCHEDULE:
        raise InputError(
            f"beta_schedule={shown(betas)} is not ours: pass schedule=, such as 'ddpm_linear:num_levels=1000'."
        )


def with_arrays(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The configuration in a file, with the arrays of Σ that lie beside it at hand."""
    covariance = config.get("covariance")
    if not isinstance(covariance, Mapping):
        found = f"covariance={shown(covariance)}"
        raise FileError(f"{str(file)!r} has {found}, not what to_config() returned: save it again.")
    arrays = read_arrays(file.with_name(ARRAYS)) if names_arrays(covariance) else {}
    return {**config, "covariance": Config(covariance, arrays)}
