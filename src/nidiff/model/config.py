"""scheduler_config.json: what sampling needs to know beside the network. Its arrays lie beside it."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.config import ARRAYS, Config, as_covariance, describe, names_arrays, read_arrays
from nidiff.covariance.covariance import Covariance
from nidiff.covariance.fields import COVARIANCES
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.mixture import MixtureModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import SCHEDULES, as_schedule, schedule_facts
from nidiff.diffusion.target import TARGETS, Target
from nidiff.errors import FileError, InputError, one_of, shown
from nidiff.files import as_path, replaced_folders
from nidiff.model.manifest import OPENED_BY_0_2
from nidiff.plugins import modules_of

# Our names, and diffusers' words for the same. A target that diffusers does not have keeps its own name.
WORDS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
ALGORITHMS = {
    "ddpm": "ancestral",
    "ddim": "ddim",
    "dpmsolver++": "dpmpp_2m",
    "euler": "euler",
    "angle": "angle",
    "angle_2m": "angle_2m",
    "gaussian_2m": "gaussian_2m",
    "ipndm": "ipndm",
}
VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}
SPACINGS = ("leading", "linspace", "trailing")  # of diffusers; ours is "angle"

# A scheduler of diffusers ignores the fields it does not know and would sample with white noise. This one it knows, and
# refuses: "nidiff (needs …) is not implemented for DDIMScheduler".
BETA_SCHEDULE = "nidiff (needs nidiff.interop.NonIsotropicScheduler)"

# The fields that may be missing, and their values.
DEFAULTS: dict[str, Any] = {
    "algorithm": "dpmsolver++",
    "variance_type": "fixed_small",
    "timestep_spacing": None,  # the algorithm's own
    "clip_sample": True,
    "clip_sample_range": 1.0,
    "scaling": None,
    "gaussian": None,
    "sees": None,
    "kappa": None,
    "mixture": None,
    "conditions": None,
    "num_train_timesteps": None,
    "steps_offset": 0,
    "flow": None,
    "beta_schedule": BETA_SCHEDULE,
}
# The files beside the configuration, by the field whose arrays they hold, and what to call these.
FILES = {
    "covariance": (ARRAYS, "Σ"),
    "schedule": ("schedule.safetensors", "the schedule"),
    "gaussian": ("gaussian.safetensors", "the data's Gaussian"),
    "mixture": ("mixture.safetensors", "the data's mixture"),
    "scaling": ("scaling.safetensors", "the scaling of the data"),
}
CLASS = "NonIsotropicScheduler"
MODULES = "_modules"  # of the user, with the Σ, schedule, target or network of a model
FIELDS = ("covariance", "schedule", "prediction_type", *DEFAULTS)


def model_folder(path: Path) -> Path:
    """The model's folder in a run directory, or ``path`` itself.

    A kill while the model is replaced can leave the old one under another name, where it is found.
    """
    for place in (path / "model", path):
        for known in (place, *([] if os.path.isdir(place) else replaced_folders(place))):
            if os.path.isdir(known):  # false for a name that is too long, too
                return known
    return path


def predictions() -> dict[str, str]:
    """Every word that ``prediction_type`` may be, and the name in `TARGETS` that it stands for."""
    return {WORDS.get(name, name): name for name in TARGETS}


def scheduler_config(denoiser: Denoiser) -> dict[str, Any]:
    """The arguments of `nidiff.interop.NonIsotropicScheduler` that sample this denoiser as `nidiff.sample` does."""
    target, schedule = denoiser.target_name, _schedule_config(denoiser.process.schedule)
    if target is None or schedule["schedule"] not in SCHEDULES:
        argument, place = ("target", "target.TARGETS") if target is None else ("schedule", "schedules.SCHEDULES")
        problem = "is not registered, so what is saved could not be loaded"
        raise InputError(argument, None, problem, f"add it to nidiff.diffusion.{place}")
    config: dict[str, Any] = {
        "_class_name": CLASS,
        "covariance": describe(denoiser.process.covariance),
        "schedule": schedule,
        "prediction_type": WORDS.get(target, target),
        "algorithm": "dpmsolver++",
        "timestep_spacing": "trailing",
        "clip_sample": denoiser.clip is not None,
        "clip_sample_range": 1.0 if denoiser.clip is None else denoiser.clip,
        "scaling": None if denoiser.scaling is None else Config(*denoiser.scaling.to_json()),
        "num_train_timesteps": len(denoiser.process.schedule),
        "beta_schedule": BETA_SCHEDULE,
    }
    if denoiser.gaussian is not None:
        config |= {"gaussian": _gaussian_config(denoiser.gaussian, denoiser.kappa), "sees": denoiser.sees}
    if denoiser.mixture is not None:
        config["mixture"] = denoiser.mixture.to_config()
    if denoiser.conditions:
        config["conditions"] = {name: condition.to_json() for name, condition in denoiser.conditions.items()}
    if modules := modules_of(_parts(denoiser, schedule["schedule"], target)):
        config[MODULES] = modules
    json.dumps(config, allow_nan=False)  # else it could not be read again
    return config


def _parts(denoiser: Denoiser, schedule: str, target: str) -> Iterator[object]:
    """The functions and classes that opening the model needs."""
    covariance = denoiser.process.covariance
    yield type(denoiser.net)
    yield type(covariance.basis)
    yield SCHEDULES[schedule]
    yield getattr(TARGETS[target], "encode", TARGETS[target])
    if covariance.origin is not None:
        yield COVARIANCES.get(covariance.origin.name)


def missing_modules(config: Mapping[str, Any]) -> list[str]:
    """The user's modules that a model was saved with and that were not imported."""
    return [name for name in config.get(MODULES, ()) if isinstance(name, str) and name not in sys.modules]


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
    covariance = as_covariance(as_path("covariance", covariance) if isinstance(covariance, str) else covariance)
    gaussian, kappa = _stored_gaussian(config["gaussian"])
    process, count = _stored_process(config["schedule"], covariance, gaussian), config["num_train_timesteps"]
    if count not in (None, len(process.schedule)):
        raise InputError("num_train_timesteps", count, f"differs from {process.schedule!r}", "set its num_levels")
    clip = config["clip_sample_range"] if config["clip_sample"] else None
    if isinstance(scaling, Mapping):
        scaling = Scaling.from_json(scaling, getattr(scaling, "tensors", {}))
    kappa = kappa if config["kappa"] is None else config["kappa"]
    mixture = config["mixture"]
    mixture = MixtureModel.from_config(mixture) if isinstance(mixture, Mapping) else mixture
    facts = {name: config[name] for name in ("sees", "conditions")}
    return Denoiser(net, process, target, clip, scaling, gaussian=gaussian, kappa=kappa, mixture=mixture, **facts)


