"""What comes from diffusers: the configuration of another scheduler, and a model on the Hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import ddpm_cosine, ddpm_linear, flow, from_betas, scaled_linear
from nidiff.errors import FileError, InputError, one_of

# Options of ``from_pretrained`` that are about fetching from the Hub.
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")

# The fields of DDPMScheduler and DDIMScheduler: the levels, those that mean the same here, those that do nothing on
# their own, and the values that the others must have for their steps to be ours.
BETAS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas")
SAME = ("prediction_type", "variance_type", "clip_sample", "clip_sample_range", "timestep_spacing")
IDLE = ("dynamic_thresholding_ratio", "sample_max_value")
REQUIRED = {"thresholding": False, "rescale_betas_zero_snr": False, "steps_offset": 0, "set_alpha_to_one": True}


def translated(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of DDPMScheduler, or of DDIMScheduler, which has no ``variance_type``, in our fields."""
    if is_flow(theirs):
        remedy = "wrap the network as nidiff.interop.FlowNetwork(unet, scheduler), or pass a flow as `schedule`"
        raise InputError("config", None, "is of flow matching, whose networks see 1000 · sigma, not a row", remedy)
    theirs = {key: value for key, value in theirs.items() if not key.startswith("_")}
    for key, value in theirs.items():
        if key not in (*BETAS, *SAME, *IDLE, *REQUIRED):
            problem = f"has {key!r}, which is not of DDPMScheduler or DDIMScheduler"
            raise InputError("config", None, problem, "pass `schedule` instead")
        if REQUIRED.get(key, value) != value:
            raise InputError(key, value, "is something this scheduler does not do", f"use {REQUIRED[key]!r}")
    ours = {key: theirs[key] for key in SAME if key in theirs}
    algorithm = "ddpm" if "variance_type" in theirs else "ddim"
    return {"schedule": from_diffusers(theirs), "algorithm": algorithm, "timestep_spacing": "leading", **ours}


def from_diffusers(config: Any) -> Schedule:
    """The schedule of a diffusers scheduler that has β (DDPM, DDIM, DPM-Solver++, …), or of its ``config``; of
    FlowMatchEulerDiscreteScheduler, `nidiff.schedules.flow` with its shift."""
    values = dict(config if isinstance(config, Mapping) else getattr(config, "config", {}))
    if is_flow(values):
        for option, remedy in FLOW_OPTIONS.items():
            if values.get(option):
                raise InputError(option, values[option], "is not one schedule", remedy)
        return flow(values.get("num_train_timesteps", 1000), values.get("shift", 1.0))
    if values.get("rescale_betas_zero_snr"):
        raise InputError("rescale_betas_zero_snr", True, "makes a level of pure noise, without SNR", "turn it off")
    if values.get("trained_betas") is not None:
        return from_betas(values["trained_betas"])
    kind, count = values.get("beta_schedule"), values.get("num_train_timesteps", 1000)
    ends = {ours: values[theirs] for ours, theirs in (("beta_min", "beta_start"), ("beta_max", "beta_end"))
            if theirs in values}  # fmt: skip
    if kind == "squaredcos_cap_v2":
        return ddpm_cosine(count)
    known = {"linear": ddpm_linear, "scaled_linear": scaled_linear}
    return known[one_of("beta_schedule", kind, [*known, "squaredcos_cap_v2"])](count, **ends)


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a diffusers scheduler of flow matching."""
    return "FlowMatch" in str(config.get("_class_name", "")) or ("shift" in config and "beta_schedule" not in config)


# What makes the levels of FlowMatchEulerDiscreteScheduler depend on more than its shift, and what to do about it.
FLOW_OPTIONS = {
    "use_dynamic_shifting": "set it to False, and shift to exp(mu)",
    "shift_terminal": "set it to None",
    "invert_sigmas": "set it to False",
    "use_karras_sigmas": "set it to False, and choose rows by spacing=",
    "use_exponential_sigmas": "set it to False, and choose rows by spacing=",
    "use_beta_sigmas": "set it to False, and choose rows by spacing=",
    "stochastic_sampling": "set it to False, and use sampler ancestral",
}


def downloaded(name: str, files: Sequence[str], options: Mapping[str, Any]) -> Path:
    """The folder with those ``files`` of a repository on the Hub; ``options`` are those of ``from_pretrained``."""
    chosen = {key: options[key] for key in DOWNLOAD if options.get(key) is not None}
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), **chosen))
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = "is neither a folder here nor within reach on the Hub"
        raise FileError("folder", name, problem, "give a model folder, a run directory or a repository") from error
