"""Σ in a diffusers configuration: a dictionary, and its arrays in a file beside it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.covariance.config import ARRAYS, SCHEDULER, as_covariance, save_arrays
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import from_diffusers
from nidiff.errors import InputError
from nidiff.model.config import FIELDS, check_fields, with_arrays
from nidiff.model.folder import check_same_covariance

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
    theirs = {key: value for key, value in theirs.items() if not key.startswith("_")}
    for key, value in theirs.items():
        if key not in (*BETAS, *SAME, *IDLE, *REQUIRED):
            raise InputError(
                f"config has the field {key!r}, which is not one of DDPMScheduler or DDIMScheduler: pass schedule= and "
                "the other arguments instead."
            )
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
        raise OSError(
            f"{name!r} is neither a folder here nor within reach on the Hub: give a model folder, a run directory or a "
            "Hub repository."
        ) from error


class ConfiguredScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]  # config_name, in diffusers itself
    """A scheduler with a ``covariance``, whose configuration is checked, saved and read with the arrays of Σ."""

    covariance: Covariance

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The scheduler of a configuration: of this class, or, with ``covariance=``, of DDPMScheduler or DDIMScheduler.
        Unlike in diffusers, a field that has no meaning here is refused."""
        if isinstance(config, Mapping):
            theirs = "beta_schedule" in config and "schedule" not in config
            config = {"covariance": None, **(translated(config) if theirs else config)}
            check_fields(config | {key: kwargs[key] for key in kwargs if key in FIELDS or not return_unused_kwargs})
            config.pop("_use_default_values", None)  # the fields that diffusers would leave out
            if "schedule" in kwargs:
                config.pop("num_train_timesteps", None)  # it was that of the other schedule
            for given in (config, kwargs):
                given.pop("beta_schedule", None)  # no argument: it is always the same
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def load_config(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *, covariance: Any = None, **kwargs: Any
    ) -> Any:
        """The configuration in a folder or on the Hub, with the arrays of Σ that lie beside it; `from_pretrained` reads
        it. ``covariance`` only says what you expect: another is refused."""
        place, subfolder = Path(pretrained_model_name_or_path), kwargs.get("subfolder") or ""
        if not place.exists():
            place = downloaded(str(place), [str(Path(subfolder, name)) for name in (SCHEDULER, ARRAYS)], kwargs)
        result = super().load_config(place, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        config |= with_arrays(config, place.parent if place.is_file() else place / subfolder)
        if covariance is not None:
            check_same_covariance(as_covariance(config["covariance"]), as_covariance(covariance))
        return result

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write scheduler_config.json and, where Σ has arrays, covariance.safetensors."""
        save_arrays(self.covariance.tensors(), Path(save_directory))
        super().save_config(save_directory, push_to_hub=push_to_hub, **kwargs)