def _schedule_config(schedule: Schedule) -> Config:
    """The configuration of a schedule. Columns are in it, and tables of modes are arrays."""
    config, tensors = schedule.to_config(), {}
    for key, value in config.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            tensors[key] = torch.tensor(value, dtype=torch.float64, device="cpu")
            config[key] = {"tensor": key}
    return Config(config, tensors)


def _stored_process(schedule: Any, covariance: Covariance, gaussian: GaussianModel | None) -> Process:
    """The inverse of what `scheduler_config` writes; a text may leave out what Σ and the data's Gaussian say."""
    if isinstance(schedule, Mapping):
        tensors = getattr(schedule, "tensors", {})
        schedule = {key: _array(value, tensors) for key, value in schedule.items()}
    return Process(as_schedule(schedule, schedule_facts(covariance, gaussian)), covariance)


def _array(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The array that a value names, or the value itself."""
    return tensors[value["tensor"]] if isinstance(value, Mapping) and "tensor" in value else value


def _gaussian_config(gaussian: GaussianModel, kappa: Kappa | None) -> Config:
    """The data's Gaussian, with κ in it where it was measured."""
    config = gaussian.to_config()
    if kappa is None:
        return config
    losses = {"losses": {start: each.tolist() for start, each in kappa.losses.items()}} if kappa.losses else {}
    measured = {
        "rows": kappa.rows.tolist(),
        **losses,
        **{name: {"tensor": f"kappa.{name}"} for name in ("values", "trust")},
    }
    # Copies: one tensor in both places could not be written.
    arrays = {"kappa.values": kappa.values.clone(), "kappa.trust": kappa.trust.clone()}
    return Config({**config, "kappa": measured}, {**config.tensors, **arrays})


def without_kappa(gaussian: Config) -> Config:
    """The configuration of the data's Gaussian alone, which is the same before and after training."""
    config, tensors = (
        {key: value for key, value in values.items() if key.partition(".")[0] != "kappa"}
        for values in (gaussian, gaussian.tensors)
    )
    return Config(config, tensors)


def _stored_gaussian(gaussian: Any) -> tuple[GaussianModel | None, Kappa | None]:
    """The inverse of `_gaussian_config`; a `GaussianModel` stays one."""
    if gaussian is None or isinstance(gaussian, GaussianModel):
        return gaussian, None
    model, measured = GaussianModel.from_config(gaussian), gaussian.get("kappa")
    if measured is None:
        return model, None
    tables = (_array(measured[name], getattr(gaussian, "tensors", {})) for name in ("values", "trust"))
    values, trust = (_as_computed(table) for table in tables)
    losses = {start: _column(losses) for start, losses in measured.get("losses", {}).items()}
    return model, Kappa(_column(measured["rows"]), values, trust, losses)


def _as_computed(table: Any) -> Any:
    """float16, as models that ship store κ, as float32."""
    return table.float() if isinstance(table, Tensor) and table.dtype == torch.float16 else table


def _column(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def check_fields(config: Mapping[str, Any]) -> None:
    """Refuse an unknown field; those that begin with _ are diffusers' own."""
    for field in config:
        if not field.startswith("_"):
            one_of("config", field, FIELDS)
    if (betas := config.get("beta_schedule", BETA_SCHEDULE)) != BETA_SCHEDULE:
        raise InputError("beta_schedule", betas, "is not ours", "pass `schedule`, such as 'ddpm_linear'")


def with_arrays(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The configuration in a file, with the arrays that lie beside it at hand."""
    if config.get("_class_name") == CLASS and "scaling" not in config:
        raise FileError("file", file, "was written by version 0.1", OPENED_BY_0_2)
    result = dict(config)
    for field, (name, owner) in FILES.items():
        value = config.get(field)
        if isinstance(value, Mapping):
            needed = field in ("gaussian", "mixture") or names_arrays(value)  # which have always a mean
            result[field] = Config(value, read_arrays(file.with_name(name), owner) if needed else {})
        elif value is not None and not (field == "schedule" and isinstance(value, str)):
            raise FileError("file", file, f"has {field}={shown(value)}, which is no configuration", "save it again")
    return result


def arrays(config: Mapping[str, Any]) -> dict[str, Mapping[str, Tensor]]:
    """The arrays of what `scheduler_config` returned, by the names of their files."""
    return {name: getattr(config.get(field), "tensors", {}) for field, (name, _) in FILES.items()}
