"""What comes from diffusers: the configuration of another scheduler, and a model on the Hub."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import ddpm_cosine, ddpm_linear, flow, from_betas, scaled_linear
from nidiff.errors import FileError, InputError, one_of

# Options of ``from_pretrained`` that are about fetching from the Hub.
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")

# The fields of DDPMScheduler and DDIMScheduler: the levels, those that mean the same here, those that do nothing alone,
# and, also of FlowMatchEulerDiscreteScheduler, those that change steps or levels, with the value that we can do.
BETAS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas")
SAME = ("prediction_type", "variance_type", "clip_sample", "clip_sample_range", "timestep_spacing")
IDLE = ("dynamic_thresholding_ratio", "sample_max_value")
REQUIRED = {"thresholding": False, "rescale_betas_zero_snr": False, "steps_offset": 0, "set_alpha_to_one": True}
SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
FLOW = dict.fromkeys(("use_dynamic_shifting", "shift_terminal", "stochastic_sampling", *SIGMAS), False)


def translated(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of DDPMScheduler, or of DDIMScheduler, which has no ``variance_type``, in our fields."""
    if is_flow(theirs):
        remedy = "wrap the network as nidiff.interop.FlowNetwork(unet, scheduler), or pass a flow as `schedule`"
        raise InputError("config", None, "is of flow matching, whose networks see 1000 · sigma, not a row", remedy)
    for key in theirs:
        if not key.startswith("_"):
            one_of("config", key, (*BETAS, *SAME, *IDLE, *REQUIRED))
    _check_options(theirs, REQUIRED)
    ours = {key: theirs[key] for key in SAME if key in theirs}
    algorithm = "ddpm" if "variance_type" in theirs else "ddim"
    return {"schedule": from_diffusers(theirs), "algorithm": algorithm, "timestep_spacing": "leading", **ours}


def from_diffusers(config: Any) -> Schedule:
    """The schedule of a diffusers scheduler that has β (DDPM, DDIM, DPM-Solver++, …), or of its ``config``; of
    FlowMatchEulerDiscreteScheduler, `nidiff.schedules.flow` with its shift."""
    values = dict(config if isinstance(config, Mapping) else getattr(config, "config", {}))
    count = values.get("num_train_timesteps", 1000)
    if is_flow(values):
        _check_options(values, FLOW)
        return flow(count, values.get("shift", 1.0))
    _check_options(values, {"rescale_betas_zero_snr": False})  # it makes a level of pure noise
    if values.get("trained_betas") is not None:
        return from_betas(values["trained_betas"])
    known: dict[str, Callable[..., Schedule]] = {"linear": ddpm_linear, "scaled_linear": scaled_linear}
    kind = one_of("beta_schedule", values.get("beta_schedule"), [*known, "squaredcos_cap_v2"])
    if kind == "squaredcos_cap_v2":
        return ddpm_cosine(count)
    names = {"beta_start": "beta_min", "beta_end": "beta_max"}
    return known[kind](count, **{names[key]: values[key] for key in names if key in values})


def _check_options(config: Mapping[str, Any], required: Mapping[str, Any]) -> None:
    """Refuse an option that changes the steps or the levels."""
    for key, value in required.items():
        if bool(config.get(key, value)) != bool(value):
            raise InputError(key, config[key], "is something that nidiff does not do", f"use {value}")


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a diffusers scheduler of flow matching."""
    return "FlowMatch" in str(config.get("_class_name", "")) or ("shift" in config and "beta_schedule" not in config)


def downloaded(name: Path, files: Sequence[str], options: Mapping[str, Any]) -> Path:
    """The folder with those ``files`` of a repository on the Hub; ``options`` are those of ``from_pretrained``."""
    chosen = {key: options[key] for key in DOWNLOAD if options.get(key) is not None}
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(files), **chosen))
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = "is neither a folder here nor within reach on the Hub"
        raise FileError("folder", name, problem, "give a model folder, a run directory or a repository") from error
