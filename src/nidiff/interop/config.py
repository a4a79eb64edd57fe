"""Σ in a diffusers configuration: a dictionary, and its arrays in a file beside it."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from nidiff.covariance.config import ARRAYS, Config, as_covariance, names_arrays, read_arrays, save_arrays
from nidiff.covariance.operator import Covariance
from nidiff.diffusion.schedule import from_diffusers
from nidiff.errors import InputError
from nidiff.model.config import FIELDS, check_config
from nidiff.model.folder import check_same_covariance

# Options of ``from_pretrained`` that are about fetching from the Hub.
DOWNLOAD = ("cache_dir", "force_download", "local_files_only", "token", "revision")


# The fields of diffusers' schedulers: the levels, those that mean the same here, those that do nothing, and the values
# the others must have for their steps to be ours.
BETAS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "trained_betas")
SAME = ("prediction_type", "variance_type", "clip_sample", "clip_sample_range", "timestep_spacing")
IDLE = ("dynamic_thresholding_ratio", "sample_max_value", "lower_order_final", "euler_at_final", "flow_shift",
        "time_shift_type")  # fmt: skip
REQUIRED: dict[str, Any] = {
    "thresholding": False,
    "rescale_betas_zero_snr": False,
    "steps_offset": 0,
    "set_alpha_to_one": True,
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "solver_type": "midpoint",
    "final_sigmas_type": "zero",
    "lambda_min_clipped": -math.inf,
    "use_dynamic_shifting": False,
    **{
        f"use_{kind}": False
        for kind in ("karras_sigmas", "exponential_sigmas", "beta_sigmas", "lu_lambdas", "flow_sigmas")
    },
}
# What only the configuration of that scheduler has, the most special first.
MARKS = {"euler_at_final": "dpmsolver++", "set_alpha_to_one": "ddim", "variance_type": "ddpm"}


def translated(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a scheduler of diffusers in our fields."""
    theirs = {key: value for key, value in theirs.items() if not key.startswith("_")}
    if "beta_schedule" not in theirs:
        return dict(theirs)
    algorithm = next((name for mark, name in MARKS.items() if mark in theirs), None)
    if algorithm is None:
        raise InputError("config is not one of DDPMScheduler, DDIMScheduler or DPMSolverMultistepScheduler: pass one.")
    if algorithm == "dpmsolver++":
        theirs = {"clip_sample": False, **theirs}
        if theirs.pop("variance_type", None) is not None:
            raise InputError(
                "config has a learned variance_type, which this scheduler does not use: train with a fixed one."
            )
    for key, value in theirs.items():
        if key in REQUIRED and value != REQUIRED[key]:
            raise InputError(
                f"config has {key}={value!r}, which this scheduler does not do: build yours with {REQUIRED[key]!r}."
            )
        if key not in (*BETAS, *SAME, *IDLE, *REQUIRED):
            raise InputError(f"config has the unknown field {key!r}: pass schedule= and the other arguments instead.")
    ours = {key: theirs[key] for key in SAME if key in theirs}
    return {"schedule": from_diffusers(theirs), "algorithm": algorithm, **ours}


class ConfiguredScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]  # config_name, in diffusers itself
    """A scheduler with a ``covariance``, whose configuration is checked, saved and read with the arrays of Σ."""

    covariance: Covariance

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The scheduler of a configuration: of this class, or, with ``covariance=``, of DDPMScheduler, DDIMScheduler or
        DPMSolverMultistepScheduler. Unlike in diffusers, a field that has no meaning here is refused."""
        if isinstance(config, Mapping):
            config = dict(config) if "schedule" in config else translated(config)
            asked = {key: kwargs[key] for key in kwargs if key in FIELDS or not return_unused_kwargs}
            check_config(config | asked)
            config.pop("_use_default_values", None)  # the fields that diffusers would leave out
            if "schedule" in kwargs:
                config.pop("num_train_timesteps", None)  # it was that of the other schedule
            for given in (config, kwargs):
                given.pop("beta_schedule", None)  # no argument: it is always the same
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        subfolder: str | None = None,
        return_unused_kwargs: bool = False,
        *,
        covariance: Covariance | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The scheduler in a folder or on the Hub. ``covariance`` only says what you expect: another is refused."""
        result = super().from_pretrained(pretrained_model_name_or_path, subfolder, return_unused_kwargs, **kwargs)
        scheduler = result[0] if isinstance(result, tuple) else result
        if covariance is not None:
            check_same_covariance(scheduler.covariance, as_covariance(covariance))
        return result

    @classmethod
    def load_config(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> Any:
        """The configuration in a folder or on the Hub, with the arrays of Σ that lie beside it."""
        result = super().load_config(pretrained_model_name_or_path, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        if isinstance(config.get("covariance"), str):
            raise InputError(f"covariance={config['covariance']!r} in a file must be what to_config() returned.")
        if names_arrays(config.get("covariance")):
            file = _arrays_file(str(pretrained_model_name_or_path), kwargs)
            config["covariance"] = Config(config["covariance"], read_arrays(file))
        return result

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write scheduler_config.json and, where Σ has arrays, covariance.safetensors."""
        os.makedirs(save_directory, exist_ok=True)
        save_arrays(self.covariance.tensors(), Path(save_directory))
        super().save_config(save_directory, push_to_hub=push_to_hub, **kwargs)


def _arrays_file(source: str, options: Mapping[str, Any]) -> Path:
    """Where the arrays beside scheduler_config.json of the folder or the Hub repository ``source`` are; ``options`` are
    those of ``from_pretrained``."""
    subfolder, place = options.get("subfolder"), Path(source)
    if place.exists():
        folder = place if place.is_dir() else place.parent
        inner = folder / (subfolder or "") / ARRAYS
        return inner if inner.is_file() else folder / ARRAYS
    chosen = {key: options[key] for key in DOWNLOAD if options.get(key) is not None}
    try:
        return Path(hf_hub_download(source, ARRAYS, subfolder=subfolder, **chosen))
    except (HfHubHTTPError, OSError) as error:
        raise OSError(f"{source} gives no {ARRAYS}, the arrays of its Σ ({error}): look for it there.") from error
