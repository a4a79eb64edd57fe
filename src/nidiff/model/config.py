"""scheduler_config.json, the one place where a model keeps Σ, schedule, prediction, clipping and scaling of data, and
the data's Gaussian. What is large is in arrays beside it."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import ARRAYS, Config, as_covariance, describe, names_arrays, read_arrays
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.family import schedule_facts
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import PIXELS, Scaling
from nidiff.diffusion.schedule import SCHEDULES, Schedule, as_schedule
from nidiff.diffusion.target import TARGETS, Target
from nidiff.errors import FileError, InputError, one_of, shown
from nidiff.files import REPLACED, as_path
from nidiff.recipe import fits

# Our names, and diffusers' words for the same. A target that diffusers does not have keeps its own name.
WORDS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
ALGORITHMS = {
    "ddpm": "ancestral",
    "ddim": "ddim",
    "dpmsolver++": "dpmpp_2m",
    "euler": "euler",
    "angle": "angle",
    "angle_2m": "angle_2m",
}
VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}
SPACINGS = ("leading", "linspace", "trailing")  # of diffusers; ours is "angle"

# A scheduler of diffusers ignores the fields it does not know and would sample with white noise. This one it knows, and
# refuses: "nidiff (needs …) is not implemented for DDIMScheduler".
BETA_SCHEDULE = "nidiff (needs nidiff.interop.NonIsotropicScheduler)"

# The fields that may be missing in a file. Version 0.1 wrote no scaling: it knew only 8-bit images.
DEFAULTS: dict[str, Any] = {
    "algorithm": "dpmsolver++",
    "variance_type": "fixed_small",
    "timestep_spacing": None,  # the algorithm's own
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "scaling": PIXELS,
    "gaussian": None,
    "sees": None,
    "kappa": None,
    "conditions": None,
    "num_train_timesteps": None,
    "beta_schedule": BETA_SCHEDULE,
}
# The files beside the configuration, by the field whose arrays they hold, and what to call these.
FILES = {
    "covariance": (ARRAYS, "Σ"),
    "schedule": ("schedule.safetensors", "the schedule"),
    "gaussian": ("gaussian.safetensors", "the data's Gaussian"),
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
    target, schedule = denoiser.target_name, _schedule_config(denoiser.process.schedule)
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
        "scaling": None if denoiser.scaling is None else _scaling_config(denoiser.scaling),
        "num_train_timesteps": len(denoiser.process.schedule),
        "beta_schedule": BETA_SCHEDULE,
    }
    if denoiser.gaussian is not None:  # else these are not there, as in folders of earlier versions
        config |= {"gaussian": _gaussian_config(denoiser.gaussian, denoiser.kappa), "sees": denoiser.sees}
    if denoiser.conditions:
        config["conditions"] = {name: one._asdict() for name, one in denoiser.conditions.items()}
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"denoiser cannot be saved as JSON ({error}): use plain finite numbers and words.") from error
    return config


def configured(config: Mapping[str, Any], net: Callable[..., Any]) -> Denoiser:
    """The denoiser around ``net`` that the configuration describes: the inverse of `scheduler_config`."""
    check_fields(config)
    config = {**dict.fromkeys(FIELDS), **DEFAULTS, **config}
    one_of("algorithm", config["algorithm"], ALGORITHMS)
    one_of("variance_type", config["variance_type"], VARIANCES)
    if config["timestep_spacing"] is not None:
        one_of("timestep_spacing", config["timestep_spacing"], (*SPACINGS, "angle"))
    covariance, target, scaling = config["covariance"], config["prediction_type"], config["scaling"]
    if not isinstance(target, Target):
        target = predictions()[one_of("prediction_type", target, predictions())]
    covariance = as_path("covariance", covariance) if isinstance(covariance, str | Path) else covariance
    gaussian, kappa = _stored_gaussian(config["gaussian"])
    process, count = _stored_process(config["schedule"], covariance, gaussian), config["num_train_timesteps"]
    schedule = process.schedule
    if count not in (None, len(schedule)):
        found = f"num_train_timesteps={shown(count)}"
        raise InputError(f"{found} differs from {schedule!r}: write num_levels={shown(count)} there.")
    clip, limit = config["clip_sample"], config["clip_sample_range"]
    if not isinstance(clip, bool) or (clip and not (fits(limit, float) and limit > 0)):
        raise InputError(
            f"clip_sample={shown(clip)} must be True or False, and clip_sample_range={shown(limit)} positive."
        )
    if isinstance(scaling, Mapping) and {"scale", "shift"} <= set(scaling) <= {"scale", "shift", "log"}:
        scaling = Scaling(**scaling)
    if not isinstance(scaling, Scaling | None):
        raise InputError(f"scaling={shown(scaling)} must be a nidiff.Scaling, or its scale and shift.")
    kappa = kappa if config["kappa"] is None else config["kappa"]
    limit = limit if clip else None
    known = {"gaussian": gaussian, "sees": config["sees"], "kappa": kappa, "conditions": config["conditions"]}
    return Denoiser(net, process, target, limit, scaling, **known)


def _scaling_config(scaling: Scaling) -> dict[str, Any]:
    """As earlier versions wrote it, if no channel has a logarithm."""
    config = dataclasses.asdict(scaling)
    if scaling.is_linear:
        del config["log"]
    return config


def _schedule_config(schedule: Schedule) -> Config:
    """The configuration of a schedule. Columns are in it, and tables of modes are arrays."""
    config, tensors = schedule.to_config(), {}
    for key, value in config.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            tensors[key] = torch.tensor(value, dtype=torch.float64, device="cpu")
            config[key] = {"tensor": key}
    return Config(config, tensors)


def stored_schedule(schedule: Any) -> Schedule:
    """The inverse of what `scheduler_config` writes; else what `as_schedule` takes."""
    if isinstance(schedule, Mapping):
        tensors = getattr(schedule, "tensors", {})
        schedule = {key: _array(value, tensors) for key, value in schedule.items()}
    return as_schedule(schedule)


def _stored_process(schedule: Any, covariance: Any, gaussian: GaussianModel | None) -> Process:
    """A text may leave out what Σ and the data's Gaussian say."""
    if isinstance(schedule, str):
        covariance = as_covariance(covariance)
        return Process(as_schedule(schedule, schedule_facts(covariance, gaussian)), covariance)
    return Process(stored_schedule(schedule), as_covariance(covariance))


