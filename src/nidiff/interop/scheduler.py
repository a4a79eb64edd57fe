"""A diffusers scheduler whose noise is N(0, Σ): the steps of `nidiff.sampling` behind diffusers' interface."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils.outputs import BaseOutput
from torch import Tensor

from nidiff.covariance.operator import Covariance
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Level
from nidiff.diffusion.target import TARGETS
from nidiff.errors import InputError, one_of
from nidiff.interop.arrays import Recipe, describe, names_arrays, read_arrays
from nidiff.interop.guard import warn_if_white
from nidiff.interop.timesteps import SPACINGS, checked, spaced
from nidiff.randomness import Generators
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sampling.step import Run
from nidiff.training.model import PREDICTIONS, build_schedule, save_arrays


@dataclass
class NonIsotropicSchedulerOutput(BaseOutput):
    """The sample at the next level, and the clean image x̂0 expected from the one before."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class Algorithm(NamedTuple):
    """A sampler of nidiff under the name of its diffusers scheduler."""

    sampler: str
    spare: int  # levels that diffusers lays out beyond those it visits, see `spaced`
    options: Callable[[Mapping[str, Any], float], dict[str, object]]  # of the configuration and eta


class NonIsotropicScheduler(SchedulerMixin, ConfigMixin):  # type: ignore[misc]  # config_name, in diffusers itself
    """DDPM, DDIM and DPM-Solver++(2M) for x = signal · x0 + sigma · Σ^½ · eps.

    Wherever diffusers takes or draws noise (``add_noise``, ``get_velocity``, ``variance_noise``), noise is white here
    too and is coloured inside, so a training script stays as it is; the initial sample comes from `init_noise`. With
    Σ = I this is `DDPMScheduler`, `DDIMScheduler` (``use_clipped_model_output=True`` where x̂0 is clipped) and
    `DPMSolverMultistepScheduler`, step by step. The last step always gives x̂0, as `nidiff.sample` does.

    Args:
        covariance: Σ, or what its ``to_config()`` returned.
        schedule: the noise levels as NAME:key=value,…, such as "ddpm_linear:num_levels=1000".
        prediction_type: "epsilon" (white), "sample", "v_prediction", "noise" (coloured) or "score".
        algorithm: "ddpm", "ddim" or "dpmsolver++".
        variance_type: of ddpm, "fixed_small" (β̃) or "fixed_large" (β).
        clip_sample: clip x̂0 to ±``clip_sample_range``, in pixels.
        timestep_spacing: "leading", "linspace" or "trailing".
        num_train_timesteps: the number of levels, which is the schedule's; recorded for scripts that ask for it.
    """

    order = 1
    _compatibles: list[str] = []  # noqa: RUF012  (diffusers' own form; a scheduler for white noise is none)

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        covariance: Covariance | Mapping[str, Any],
        schedule: str = "ddpm_linear:num_levels=1000",
        prediction_type: str = "epsilon",
        algorithm: str = "ddpm",
        variance_type: str = "fixed_small",
        clip_sample: bool = True,
        clip_sample_range: float = 1.0,
        timestep_spacing: str = "leading",
        num_train_timesteps: int | None = None,
    ) -> None:
        if not isinstance(covariance, Covariance | Mapping):
            raise InputError(
                f"covariance={covariance!r} must be a covariance of nidiff or what its to_config() returned."
            )
        if isinstance(covariance, Mapping):
            covariance = Covariance.from_config(covariance, getattr(covariance, "tensors", {}))
        table = build_schedule(schedule)
        if num_train_timesteps not in (None, len(table)):
            raise InputError(
                f"num_train_timesteps={num_train_timesteps} is not the {len(table)} levels of schedule={schedule!r}: "
                f"write it there, as num_levels={num_train_timesteps}."
            )
        if clip_sample and not clip_sample_range > 0:
            raise InputError(f"clip_sample_range={clip_sample_range} must be positive, or clip_sample=False.")
        one_of("variance_type", variance_type, VARIANCES)
        one_of("timestep_spacing", timestep_spacing, SPACINGS)
        one_of("algorithm", algorithm, ALGORITHMS)
        target = PREDICTIONS[one_of("prediction_type", prediction_type, PREDICTIONS)]
        self.covariance = covariance
        self.process = Process(table, covariance)
        self._target, self._clip = target, clip_sample_range if clip_sample else None
        # diffusers counts positional arguments among the defaults, which `from_config` then leaves out.
        self.register_to_config(covariance=describe(covariance), num_train_timesteps=len(table), _use_default_values=[])
        self.init_noise_sigma = table.prior_scale
        self.alphas_cumprod = torch.sigmoid(table.logsnr).float()  # signal² / (signal² + sigma²): the SNR for scripts
        self.num_inference_steps: int | None = None
        self.timesteps = torch.arange(len(table) - 1, -1, -1)
        self._levels: list[Level] = []
        self._previous: tuple[int, Level, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.process.schedule)

    # The forward process -----------------------------------------------------------------------------------------

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x = signal · x0 + sigma · Σ^½ noise, with **white** noise (``torch.randn_like``), as for every scheduler."""
        self._check("original_samples", original_samples)
        self._check("noise", noise, original_samples)
        return self.process.perturb(original_samples, self._level(timesteps, original_samples), noise)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v = signal · Σ^½ noise − sigma · x0, what "v_prediction" learns; ``sample`` is x0, ``noise`` is white."""
        self._check("sample", sample)
        self._check("noise", noise, sample)
        return TARGETS["v"].encode(sample, noise, self._level(timesteps, sample), self.covariance)

    def init_noise(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Where sampling starts: N(0, init_noise_sigma² Σ). ``generator`` is one, or a list of one per image."""
        return self.process.prior(shape, generator, dtype=dtype, device=device)

    # The reverse process -----------------------------------------------------------------------------------------

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the levels to visit: so many with ``timestep_spacing``, or the falling ``timesteps`` themselves."""
        if (num_inference_steps is None) == (timesteps is None):
            raise InputError("set_timesteps takes num_inference_steps or timesteps: give one of the two.")
        if timesteps is not None:
            rows = checked(len(self), timesteps)
        else:
            spare = ALGORITHMS[self.config["algorithm"]].spare
            rows = spaced(len(self), num_inference_steps, self.config["timestep_spacing"], spare)  # type: ignore[arg-type]
        self.num_inference_steps = len(rows)
        self.timesteps = torch.tensor(rows, device=device)
        self._levels = [self.process.schedule.level(row) for row in rows]
        self._previous = None

    def scale_model_input(self, sample: Tensor, timestep: int | Tensor | None = None) -> Tensor:
        """The network sees the sample as it is."""
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: Generators = None,
        variance_noise: Tensor | None = None,
        return_dict: bool = True,
        *,
        eta: float = 0.0,
    ) -> NonIsotropicSchedulerOutput | tuple[Tensor, Tensor]:
        """From the level ``timestep`` to the next one, given what the network says at ``sample``.

        Args:
            generator: the source of fresh noise: one, or a list of one per image.
            variance_noise: **white** noise to use instead.
            eta: of ddim, from 0 (deterministic) to 1 (ddpm).
        """
        index = self._index(timestep)
        self._check("sample", sample)
        self._check("model_output", model_output, sample)
        if variance_noise is not None:
            self._check("variance_noise", variance_noise, sample)
            if generator is not None:
                raise InputError("step takes a generator or variance_noise: give one of the two.")
        algorithm = ALGORITHMS[self.config["algorithm"]]
        if eta and algorithm.sampler != "ddim":
            raise InputError(
                f"eta={eta} is an option of algorithm='ddim', not of {self.config['algorithm']!r}: leave it out."
            )
        work = torch.promote_types(sample.dtype, torch.float32)
        here, x, output = self._levels[index], sample.to(work), model_output.to(work)
        if index == 0:
            warn_if_white(self.process, x)

        def noise() -> Tensor:
            if variance_noise is not None:
                return self.covariance.sqrt(variance_noise.to(x))
            return self.process.noise(x.shape, generator, dtype=work, device=x.device)

        denoiser = Denoiser(lambda x, label: output, self.process, self._target, self._clip)  # it has answered already
        x0 = denoiser(x, here)
        previous = self._previous
        self._previous = (index, here, x0)
        if index + 1 == len(self._levels):
            x = x0
        else:
            run = Run(denoiser, noise)
            if previous is not None and previous[0] == index - 1 and previous[2].shape == x0.shape:
                run.previous = previous[1:]
            step = SAMPLERS[algorithm.sampler].step
            x = step(run, x, x0, here, self._levels[index + 1], **algorithm.options(self.config, eta))
        result = x.to(sample.dtype), x0.to(sample.dtype)
        return NonIsotropicSchedulerOutput(*result) if return_dict else result

    def _index(self, timestep: int | Tensor) -> int:
        if self.num_inference_steps is None:
            raise InputError("step was called before set_timesteps: call set_timesteps(num_inference_steps) first.")
        row = int(timestep)
        for index, level in enumerate(self._levels):
            if level.label == row:
                return index
        raise InputError(f"timestep={row} is not one that set_timesteps chose: give one of scheduler.timesteps.")

    def _level(self, timesteps: Tensor, like: Tensor) -> Level:
        rows = torch.as_tensor(timesteps).reshape(-1).cpu()
        if not bool(((rows >= 0) & (rows < len(self))).all()):
            raise InputError(f"timesteps={rows.tolist()} must lie in 0 … {len(self) - 1}, the levels of the schedule.")
        if len(rows) not in (1, len(like)):
            raise InputError(f"timesteps has {len(rows)} entries for {len(like)} images: give one per image.")
        return self.process.schedule.level(rows.expand(len(like)))

    def _check(self, argument: str, x: Tensor, like: Tensor | None = None) -> None:
        self.process.check_batch(argument, x)
        self.covariance._check_trailing(tuple(x.shape), argument)
        if like is not None and x.shape != like.shape:
            raise InputError(f"{argument} has shape {tuple(x.shape)}, the images {tuple(like.shape)}: make them equal.")

    # Configuration -----------------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The scheduler of a configuration; unlike diffusers' own, a field that it does not have is refused."""
        if isinstance(config, Mapping):
            known = list(signature(cls.__init__).parameters)[1:]
            for field in config:
                if not field.startswith("_") and field not in known:
                    raise InputError(
                        f"the configuration has the unknown field {field!r}: known are {', '.join(known)} "
                        "(betas are written as schedule='ddpm_linear:num_levels=…,beta_min=…,beta_max=…')."
                    )
            if "covariance" not in {**config, **kwargs}:
                raise InputError("the configuration has no covariance: pass covariance=, a covariance of nidiff.")
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def load_config(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> Any:
        """The configuration in a folder or on the Hub, with the arrays of Σ that lie beside it."""
        result = super().load_config(pretrained_model_name_or_path, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        if names_arrays(config.get("covariance")):
            arrays = read_arrays(str(pretrained_model_name_or_path), kwargs)
            config["covariance"] = Recipe(config["covariance"], arrays)
        return result

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write scheduler_config.json and, where Σ has arrays, covariance.safetensors."""
        os.makedirs(save_directory, exist_ok=True)
        save_arrays(self.covariance.tensors(), Path(save_directory))
        super().save_config(save_directory, push_to_hub=push_to_hub, **kwargs)


VARIANCES = {"fixed_small": "posterior", "fixed_large": "beta"}  # diffusers': ours
ALGORITHMS: dict[str, Algorithm] = {
    "ddpm": Algorithm("ancestral", 0, lambda config, eta: {"variance": VARIANCES[config["variance_type"]]}),
    "ddim": Algorithm("ddim", 0, lambda config, eta: {"eta": eta}),
    "dpmsolver++": Algorithm("dpmpp_2m", 1, lambda config, eta: {}),
}
