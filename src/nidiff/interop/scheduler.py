"""A diffusers scheduler whose noise is N(0, Σ): the steps of `nidiff.sampling` behind diffusers' interface."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from nidiff.covariance.config import SCHEDULER, Config, as_covariance, save_arrays
from nidiff.covariance.covariance import Covariance
from nidiff.diffusion.denoiser import Denoiser, require_gaussian
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.mixture import MixtureModel
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import CLEAN, Level, Schedule
from nidiff.diffusion.spacing import check_rows
from nidiff.diffusion.target import Target, V
from nidiff.errors import InputError, one_of
from nidiff.files import as_path, blaming, locked, read_object, writing
from nidiff.interop.config import DOWNLOAD, FLOW_FIELDS, downloaded, flow_fields, is_flow, translated, with_flow
from nidiff.interop.flow import FlowNetwork, packed, row_of_sigma, time_shift, unpacked, visited_rows
from nidiff.interop.start import StartCheck
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
from nidiff.randomness import Generators
from nidiff.recipe import check_whole
from nidiff.sampling.angle import angle_rows
from nidiff.sampling.sampler import SAMPLERS
from nidiff.sampling.step import Chain, Past, moved

SHAPES = 32  # for which Σ is kept: a matrix of 5000 pixels has eigenvectors of 200 MB


class NonIsotropicScheduler(SchedulerMixin, ConfigMixin):
    """DDPM, DDIM, DPM-Solver++(2M), Euler, iPNDM and the samplers of the data's Gaussian for
    x = signal · x0 + sigma · Σ^½ · eps.

    Latents of another shape than Σ was made for have ``covariance.at(shape)``: one scheduler serves all shapes of a
    bucketed data set. With flow matching, tokens [B, L, 4 C] are packed latents, as in Flux.

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
        flow: for flow matching, fields of FlowMatchEulerDiscreteScheduler (``shift``, ``use_dynamic_shifting``, …),
            which `from_config` takes from its configuration. Timesteps are then 1000 · sigma, and
            `set_timesteps` chooses them as that scheduler does. It needs the schedule `nidiff.schedules.flow`.
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
        flow: Mapping[str, Any] | None = None,
    ) -> None:
        check_whole("steps_offset", steps_offset, 0)
        self._model = configured(self.config, torch.nn.Identity())
        self.process, self.covariance = self._model.process, self._model.process.covariance
        self.scaling = self._model.scaling
        if SAMPLERS[ALGORITHMS[algorithm]].spacing == "angle":
            require_gaussian(self._model.gaussian, "algorithm", algorithm)
        # Objects become their configuration. diffusers counts positional arguments among the defaults, which
        # `from_config` then leaves out.
        plain = scheduler_config(self._model) | {"kappa": None, "flow": None}  # with the Gaussian, and below
        for key in ("_class_name", "algorithm", "timestep_spacing", "clip_sample", "clip_sample_range"):
            plain.pop(key)
        if timestep_spacing is None:
            spacing = SAMPLERS[ALGORITHMS[algorithm]].spacing
            plain["timestep_spacing"] = spacing if spacing == "angle" else "trailing"
        if flow is not None:
            if not isinstance(flow, Mapping):
                raise InputError("flow", flow, "is not a mapping", 'give fields, such as {"shift": 3.0}')
            for key in flow:
                one_of("flow", key, FLOW_FIELDS)
            time_shift("schedule", self.process.schedule)
            flow = flow_fields(flow)
        self.register_to_config(**plain, **(flow or {}), _use_default_values=[])
        self._flow = None if flow is None else FlowMatchEulerDiscreteScheduler(len(self), **flow)
        self._models: dict[tuple[int, ...], Denoiser] = {}  # of other shapes than Σ's, the latest last
        self._grid = tuple(self.covariance.event_shape[-2:])  # (H, W) of packed latents: see `_unpacked`
        self._grids = {self._grid}  # all that are known
        self._start = StartCheck()
        self.begin_index: int | None = None
        self.init_noise_sigma = self.process.schedule.prior_scale
        self.alphas_cumprod = torch.sigmoid(self.process.schedule.mean_logsnr).float()  # signal² / (signal² + sigma²)
        self._visit(range(len(self) - 1, -1, -1), None if self._flow is None else self._flow.timesteps)
        self.num_inference_steps: int | None = None  # as in diffusers until `set_timesteps` is called

    def __len__(self) -> int:
        return len(self.process.schedule)

    def denoiser(self, net: Callable[..., Any], shape: Sequence[int] | None = None) -> Denoiser:
        """``net`` as a `nidiff.Denoiser` with the process, prediction, clipping and scaling of this scheduler; for
        latents of another ``shape`` than Σ's, with the Σ of that shape."""
        model = self._model if shape is None else self._model_of(shape)
        return model.with_net(net if self._flow is None else FlowNetwork(net, self.process.schedule))

    def _model_of(self, shape: Sequence[int]) -> Denoiser:
        """The model with the Σ of latents of this shape [..., *event]."""
        axes = len(self.covariance.event_shape)
        event = tuple(shape[-axes:])
        if len(shape) <= axes or event == self.covariance.event_shape:
            return self._model
        try:
            model = self._models.pop(event, None) or self._model.at(event)
        except InputError as error:
            problem = f"is over {self.covariance.event_shape} and has no form for latents of {event} ({error})"
            remedy = "make a scheduler for each shape, or take a Σ with a formula, such as offset or matern"
            raise InputError("covariance", self.covariance, problem, remedy) from error
        self._models[event] = model
        if len(self._models) > SHAPES:
            del self._models[next(iter(self._models))]
        return model

    def _seen(self, shape: Sequence[int]) -> None:
        """Packed latents that follow are of this shape."""
        if len(shape) > 3:
            self._grid = tuple(shape[-2:])
            self._grids.add(self._grid)

    def _unpacked(self, x: Tensor, starts: bool = False) -> Tensor:
        """The tokens of Flux as latents: of the shape that came last in `init_noise` or `scale_noise`, or, for the
        start of a run, of the shape in which it was drawn. If none is known, it is Σ's own."""
        if self._flow is None or x.ndim != 3 or self.covariance.is_constant or len(self._grid) == 1:
            return x
        fitting = [grid for grid in self._grids if math.prod(grid) == 4 * x.shape[1]]
        if starts and (shape := self._start.shape_of(x)) is not None and shape[-2:] in fitting:
            self._grid = tuple(shape[-2:])
        elif len(fitting) > 1 and (starts or self._grid not in fitting):
            names = " or ".join(map(str, sorted(fitting)))
            problem = f"is {x.shape[1]} tokens, of latents of {names}"
            remedy = "start from nidiff.interop.packed of what init_noise((B, C, H, W)) of this scheduler drew"
            raise InputError("sample", None, problem, remedy)
        elif self._grid not in fitting and fitting:
            self._grid = fitting[0]
        return unpacked(x, [self._grid])

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The scheduler of a configuration: of this class, or, with ``covariance=``, of a scheduler of diffusers that
        has β: DDPM, DDIM, DPMSolverMultistep, Euler, PNDM (as of Stable Diffusion 1.5), FlowMatchEulerDiscrete (SD3,
        Flux), or, with ``algorithm=``, any other. Unlike in diffusers, a field that has no meaning here is refused."""
        theirs = ("beta_schedule" in config or is_flow(config)) and "schedule" not in config
        if is_flow(config) or "shift" in config:
            changed = {key: kwargs.pop(key) for key in FLOW_FIELDS if key in kwargs}
            config = {**config, **changed} if theirs else with_flow(config, changed)
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
        x0 = self._unpacked(original_samples)
        x = self._model_of(x0.shape).process.perturb(x0, self._level(timesteps, x0), self._unpacked(noise))
        return x if x0 is original_samples else packed(x)

    def scale_noise(self, sample: Tensor, timestep: Tensor, noise: Tensor) -> Tensor:
        """`add_noise`, as pipelines of flow matching call it."""
        self._seen(sample.shape)
        return self.add_noise(sample, noise, timestep)

    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """v = signal · Σ^½ noise − sigma · x0, what "v_prediction" learns; ``sample`` is x0, ``noise`` is white."""
        process = self._model_of(sample.shape).process
        process.check_batch("sample", sample)
        return V.encode(sample, noise, self._level(timesteps, sample), process.covariance)

    def init_noise(
        self,
        shape: Sequence[int],
        generator: Generators = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Where sampling starts: N(0, init_noise_sigma² Σ); with a schedule that keeps signal to the end, as `heat`
        does, the data's Gaussian at the first of ``timesteps``. ``generator`` is one, or a list of one per image."""
        model = self._model_of(shape)
        if self.process.schedule.forgets:
            x = model.process.prior(shape, generator, dtype=dtype, device=device)
            self._start.drawn(x)
            self._seen(shape)
            return x
        gaussian = require_gaussian(model.gaussian, "schedule", self.process.schedule)
        first, work = self.process.schedule.level(self._rows[0]), torch.promote_types(dtype, torch.float32)
        state = gaussian.at(first, self.covariance)
        return gaussian.sample(shape, generator, state=state, dtype=work, device=device).to(dtype)

    # The reverse process -----------------------------------------------------------------------------------------

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        timesteps: Sequence[int] | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
    ) -> None:
        """Choose the levels to visit: so many with ``timestep_spacing``, or the falling ``timesteps`` themselves, which
        may begin below the noisiest one (image to image). With flow matching diffusers chooses them: give their number
        or ``sigmas``, which it shifts, and with ``use_dynamic_shifting`` also ``mu``."""
        from_prior = True
        if self._flow is not None:
            if timesteps is not None:
                remedy = "give `sigmas` instead, from 1 downwards, which are then shifted"
                raise InputError("timesteps", None, "cannot be chosen with flow matching", remedy)
            rows = visited_rows(self._flow, self.process.schedule, num_inference_steps, sigmas, mu)
            from_prior = rows[0] == len(self) - 1
        elif sigmas is not None or mu is not None:
            argument = "mu" if sigmas is None else "sigmas"
            raise InputError(argument, None, "is for flow matching only", "leave it out, or give `timesteps`")
        elif timesteps is None:
            rows = [*self._spaced(num_inference_steps)]
        else:
            rows = check_rows("timesteps", [int(row) for row in timesteps], len(self))
            from_prior = rows[0] == len(self) - 1
        self._visit(rows, None if self._flow is None else self._flow.timesteps, device, from_prior)

    def _visit(
        self, rows: Sequence[float], timesteps: Tensor | None, device: Any = None, from_prior: bool = True
    ) -> None:
        """The next steps go through these rows of the schedule. A caller names each of them by an entry of
        ``timesteps``, or, if that is None, by the row itself; ``from_prior`` if the first is the noisiest."""
        self._rows, self.num_inference_steps = [*rows], len(rows)
        timesteps = torch.tensor(self._rows) if timesteps is None else timesteps
        self.timesteps, self._names = timesteps.to(device), timesteps.tolist()
        self._from_prior, self.begin_index = from_prior, None
        if self._flow is not None:
            self.sigmas = self._flow.sigmas
        self._past: tuple[int, Chain, Tensor] | None = None  # index of the last step, its chain and what it returned

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Called by pipelines that start below the first of ``timesteps``. A step finds its place by its timestep."""
        self.begin_index = begin_index

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
        model = self._model_of(sample.shape)
        return model.network_input(sample.to(torch.promote_types(sample.dtype, torch.float32)), level).to(sample)

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
        starts = self._from_prior and self._index(timestep) == 0
        x = self._unpacked(sample, starts)
        output = self._unpacked(model_output).to(torch.promote_types(sample.dtype, torch.float32))
        answered = self._model_of(x.shape).with_zero_net().with_net(lambda x, label, **conditions: output)
        noise = None if variance_noise is None else self._unpacked(variance_noise)
        result = self._step(answered, timestep, x, generator, noise, eta)
        if x is not sample:
            result = DDPMSchedulerOutput(packed(result.prev_sample), packed(result.pred_original_sample))
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
        if denoiser.process is not self._model_of(sample.shape).process:
            remedy = "make it by scheduler.denoiser(net), or, for another shape than Σ's, denoiser(net, sample.shape)"
            raise InputError("denoiser", None, "has another process", remedy)
        return self._step(denoiser, timestep, sample, generator, variance_noise, eta)

    def _step(
        self, denoiser: Denoiser, timestep: Any, sample: Tensor, generator: Generators, white: Tensor | None, eta: float
    ) -> DDPMSchedulerOutput:
        process = denoiser.process
        process.check_batch("sample", sample)
        index, algorithm = self._index(timestep), self.config["algorithm"]
        if isinstance(generator, int | float):  # the fourth argument of `DDIMScheduler.step` is eta
            raise InputError("generator", generator, "is a number", "give `eta` by its name")
        if not 0 <= eta <= (algorithm == "ddim"):
            raise InputError("eta", eta, f"cannot be used with algorithm={algorithm!r}", "0 to 1 is for ddim")
        work = torch.promote_types(sample.dtype, torch.float32)
        here, x = process.schedule.level(self._rows[index]), sample.to(work)
        if index == 0 and self._from_prior and process.schedule.forgets:
            self._start(process, x, self._remedy())

        def noise() -> Tensor:
            if white is not None:
                return process.covariance.sqrt(white.to(x))
            return process.noise(x.shape, generator, dtype=work, device=x.device)

        x0, pull = denoiser.pulled(x, here)
        sampler, last, seen = SAMPLERS[ALGORITHMS[algorithm]], index + 1 == len(self._rows), Past(here, x0, x)
        chain = self._previous(index, sample) or Chain(denoiser, noise)
        chain.denoiser, chain.noise = denoiser, noise
        if last and not sampler.finishes:
            x = x0
        else:
            options: Any = {"ddpm": {"variance": VARIANCES[self.config["variance_type"]]}, "ddim": {"eta": eta}}
            there = CLEAN if last else process.schedule.level(self._rows[index + 1])
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
        if timestep not in self._names:
            raise InputError("timestep", timestep, "is not among them", "give a number of scheduler.timesteps")
        return self._names.index(timestep)

    def _level(self, timesteps: Tensor, like: Tensor) -> Level:
        rows = torch.as_tensor(timesteps).reshape(-1).cpu()
        if self._flow is not None:
            rows = row_of_sigma(self.process.schedule, rows / len(self))
        return self.process.schedule.level(rows.expand(len(like)))

    def _remedy(self) -> str:
        if self._flow is not None:
            return "pass latents=scheduler.init_noise((B, C, H, W)), to Flux nidiff.interop.packed of it"
        return "pass latents=scheduler.init_noise(shape) / scheduler.init_noise_sigma, or use NonIsotropicPipeline"