def _array(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The array that a value names, or the value itself."""
    if not (isinstance(value, Mapping) and "tensor" in value):
        return value
    name = value["tensor"]
    if not isinstance(name, str) or name not in tensors:
        raise InputError(f"the configuration names the array {shown(name)}, which is not there: save it again.")
    return tensors[name]


def _gaussian_config(gaussian: GaussianModel, kappa: Kappa | None) -> Config:
    """The data's Gaussian, with κ in it where it was measured."""
    config = gaussian.to_config()
    if kappa is None:
        return config
    measured = {"rows": kappa.rows.tolist(), **{name: {"tensor": f"kappa.{name}"} for name in ("values", "trust")}}
    # Copies: one tensor in both places could not be written.
    arrays = {"kappa.values": kappa.values.clone(), "kappa.trust": kappa.trust.clone()}
    return Config({**config, "kappa": measured}, {**config.tensors, **arrays})


def without_kappa(gaussian: Config) -> Config:
    """The configuration of the data's Gaussian alone, which is the same before and after training."""
    config, tensors = (
        {key: value for key, value in each.items() if key.partition(".")[0] != "kappa"}
        for each in (gaussian, gaussian.tensors)
    )
    return Config(config, tensors)


def _stored_gaussian(gaussian: Any) -> tuple[GaussianModel | None, Kappa | None]:
    """The inverse of `_gaussian_config`; a `GaussianModel` stays one."""
    if gaussian is None or isinstance(gaussian, GaussianModel):
        return gaussian, None
    if not isinstance(gaussian, Mapping):
        raise InputError(
            f"gaussian={shown(gaussian)} must be a nidiff.GaussianModel, or what its to_config() returned."
        )
    model, measured = GaussianModel.from_config(gaussian), gaussian.get("kappa")
    if measured is None:
        return model, None
    rows = measured.get("rows") if isinstance(measured, Mapping) else None
    if not (isinstance(rows, list | tuple) and all(fits(row, float) for row in rows)):
        raise InputError("gaussian has a kappa without rows: save it again.")
    tables = [_array(measured.get(name), getattr(gaussian, "tensors", {})) for name in ("values", "trust")]
    return model, Kappa(torch.tensor(rows, dtype=torch.float64, device="cpu"), *tables)


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
    """The configuration in a file, with the arrays that lie beside it at hand."""
    result = dict(config)
    for field, (name, owner) in FILES.items():
        value = config.get(field)
        if isinstance(value, Mapping):
            needed = field == "gaussian" or names_arrays(value)  # a Gaussian has always a mean
            result[field] = Config(value, read_arrays(file.with_name(name), owner) if needed else {})
        elif field == "covariance" or not (value is None or (field == "schedule" and isinstance(value, str))):
            found = f"{field}={shown(value)}"
            raise FileError(f"{str(file)!r} has {found}, not what to_config() returned: save it again.")
    return result


def arrays(config: Mapping[str, Any]) -> dict[str, Mapping[str, Tensor]]:
    """The arrays of what `scheduler_config` returned, by the names of their files."""
    return {name: getattr(config.get(field), "tensors", {}) for field, (name, _) in FILES.items()}
