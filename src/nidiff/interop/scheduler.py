"""A diffusers scheduler whose noise is N(0, Σ): the steps of `nidiff.sampling` behind diffusers' interface."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from nidiff.covariance.config import SCHEDULER, Config, as_covariance, save_arrays
from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.mixture import MixtureModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import CLEAN, Level, Schedule
from nidiff.diffusion.spacing import check_rows
from nidiff.diffusion.target import Target, V
from nidiff.errors import InputError
from nidiff.files import as_path, blaming, locked, read_object, writing
from nidiff.interop.config import DOWNLOAD, downloaded, is_flow, translated
from nidiff.model.config import (
    ALGORITHMS,
    FIELDS,
    FILES,
    VARIANCES,
    arrays,
    check_fields,
    configured,
    scheduler_config,
    with_arrays,
    without_kappa,
)
from nidiff.model.folder import check_same_covariance
from nidiff.model.manifest import MANIFEST, check_manifest
from nidiff.precision import widest
from nidiff.randomness import Generators
from nidiff.recipe import check_whole
from nidiff.sampling.angle import angle_rows
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sampling.step import Chain, Past, moved


class NonIsotropicScheduler(SchedulerMixin, ConfigMixin):
    """DDPM, DDIM, DPM-Solver++(2M), Euler, iPNDM and the samplers of the data's Gaussian for
    x = signal · x0 + sigma · Σ^½ · eps.

    Wherever diffusers takes or draws noise, noise is white here too and is coloured inside, so a training script stays
    as it is; the initial sample comes from `init_noise`. With Σ = I this is `DDPMScheduler`, `DDIMScheduler`
    (``use_clipped_model_output=True`` where x̂0 is clipped) and `DPMSolverMultistepScheduler` (``clip_sample=False``),
    step by step. As in `nidiff.sample`, the last step gives x̂0, except for those of the Gaussian.

    Args:
        covariance: Σ, what its ``to_config()`` returned, or a folder that holds one.
        schedule: a `nidiff.Schedule`, its configuration, or text such as "ddpm_linear:num_levels=1000".
        prediction_type: "epsilon" (white), "sample", "v_prediction", "noise" (coloured), "score", "velocity",
            "residual" (which needs ``gaussian``), or a target of yours (a `Target`, or its name in `TARGETS`).
        algorithm: "ddpm", "ddim", "dpmsolver++", "euler", "ipndm", or, with ``gaussian``, "angle", "angle_2m" or
            "gaussian_2m". The default is that of `nidiff.sample`.
        variance_type: of ddpm, "fixed_small" (β̃) or "fixed_large" (β).
        clip_sample: clip x̂0 to ±``clip_sample_range``, in pixels.
        timestep_spacing: "leading", "linspace", "trailing", or "angle" (equal steps of the mean angle, which needs a
            gaussian). Default: "angle" for those that need one, else "trailing".
        num_train_timesteps: the number of levels, which is the schedule's; recorded for scripts that ask for it.
        scaling: the units of the data, recorded for the model that is saved with this scheduler.
        gaussian: the `nidiff.GaussianModel` of the data, or what its ``to_config()`` returned.
        sees: what the network is given: "x", "z" or "both", as in `nidiff.Denoiser`. `scale_model_input` makes it.
        kappa: of `nidiff.design.measure_kappa`, for the angle samplers; it is saved with the gaussian.
        mixture: the data's, of `nidiff.fit_mixture`, or what its ``to_config()`` returned, recorded for the model: the
            steps here begin at the prior.
        conditions: those that the network was trained with, as in `nidiff.Denoiser`, recorded for the model.
        steps_offset: added to the timesteps of "leading", 1 in Stable Diffusion.
    """

    order = 1
    _compatibles: list[str] = []  # noqa: RUF012  (diffusers' own form; a scheduler for white noise is none)

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        covariance: Covariance | Mapping[str, Any] | str | Path,
        schedule: Schedule | Mapping[str, Any] | str = "ddpm_linear:num_levels=1000",
        prediction_type: str | Target = "epsilon",
        algorithm: str = "dpmsolver++",
        variance_type: str = "fixed_small",
        clip_sample: bool = True,
        clip_sample_range: float = 1.0,
        timestep_spacing: str | None = None,
        num_train_timesteps: int | None = None,
        scaling: Scaling | Mapping[str, Any] | None = None,
        gaussian: GaussianModel | Mapping[str, Any] | None = None,
        sees: str | None = None,
        kappa: Kappa | None = None,
        mixture: MixtureModel | Mapping[str, Any] | None = None,
        conditions: Mapping[str, Any] | None = None,
        steps_offset: int = 0,
    ) -> None:
        check_whole("steps_offset", steps_offset, 0)
        self._model = configured(self.config, torch.nn.Identity())
        self.process, self.covariance = self._model.process, self._model.process.covariance
        self.scaling = self._model.scaling
        if SAMPLERS[ALGORITHMS[algorithm]].spacing == "angle":
            require_gaussian(self._model.gaussian, "algorithm", algorithm)
        # Objects become their configuration. diffusers counts positional arguments among the defaults, which
        # `from_config` then leaves out.
        plain = scheduler_config(self._model) | {"kappa": None}  # it is with the Gaussian now
        for key in ("_class_name", "algorithm", "timestep_spacing", "clip_sample", "clip_sample_range"):
            plain.pop(key)
        if timestep_spacing is None:
            spacing = SAMPLERS[ALGORITHMS[algorithm]].spacing
            plain["timestep_spacing"] = spacing if spacing == "angle" else "trailing"
        self.register_to_config(**plain, _use_default_values=[])
        self.init_noise_sigma = self.process.schedule.prior_scale
        self.alphas_cumprod = torch.sigmoid(self.process.schedule.mean_logsnr).float()  # signal² / (signal² + sigma²)
        self.set_timesteps(timesteps=range(len(self) - 1, -1, -1))
        self.num_inference_steps: int | None = None  # as in diffusers until `set_timesteps` is called

    def __len__(self) -> int:
        return len(self.process.schedule)

    def denoiser(self, net: Callable[..., Any]) -> Denoiser:
        """``net`` as a `nidiff.Denoiser` with the process, prediction, clipping and scaling of this scheduler."""
        return self._model.with_net(net)

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The scheduler of a configuration: of this class, or, with ``covariance=``, of a scheduler of diffusers that
        has β: DDPM, DDIM, DPMSolverMultistep, Euler, PNDM (as of Stable Diffusion 1.5), or, with ``algorithm=``, any
        other. Unlike in diffusers, a field that has no meaning here is refused."""
        theirs = ("beta_schedule" in config or is_flow(config)) and "schedule" not in config
        config = {"covariance": None, **(translated(config, kwargs.get("algorithm")) if theirs else config)}
        check_fields(config | {key: kwargs[key] for key in kwargs if key in FIELDS or not return_unused_kwargs})
        stale = {"_use_default_values", "beta_schedule"}  # fields that diffusers would leave out; always the same
        if theirs and SAMPLERS[ALGORITHMS.get(str(kwargs.get("algorithm")), "ddim")].spacing == "angle":
            stale.add("timestep_spacing")  # that of the other algorithm
        if "schedule" in kwargs:
            stale |= {"num_train_timesteps", "kappa"}  # those of the other one
            if isinstance(gaussian := config.get("gaussian"), Config):
                config["gaussian"] = without_kappa(gaussian)
        config = {key: value for key, value in config.items() if key not in stale}
        kwargs.pop("beta_schedule", None)
        return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], subfolder: str = "", **kwargs: Any
    ) -> Any:
        """The scheduler in a folder or on the Hub, with fields of ``kwargs``; another ``covariance`` is refused."""
        fetching = {key: kwargs.pop(key) for key in DOWNLOAD if key in kwargs}
        covariance = kwargs.pop("covariance", None)
        place, inside = as_path("pretrained_model_name_or_path", pretrained_model_name_or_path), subfolder or ""
        if not place.exists():
            names = SCHEDULER, *(name for name, _ in FILES.values())
            place = downloaded(place, [str(Path(inside, name)) for name in names], fetching)
        file = place if place.is_file() else place / inside / SCHEDULER
        if file.parent.name == "scheduler" and (file.parent.parent / MANIFEST).is_file():
            check_manifest(file.parent.parent, ["scheduler"])
        config = with_arrays(read_object(file), file)
        if covariance is not None:
            check_same_covariance(as_covariance(config.get("covariance", {})), as_covariance(covariance))
        with blaming(file):
            return cls.from_config(config, **kwargs)

    def save_config(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write scheduler_config.json and, where Σ, the schedule or the data's Gaussian have arrays, those."""
        folder = as_path("save_directory", save_directory)
        with writing("save_directory", folder), locked(folder):
            for name, tensors in arrays(self.config).items():
                save_arrays(tensors, folder, name)
            super().save_config(folder, push_to_hub=push_to_hub, **kwargs)

    # The forward process -----------------------------------------------------------------------------------------

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """x = signal · x0 + sigma · Σ^½ noise, with **white** noise (``torch.randn_like``), as for every scheduler."""
        return self.process.perturb(original_samples, self._level(timesteps, original_samples), noise)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v = signal · Σ^½ noise − sigma · x0, what "v_prediction" learns; ``sample`` is x0, ``noise`` is white."""
        self.process.check_batch("sample", sample)
        return V.encode(sample, noise, self._level(timesteps, sample), self.covariance)

    def init_noise(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Where sampling starts: N(0, init_noise_sigma² Σ); with a schedule that keeps signal to the end, as `heat`
        does, the data's Gaussian at the first of ``timesteps``. ``generator`` is one, or a list of one per image."""
        if self.process.schedule.forgets:
            return self.process.prior(shape, generator, dtype=dtype, device=device)
        gaussian = require_gaussian(self._model.gaussian, "schedule", self.process.schedule)
        first, work = self.process.schedule.level(self._rows[0]), torch.promote_types(dtype, torch.float32)
        state = gaussian.at(first, self.covariance)
        return gaussian.sample(shape, generator, state=state, dtype=work, device=device).to(dtype)

    # The reverse process -----------------------------------------------------------------------------------------

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        """Choose the levels to visit: so many with ``timestep_spacing``, or the falling ``timesteps`` themselves, which
        may begin below the noisiest one (image to image)."""
        if timesteps is None:
            rows = [*self._spaced(num_inference_steps)]
        else:
            rows = check_rows("timesteps", [int(row) for row in timesteps], len(self))
        self._rows, self.num_inference_steps = rows, len(rows)
        self.timesteps = torch.tensor(rows, device=device)
        self._from_prior = timesteps is None or rows[0] == len(self) - 1
        self._past: tuple[int, Chain, Tensor] | None = None  # index of the last step, its chain and what it returned

    def _spaced(self, count: Any) -> Sequence[float]:
        """``count`` falling rows as diffusers spaces them (Lin et al. 2024, table 2): its DPM-Solver++ lays out one row
        more, as far as there is one, and leaves out the least noisy one, except in "trailing"."""
        levels, spacing = len(self), self.config["timestep_spacing"]
        count = check_whole("num_inference_steps", count, 1, levels)
        if spacing == "angle":
            return angle_rows(self.process, require_gaussian(self._model.gaussian, "timestep_spacing", spacing), count)
        laid_out = min(count + (self.config["algorithm"] == "dpmsolver++"), levels)
        if spacing == "leading":
            rows = np.arange(laid_out)[::-1] * (levels // laid_out) + self.config["steps_offset"]
            rows = rows.clip(max=levels - 1)
        elif spacing == "linspace":
            rows = np.linspace(0, levels - 1, laid_out).round()[::-1]
        else:
            rows = np.arange(levels, 0, -levels / count).round() - 1
        return rows[:count].astype(int).tolist()

    def previous_timestep(self, timestep: int | Tensor) -> Tensor:
        """The level that `step` goes to from ``timestep``; −1 is the clean image."""
        index = self._index(timestep)
        return self.timesteps[index + 1] if index + 1 < len(self.timesteps) else torch.tensor(-1)

    def scale_model_input(self, sample: Tensor, timestep: int | Tensor | None = None) -> Tensor:
        """What the network is given: the sample as it is, or with ``sees`` "z" or "both" what these say."""
        if self._model.sees == "x":
            return sample
        if isinstance(timestep, Tensor) and timestep.numel() > 1:
            level = self._level(timestep, sample)
        else:
            level = self.process.schedule.level(self._rows[self._index(timestep)])
        return self._model.network_input(sample.to(torch.promote_types(sample.dtype, torch.float32)), level).to(sample)

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
    ) -> DDPMSchedulerOutput | tuple[Tensor, Tensor]:
        """From the level ``timestep`` to the next one, given what the network says at ``sample``.

        dpmsolver++ is of second order where ``sample`` is what the step before returned, and else of first.

        Args:
            generator: the source of fresh noise: one, or a list of one per image.
            variance_noise: **white** noise to use instead.
            eta: of ddim, from 0 (deterministic) to 1 (ddpm).
        """
        output = model_output.to(torch.promote_types(sample.dtype, torch.float32))
        answered = self._model.with_zero_net().with_net(lambda x, label, **conditions: output)
        result = self.step_with(answered, timestep, sample, generator, variance_noise, eta=eta)
        return result if return_dict else (result.prev_sample, result.pred_original_sample)

    def step_with(
        self,
        denoiser: Denoiser,
        timestep: int | Tensor,
        sample: Tensor,
        generator: Generators = None,
        variance_noise: Tensor | None = None,
        *,
        eta: float = 0.0,
    ) -> DDPMSchedulerOutput:
        """The same, by what a ``denoiser`` says at ``sample``: `denoiser` of this scheduler, with conditions, guidance
        or an observation (`nidiff.Denoiser.given`, `guided`, `nidiff.posterior`)."""
        if denoiser.process is not self.process:
            raise InputError("denoiser", None, "has another process", "make it by scheduler.denoiser(net)")
        self.process.check_batch("sample", sample)
        index, algorithm = self._index(timestep), self.config["algorithm"]
        if isinstance(generator, int | float):  # the fourth argument of `DDIMScheduler.step` is eta
            raise InputError("generator", generator, "is a number", "give `eta` by its name")
        if not 0 <= eta <= (algorithm == "ddim"):
            raise InputError("eta", eta, f"cannot be used with algorithm={algorithm!r}", "0 to 1 is for ddim")
        work = torch.promote_types(sample.dtype, torch.float32)
        here, x = self.process.schedule.level(self._rows[index]), sample.to(work)
        if index == 0 and self._from_prior and self.process.schedule.forgets:
            _warn_if_white(self.process, x)

        def noise() -> Tensor:
            if variance_noise is not None:
                return self.covariance.sqrt(variance_noise.to(x))
            return self.process.noise(x.shape, generator, dtype=work, device=x.device)

        x0, pull = denoiser.pulled(x, here)
        sampler, last, seen = SAMPLERS[ALGORITHMS[algorithm]], index + 1 == len(self._rows), Past(here, x0, x)
        chain = self._previous(index, sample) or Chain(denoiser, noise)
        chain.denoiser, chain.noise = denoiser, noise
        if last and not sampler.finishes:
            x = x0
        else:
            options: Any = {"ddpm": {"variance": VARIANCES[self.config["variance_type"]]}, "ddim": {"eta": eta}}
            there = CLEAN if last else self.process.schedule.level(self._rows[index + 1])
            x = sampler.step(chain, x, x0, here, there, **options.get(algorithm, {}))
        x = moved(denoiser, x, pull, last).to(sample.dtype)
        chain.remember(seen)
        self._past = index, chain, x
        return DDPMSchedulerOutput(x, x0.to(sample.dtype))

    def _previous(self, index: int, sample: Tensor) -> Chain | None:
        """The chain of the last step if the sample came from it, up to rounding: not for another batch, or another
        start. For the tensor that it returned no device has to be asked."""
        if self._past is None:
            return None
        place, chain, result = self._past
        if place != index - 1 or result.shape != sample.shape:
            return None
        x, before = sample.detach().float(), result.detach().float()
        return chain if sample is result or bool((x - before).norm() <= 0.01 * before.norm()) else None

    def _index(self, timestep: Any) -> int:
        timestep = timestep.item() if isinstance(timestep, Tensor) and timestep.numel() == 1 else timestep
        if timestep not in self._rows:
            raise InputError("timestep", timestep, "is not among them", "give a number of scheduler.timesteps")
        return self._rows.index(timestep)

    def _level(self, timesteps: Tensor, like: Tensor) -> Level:
        return self.process.schedule.level(torch.as_tensor(timesteps).reshape(-1).cpu().expand(len(like)))


def _warn_if_white(process: Process, x: Tensor) -> None:
    """Warn where white noise of some strength explains the initial sample x better than the prior, by a factor e¹².

    A draw from the prior is better explained by a given other law by that factor with a probability of at most e⁻¹²,
    since the mean of the ratio of densities is 1. A start that is white and passes is hardly less likely under the
    prior than under white noise: a single small image, a Σ that differs from I in few modes.
    """
    x, wide = x.detach(), widest(x.device)
    white = -0.5 * x.numel() * (torch.log(2 * torch.pi * x.to(wide).square().mean()) + 1)
    if bool(white - process.prior_log_prob(x).to(wide).sum() > 12):
        warnings.warn(
            f"The initial sample is not N(0, Σ) with Σ = {process.covariance!r}, so the images will not be the "
            "model's: draw it by scheduler.init_noise(shape), or use nidiff.interop.NonIsotropicPipeline.",
            stacklevel=4,
        )
