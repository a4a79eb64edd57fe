"""What scheduler_config.json of a model may hold. `load_model` and the scheduler of `nidiff.interop` both ask here."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import Schedule
from nidiff.errors import InputError, one_of
from nidiff.training.experiment import Experiment

# diffusers' words, and ours.
PREDICTIONS = {"epsilon": "eps", "sample": "x0", "v_prediction": "v", "noise": "noise", "score": "score"}
ALGORITHMS = {"ddpm": "ancestral", "ddim": "ddim", "dpmsolver++": "dpmpp_2m"}
VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}
SPACINGS = ("leading", "linspace", "trailing")

# A scheduler of diffusers ignores the fields it does not know and would sample with white noise. This one it knows, and
# refuses: "nidiff (needs …) is not implemented for DDIMScheduler".
BETA_SCHEDULE = "nidiff (needs nidiff.interop.NonIsotropicScheduler)"

WORDS: dict[str, Collection[str]] = {
    "prediction_type": PREDICTIONS,
    "algorithm": ALGORITHMS,
    "variance_type": VARIANCES,
    "timestep_spacing": SPACINGS,
}
FIELDS = ("covariance", "schedule", *WORDS, "clip_sample", "clip_sample_range", "num_train_timesteps", "beta_schedule")


def model_folder(path: Path) -> Path:
    """The model's folder in a run directory, or ``path`` itself."""
    return path / "model" if (path / "model").is_dir() else path


def has_network(model: Path) -> bool:
    """Whether a model folder can be sampled from; that of a run holds Σ and the schedule from the beginning."""
    return any(any((model / part).glob("*.safetensors")) for part in ("unet", "network"))


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
        "beta_schedule": BETA_SCHEDULE,
    }


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse an unknown field, and a value that cannot be sampled with."""
    for field in config:
        if not field.startswith("_") and field not in FIELDS:
            raise InputError(
                f"the configuration has the unknown field {field!r}: known are {', '.join(FIELDS)} "
                "(betas are written as schedule='ddpm_linear:num_levels=…,beta_min=…,beta_max=…')."
            )
    if "covariance" not in config:
        raise InputError("the configuration has no covariance: pass covariance=, a covariance of nidiff.")
    covariance = config["covariance"]
    if not isinstance(covariance, Covariance | Mapping):
        raise InputError(f"covariance={covariance!r} must be a covariance of nidiff or what its to_config() returned.")
    for field, known in WORDS.items():
        if field in config:
            one_of(field, config[field], known)
    clip, limit = config.get("clip_sample", True), config.get("clip_sample_range", 1.0)
    if not isinstance(clip, bool):
        raise InputError(f"clip_sample={clip!r} must be True or False.")
    if clip and not is_positive(limit):
        raise InputError(f"clip_sample_range={limit!r} must be a positive number, or clip_sample=False.")
    if config.get("beta_schedule", BETA_SCHEDULE) != BETA_SCHEDULE:
        raise InputError(
            f"beta_schedule={config['beta_schedule']!r} is not ours: write it as schedule='ddpm_linear:…'."
        )


def schedule_of(config: Mapping[str, Any]) -> Schedule:
    """The schedule that the configuration writes as NAME:key=value,…"""
    text, count = config["schedule"], config.get("num_train_timesteps")
    if not isinstance(text, str):
        raise InputError(
            f"schedule={text!r} must be written as NAME:key=value,…, such as 'ddpm_linear:num_levels=1000'."
        )
    table = Experiment(schedule=text).build_schedule()
    if count not in (None, len(table)):
        raise InputError(
            f"num_train_timesteps={count} is not the {len(table)} levels of schedule={text!r}: "
            f"write it there, as num_levels={count}."
        )
    return table


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
