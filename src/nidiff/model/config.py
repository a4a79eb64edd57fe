"""scheduler_config.json, the one place where a model keeps Σ, schedule, prediction, clipping and scaling of the data.

`load_model` and the scheduler of `nidiff.interop` both read it here.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from nidiff.covariance.config import as_covariance, describe
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.diffusion.schedule import SCHEDULES, Schedule, as_schedule
from nidiff.diffusion.target import TARGETS, Target
from nidiff.errors import InputError, one_of

# Our names, and diffusers' words for the same. A target that diffusers does not have keeps its own name.
WORDS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
ALGORITHMS = {"ddpm": "ancestral", "ddim": "ddim", "dpmsolver++": "dpmpp_2m"}
VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}
SPACINGS = ("leading", "linspace", "trailing")

# A scheduler of diffusers ignores the fields it does not know and would sample with white noise. This one it knows, and
# refuses: "nidiff (needs …) is not implemented for DDIMScheduler".
BETA_SCHEDULE = "nidiff (needs nidiff.interop.NonIsotropicScheduler)"

CHOICES: dict[str, Collection[str]] = {
    "algorithm": ALGORITHMS,
    "variance_type": VARIANCES,
    "timestep_spacing": SPACINGS,
}
FIELDS = (
    "covariance",
    "schedule",
    "prediction_type",
    *CHOICES,
    "clip_sample",
    "clip_sample_range",
    "scaling",
    "num_train_timesteps",
    "beta_schedule",
)


def model_folder(path: Path) -> Path:
    """The model's folder in a run directory, or ``path`` itself."""
    return path / "model" if (path / "model").is_dir() else path


def predictions() -> dict[str, str]:
    """Every word that ``prediction_type`` may be, and the name in `TARGETS` that it stands for."""
    return {WORDS.get(name, name): name for name in TARGETS}


def prediction_type(target: Target) -> str:
    """The word for a target."""
    name = next((name for name, known in TARGETS.items() if known == target), None)
    if name is None:
        raise InputError(
            "target is not registered, so what is saved could not be loaded: give it a name by "
            'nidiff.diffusion.target.TARGETS["my_target"] = ….'
        )
    return WORDS.get(name, name)


def scheduler_config(denoiser: Denoiser) -> dict[str, Any]:
    """The arguments of `nidiff.interop.NonIsotropicScheduler` that sample this denoiser as `nidiff.sample` does."""
    schedule = denoiser.process.schedule.to_config()
    if schedule["schedule"] not in SCHEDULES:
        name = schedule["schedule"]
        raise InputError(
            f"schedule {name!r} is not registered, so what is saved could not be loaded: add it by "
            f'nidiff.diffusion.schedule.SCHEDULES["{name}"] = {name}.'
        )
    config = {
        "_class_name": "NonIsotropicScheduler",
        "covariance": describe(denoiser.process.covariance),
        "schedule": schedule,
        "prediction_type": prediction_type(denoiser.target),
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
        raise InputError(
            f"denoiser cannot be written as JSON ({error}): use plain finite numbers and words."
        ) from error
    return config


def configured(config: Mapping[str, Any], net: Callable[..., Any]) -> Denoiser:
    """The denoiser around ``net`` that the configuration describes: the inverse of `scheduler_config`."""
    check_config(config)
    word, clip = config.get("prediction_type", "epsilon"), config.get("clip_sample_range", 1.0)
    target = (
        word if isinstance(word, Target) else TARGETS[predictions()[one_of("prediction_type", word, predictions())]]
    )
    process = Process(_schedule(config), as_covariance(config["covariance"]))
    return Denoiser(net, process, target, clip if config.get("clip_sample", True) else None, _scaling(config))


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse an unknown field, and a value that cannot be used."""
    for field in config:
        if not field.startswith("_") and field not in FIELDS:
            raise InputError(f"the configuration has the unknown field {field!r}: known are {', '.join(FIELDS)}.")
    covariance = config.get("covariance")
    if covariance is None:
        raise InputError("the configuration has no covariance: pass covariance=, a covariance of nidiff.")
    if isinstance(covariance, str) and not Path(covariance).is_dir():
        raise InputError(
            f"covariance={covariance!r} is not a folder that holds one: pass a covariance, such as "
            "nidiff.gaussian_free_field((32, 32)), or what its to_config() returned."
        )
    for field, known in CHOICES.items():
        if field in config:
            one_of(field, config[field], known)
    clip, limit = config.get("clip_sample", True), config.get("clip_sample_range", 1.0)
    if not isinstance(clip, bool):
        raise InputError(f"clip_sample={clip!r} must be True or False.")
    if clip and not is_positive(limit):
        raise InputError(f"clip_sample_range={limit!r} must be a positive number, or clip_sample=False.")
    if config.get("beta_schedule", BETA_SCHEDULE) != BETA_SCHEDULE:
        raise InputError(
            f"beta_schedule={config['beta_schedule']!r} is not ours: pass schedule=, such as "
            "'ddpm_linear:num_levels=1000,beta_max=0.02'."
        )


def _schedule(config: Mapping[str, Any]) -> Schedule:
    schedule, count = as_schedule(config["schedule"]), config.get("num_train_timesteps")
    if count not in (None, len(schedule)):
        raise InputError(
            f"num_train_timesteps={count} is not the {len(schedule)} levels of schedule={schedule!r}: "
            f"write it there, as num_levels={count}."
        )
    return schedule


def _scaling(config: Mapping[str, Any]) -> Scaling | None:
    scaling = config.get("scaling", PIXELS)  # version 0.1 wrote none: it knew only 8-bit images
    if scaling is None or isinstance(scaling, Scaling):
        return scaling
    if not isinstance(scaling, Mapping) or set(scaling) != {"scale", "shift"}:
        raise InputError(f"scaling={scaling!r} must be a nidiff.Scaling, or its scale and shift.")
    return Scaling(**scaling)


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
