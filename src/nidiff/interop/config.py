"""What comes from diffusers: the configuration of another scheduler, and a model on the Hub."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.diffusion.schedule import from_diffusers, is_flow
from nidiff.errors import FileError, InputError

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
        raise InputError(
            "config is of flow matching, whose networks are told 1000 · sigma and not a row: wrap the network as "
            "nidiff.interop.FlowNetwork(unet, scheduler), or pass schedule=nidiff.flow(…) for one trained here."
        )
    theirs = {key: value for key, value in theirs.items() if not key.startswith("_")}
    for key, value in theirs.items():
        if key not in (*BETAS, *SAME, *IDLE, *REQUIRED):
            raise InputError(f"config has {key!r}, which is not of DDPMScheduler or DDIMScheduler: pass schedule=.")
        if REQUIRED.get(key, value) != value:
            raise InputError(f"config has {key}={value!r}, which this scheduler does not do: use {REQUIRED[key]!r}.")
    ours = {key: theirs[key] for key in SAME if key in theirs}
    algorithm = "ddpm" if "variance_type" in theirs else "ddim"
    return {"schedule": from_diffusers(theirs), "algorithm": algorithm, "timestep_spacing": "leading", **ours}


def downloaded(name: str, files: Sequence[str], options: Mapping[str, Any]) -> Path:
    """The folder with those ``files`` of a repository on the Hub; ``options`` are those of ``from_pretrained``."""
    chosen = {key: options[key] for key in DOWNLOAD if options.get(key) is not None}
    try:
        return Path(snapshot_download(name, allow_patterns=list(files), **chosen))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise FileError(
            f"{name!r} is neither a folder here nor within reach on the Hub: give a model folder, a run directory or a "
            "Hub repository."
        ) from error
