"""What comes from diffusers: the configuration of another scheduler, and a model on the Hub."""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import (
    ddpm_cosine,
    ddpm_linear,
    flow,
    from_alphas_cumprod,
    from_betas,
    scaled_linear,
)
from nidiff.errors import FileError, InputError, one_of

# Options of ``from_pretrained`` that are about fetching from the Hub.
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")

# The algorithm here whose steps are those of a scheduler of diffusers.
THEIRS = {
    "DDPMScheduler": "ddpm",
    "DDIMScheduler": "ddim",
    "DPMSolverMultistepScheduler": "dpmsolver++",
    "EulerDiscreteScheduler": "euler",
    "PNDMScheduler": "ipndm",
}
# Of their fields: the levels; those that mean the same here; and those that change nothing, or only the last step,
# which gives x̂0 here, or the first ones of PNDM. All others, which change steps, must have diffusers' default value.
BETAS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas", "rescale_betas_zero_snr")
SAME = ("prediction_type", "clip_sample", "clip_sample_range", "timestep_spacing", "steps_offset")
IDLE = ("dynamic_thresholding_ratio", "sample_max_value", "set_alpha_to_one", "skip_prk_steps", "interpolation_type")
SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas")
FLOW = dict.fromkeys(("use_dynamic_shifting", "shift_terminal", "stochastic_sampling", *SIGMAS), False)
# The fields of FlowMatchEulerDiscreteScheduler that decide which sigmas it visits: all but the number of levels.
FLOW_FIELDS = ("shift", "time_shift_type", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", *FLOW)


def translated(theirs: Mapping[str, Any], algorithm: str | None = None) -> dict[str, Any]:
    """The configuration of a diffusers scheduler that has β, or of FlowMatchEulerDiscreteScheduler, in our fields.
    Without an ``algorithm`` its steps must be among ours; with another one, only its levels, prediction, clipping and
    spacing count."""
    if is_flow(theirs):
        return _translated_flow(theirs, algorithm)
    import diffusers

    fields = {each: dict(signature(getattr(diffusers, each)).parameters) for each in THEIRS}
    keys = [key for key in theirs if not key.startswith("_")]
    named = theirs.get("_class_name")  # which the file has, and not the object
    name = named or next((each for each in fields if {*keys} <= fields[each].keys()), "of another scheduler")
    if named is None and name == "DDPMScheduler" and "variance_type" not in theirs:
        name = "DDIMScheduler"
    if algorithm is None and name not in THEIRS:
        problem, remedy = "takes steps that nidiff does not take", "pass `algorithm`, such as 'dpmsolver++'"
        raise InputError("config", name, problem, remedy)
    own = fields.get(name, {}) or dict(signature(getattr(diffusers, name, dict)).parameters)
    same_steps = algorithm in (None, THEIRS.get(name))
    for key in keys:
        one_of("config", key, {*own, *SAME, *(each for known in fields.values() for each in known)})
        decides = same_steps and key in own and key not in (*BETAS, *SAME, *IDLE)
        if (decides and key != "variance_type") or key == "thresholding":
            _check_options(theirs, {key: own[key].default if key in own else False})
    ours = {key: theirs.get(key, own[key].default if key in own else None) for key in SAME}
    ours["clip_sample"] = bool(ours["clip_sample"])
    if name == "DDPMScheduler" and "variance_type" in theirs:
        ours["variance_type"] = theirs["variance_type"]
    known = {key: value for key, value in ours.items() if value is not None}
    return {"schedule": from_diffusers(theirs), "algorithm": algorithm or THEIRS[name], **known}


def _translated_flow(theirs: Mapping[str, Any], algorithm: str | None) -> dict[str, Any]:
    """Of flow matching with Euler's method: all of its ways to choose sigmas, which diffusers' own class computes."""
    name, count = theirs.get("_class_name", "FlowMatchEulerDiscreteScheduler"), theirs.get("num_train_timesteps", 1000)
    if algorithm is None and name != "FlowMatchEulerDiscreteScheduler":
        raise InputError("config", name, "takes steps that nidiff does not take", "pass `algorithm`, such as 'euler'")
    for key in theirs:
        if not key.startswith("_"):
            one_of("config", key, ("num_train_timesteps", *FLOW_FIELDS))
    unlike = ("invert_sigmas", *(("stochastic_sampling",) if algorithm in (None, "euler") else ()))
    _check_options(theirs, dict.fromkeys(unlike, False))
    shift = 1.0 if theirs.get("use_dynamic_shifting") else theirs.get("shift", 1.0)
    kind = {"prediction_type": "velocity", "algorithm": algorithm or "euler", "clip_sample": False}
    return {"schedule": flow(count, shift), "flow": flow_fields(theirs), **kind}


def flow_fields(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """All of `FLOW_FIELDS`: those that are not given have diffusers' default values."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    own = signature(FlowMatchEulerDiscreteScheduler).parameters
    fields = {key: theirs.get(key, own[key].default) for key in FLOW_FIELDS}
    one_of("time_shift_type", fields["time_shift_type"], ("exponential", "linear"))
    return fields


def with_flow(ours: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration ``ours`` as the scheduler is built from it: the fields of flow matching, which pipelines look
    for at the top of it, are moved into "flow". Fields in ``changed`` replace them, and the levels follow."""
    fields = {key: ours[key] for key in FLOW_FIELDS if key in ours} | {**changed}
    config = {key: value for key, value in ours.items() if key not in FLOW_FIELDS} | {"flow": fields}
    if changed:
        theirs = {**fields, "num_train_timesteps": ours["num_train_timesteps"]}
        config["schedule"] = _translated_flow(theirs, ours["algorithm"])["schedule"]
    return config


def from_diffusers(config: Any) -> Schedule:
    """The schedule of a diffusers scheduler that has β (DDPM, DDIM, DPM-Solver++, …), or of its ``config``; of
    FlowMatchEulerDiscreteScheduler, `nidiff.schedules.flow` with its shift."""
    values = dict(config if isinstance(config, Mapping) else getattr(config, "config", {}))
    count = values.get("num_train_timesteps", 1000)
    if is_flow(values):
        _check_options(values, FLOW)
        return flow(count, values.get("shift", 1.0))
    schedule = _of_betas(values, count)
    if not values.get("rescale_betas_zero_snr"):
        return schedule
    signal = (schedule.signal - schedule.signal[-1]) * schedule.signal[0] / (schedule.signal[0] - schedule.signal[-1])
    signal[-1] = signal[-2] / 2  # 0 in diffusers, at which there is no log-SNR
    return from_alphas_cumprod(signal.square().tolist())


def _of_betas(values: Mapping[str, Any], count: int) -> Schedule:
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
        given = config.get(key, value)
        if given != value and (given or value):  # None, 0 and False all leave out
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
