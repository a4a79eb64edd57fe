"""The hub: every sampler, loss and likelihood meets a network only as x̂0 = denoiser(x, level)."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from nidiff.covariance.checks import check_has_numbers
from nidiff.diffusion.choice import Choice, nearest_choice
from nidiff.diffusion.condition import FIELDS, Condition, as_conditions, as_rows, check_conditions, take_rows
from nidiff.diffusion.gaussian import GaussianModel, Kappa
from nidiff.diffusion.guidance import make_guidance
from nidiff.diffusion.mixture import MixtureModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level
from nidiff.diffusion.target import EPS, TARGETS, Target
from nidiff.errors import InputError, choose, expect, one_of
from nidiff.recipe import check_number, check_whole

MARGIN = 1e3  # how large the images and outputs may be that a level multiplies
FEW = 33  # rows that are looked at where each is a table
NEEDS_GAUSSIAN = "give the denoiser gaussian=nidiff.fit_gaussian(data)"
Estimate = Callable[[Tensor, Level], Tensor]  # (x, level) -> x̂0


class Correction(Protocol):
    """Another x̂0, made of that of a denoiser: guidance, or what an observation says."""

    def bind(self, denoiser: "Denoiser") -> Estimate:
        """x̂0 as a function of x and the level; ``denoiser`` is the one without this correction."""


class Denoiser(torch.nn.Module):
    """A network, the process it was trained on and what it predicts; called with (x, level) it gives x̂0.

    ``net(x, label)`` is called in its own dtype; it returns a tensor, or an object with the tensor in ``.sample`` as
    diffusers' models do. ``target`` is a name in `TARGETS`, or a `Target`. x̂0 is clipped to [−clip, clip] in pixel
    space, which is not whitening-equivariant. ``scaling`` gives the units of the data; None if the data are x itself.

    ``gaussian`` is a Gaussian model of the data, which target "residual" and the `angle` samplers need. ``sees`` is
    what the network is given: "x"; "z", x centred and scaled to variance 1 in every mode (the default of "residual");
    or "both", in this order along the axis of channels. ``kappa`` is that of `nidiff.design.measure_kappa`. ``mixture``
    is a finer model of the data than the Gaussian, which `start="mixture"` of `nidiff.sample` needs.

    ``conditions`` are those that the network was trained with, by name; ``condition_values`` and ``corrections`` are
    set by `given`, `guided` and `corrected`. ``choices`` are the samplers for few steps that `nidiff.metrics.tune` has
    chosen.
    """

    def __init__(
        self,
        net: Callable[..., Any],
        process: Process,
        target: str | Target = "eps",
        clip: float | None = None,
        scaling: Scaling | None = None,
        *,
        gaussian: GaussianModel | None = None,
        sees: str | None = None,
        kappa: Kappa | None = None,
        mixture: MixtureModel | None = None,
        conditions: Mapping[str, Condition] | None = None,
        condition_values: Mapping[str, Any] | None = None,
        corrections: Sequence[Correction] = (),
        choices: Sequence[Choice] = (),
    ) -> None:
        super().__init__()
        self.net = net
        self.training = net.training if isinstance(net, torch.nn.Module) else self.training
        self.process, self.gaussian, self.kappa, self.scaling = process, gaussian, kappa, scaling
        self._chosen = chosen = choose("target", target, TARGETS)
        if gaussian is not None:
            gaussian.check_basis(process.covariance)
            gaussian.at(process.schedule.level(len(process.schedule) // 2), process.covariance)  # in one basis
        if isinstance(chosen, Target):
            self.target = chosen
        else:
            self.target = chosen(require_gaussian(gaussian, "target", target), process.covariance)
        self.sees = one_of("sees", sees or ("x" if self.target is chosen else "z"), ("x", "z", "both"))
        if self.sees != "x":
            require_gaussian(gaussian, "sees", self.sees)
        if kappa is not None:
            kappa.check(require_gaussian(gaussian, "kappa"), len(process.schedule))
        self.mixture = mixture
        if mixture is not None:
            self._check_mixture(mixture)
        self.clip = None if clip is None else check_number("clip", clip, above=0.0)
        self._trainable: set[torch.dtype] = set()  # in which its levels were checked
        self.conditions = as_conditions(conditions)
        self.condition_values: dict[str, Any] = dict(condition_values or {})
        self.corrections, self.choices = tuple(corrections), tuple(choices)
        self._corrected: Estimate | None = None
        if self.corrections:
            self._corrected = self.corrections[-1].bind(self._with(corrections=self.corrections[:-1]))

    def forward(self, x: Tensor, level: Level) -> Tensor:
        """x̂0, the expected clean image given x: the expected denoised sample (eq. 23, corrected by E10)."""
        x0 = self.unclipped(x, level)
        return x0 if self.clip is None else x0.clamp(-self.clip, self.clip)

    def unclipped(self, x: Tensor, level: Level) -> Tensor:
        """x̂0 before it is clipped."""
        if self._corrected is None:
            return self.target.decode(self.output(x, level), x, level, self.process.covariance)
        return self._corrected(x, level)

    def pulled(self, x: Tensor, level: Level) -> tuple[Tensor, Tensor | None]:
        """x̂0, and what is added to the x that a step from here leads to: None but for an observation by methods like
        "dps"."""
        pull = getattr(self._corrected, "pull", None)
        return (self(x, level), None) if pull is None else pull(x, level)

    def deviation(
        self, x: Tensor, x0: Tensor, level: Level, white: Callable[[tuple[int, ...]], Tensor]
    ) -> Tensor | None:
        """A draw of what x0 varies by around the x̂0 at x, given an observation that knows it; else None.

        ``white`` makes numbers of N(0, 1) of a shape.
        """
        vary = getattr(self._corrected, "vary", None)
        return None if vary is None else vary(x, x0, level, white)

    @property
    def target_name(self) -> str | None:
        """The target's name in `TARGETS`; None for one that is not registered."""
        return next((name for name, target in TARGETS.items() if target == self._chosen), None)

    @property
    def device(self) -> torch.device:
        """Where the network is; the CPU for one without parameters."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def clipped(self, clip: float | None) -> "Denoiser":
        """The same with another clipping of x̂0."""
        return self._with(clip=clip)

    def with_net(self, net: Callable[..., Any]) -> "Denoiser":
        """The same with another network."""
        return self._with(net=net)

    def with_gaussian(self, gaussian: GaussianModel | None) -> "Denoiser":
        """The same with another Gaussian model of the data; κ was of the one before."""
        return self._with(gaussian=gaussian, kappa=None, choices=())

    def with_mixture(self, mixture: MixtureModel | None) -> "Denoiser":
        """The same with another mixture as a model of the data; what is known of its start was of the one before."""
        kappa = self.kappa
        if kappa is not None:
            kappa = kappa._replace(losses={key: each for key, each in kappa.losses.items() if key != "mixture"})
        return self._with(mixture=mixture, kappa=kappa, choices=())

    def with_kappa(self, kappa: Kappa | None) -> "Denoiser":
        """The same with another κ."""
        return self._with(kappa=kappa)

    def with_choices(self, choices: Sequence[Choice]) -> "Denoiser":
        """The same with other samplers for few steps."""
        return self._with(choices=choices)

    def choice_for(self, num_steps: int | None) -> Choice | None:
        """The sampler that was chosen for so many evaluations, or the nearest number of them; None if there is none,
        or under guidance or an observation, for which none was."""
        if num_steps is None or self.corrections:
            return None
        return nearest_choice(self.choices, check_whole("num_steps", num_steps))

    def at(self, shape: Sequence[int]) -> "Denoiser":
        """The same on a grid of another ``shape`` of the event: the noise has the same law at the modes that both grids
        have (`Covariance.at`), and so has the data's Gaussian. The network must take such x; κ and the mixture are left
        out."""
        if self.process.schedule.event_shape:
            raise InputError("schedule", None, "has levels per mode, which another grid does not have", "train there")
        if self.scaling is not None and self.scaling.is_per_pixel:
            problem = (
                "is another grid than that of the scaling, the climatology or the domain, which are known on theirs"
            )
            remedy = "use the model's own, or train with one scaling for each channel"
            raise InputError("shape", tuple(shape), problem, remedy)
        process = Process(self.process.schedule, self.process.covariance.at(shape))
        gaussian = None if self.gaussian is None else self.gaussian.on_grid(shape)
        conditions = dict(self.conditions)
        if FIELDS in conditions:
            conditions[FIELDS] = conditions[FIELDS]._replace(shape=(*conditions[FIELDS].shape[:1], *shape))
        return self._with(
            process=process, gaussian=gaussian, kappa=None, mixture=None, conditions=conditions, choices=()
        )

    def given(self, **conditions: Any) -> "Denoiser":
        """The same with values of ``conditions``, keyword arguments of the network (class_labels, …): one row per
        image, or one for all. A condition that is not given has its null value, where the denoiser knows it."""
        check_conditions(self.net, self.conditions, conditions)
        values = {**self.condition_values, **conditions}
        if self.corrections:  # which are bound to the conditions
            return self._with(condition_values=values)
        other = copy(self)  # all else is shared and was checked: a training step does this too
        other._modules = dict(self._modules)  # else another network of the copy would be one of the original
        other.condition_values = values
        return other

    def guided(
        self, scale: float, *, null: Mapping[str, Any] | None = None, interval: Sequence[float] | None = None
    ) -> "Denoiser":
        """The same with classifier-free guidance of its conditions: x̂0(null) + scale (x̂0(conditions) − x̂0(null)).

        Scale 1 is the conditional law, 0 the unconditional one; beyond 1, samples are more typical of the condition and
        less varied. A step takes two calls of the network, one at scale 0 and 1. ``null`` are the values of conditions
        that say "none", by default those of training. Outside the two rows of ``interval`` x̂0 is x̂0(conditions).
        """
        names, rows = self.condition_values, len(self.process.schedule)
        guidance = make_guidance(self.conditions, names, scale, null=null, interval=interval, num_rows=rows)
        return self.corrected(guidance)

    def corrected(self, correction: Correction) -> "Denoiser":
        """The same with ``correction`` of its x̂0: that of `guided`, of `nidiff.posterior`, or one of your own."""
        if getattr(self._corrected, "pull", None) is not None:
            problem = "has an observation by a method that moves x, such as 'dps'"
            raise InputError("denoiser", None, problem, "correct it before `posterior`")
        return self._with(corrections=(*self.corrections, correction))

    def for_images(self, index: Tensor) -> "Denoiser":
        """The same for some of the images [B] that its conditions and observations are for."""
        corrections = [one.for_images(index) if hasattr(one, "for_images") else one for one in self.corrections]
        values = {name: take_rows(value, index) for name, value in self.condition_values.items()}
        return self._with(condition_values=values, corrections=corrections)

    def with_zero_net(self) -> "Denoiser":
        """The same with a network that returns 0."""
        return self._with(net=zero_net, sees="x", conditions={})

    def _check_mixture(self, mixture: MixtureModel) -> None:
        """Refuse a mixture of other items than the Gaussian's, or than Σ is over."""
        expect("mixture", mixture, MixtureModel, "fit it by nidiff.fit_mixture(data)")
        self.process.covariance.check_trailing(mixture.shape, "mixture")
        if self.gaussian is not None and self.gaussian.shape != mixture.shape:
            problem = f"is of items {mixture.shape}, and the Gaussian of {self.gaussian.shape}"
            raise InputError("mixture", None, problem, "fit both to the same data")

    def _with(self, **changes: Any) -> "Denoiser":
        """The same with other arguments of the constructor."""
        arguments = {name: getattr(self, name) for name in signature(Denoiser).parameters} | {"target": self._chosen}
        return Denoiser(**{**arguments, **changes})

    def network_input(self, x: Tensor, level: Level) -> Tensor:
        """What the network is given at x: see ``sees``."""
        if self.sees == "x" or self.gaussian is None:
            return x
        z = self.gaussian.at(level, self.process.covariance).to_z(x)
        return z if self.sees == "z" else torch.cat([x, z], dim=1)

    def output(self, x: Tensor, level: Level) -> Tensor:
        """The output of the network at x."""
        check_has_numbers("x", x)
        if self.gaussian is not None and tuple(x.shape[1:]) != self.gaussian.shape:
            problem = f"has items {tuple(x.shape[1:])}, and the Gaussian is over {self.gaussian.shape}"
            raise InputError("x", None, problem, "give x of that shape, or a Gaussian of these data")
        label = torch.as_tensor(level.label, device=x.device)
        if label.is_floating_point():  # between two rows of the schedule
            label = torch.as_tensor(level.label, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), x.dtype)
        values = {name: condition.absent for name, condition in self.conditions.items()} | self.condition_values
        values = {name: as_rows(name, value, len(x), x.device, dtype) for name, value in values.items()}
        output = as_tensor(self.net(self.network_input(x, level).to(dtype), label.expand(len(x)), **values)).to(x.dtype)
        if output.shape != x.shape:
            problem = f"returned shape {tuple(output.shape)} for x of shape {tuple(x.shape)}"
            raise InputError("net", None, problem, "make them equal")
        return output

    def check_levels(self, dtype: torch.dtype, rows: Sequence[float] | None = None) -> None:
        """Refuse ``rows`` of the schedule at which sampling overflows in ``dtype``; without any, at which the loss may,
        which is looked at once."""
        if rows is None and dtype in self._trainable:
            return
        schedule = self.process.schedule
        wanted = torch.arange(len(schedule)) if rows is None else torch.tensor([*rows])
        if schedule.event_shape or self.gaussian is not None:  # a table of modes per row: the ends and a few between
            wanted = wanted[torch.linspace(0, len(wanted) - 1, min(len(wanted), FEW)).round().long()]
        level = schedule.level(wanted)
        a, b = self.target.coefficients(level.signal, level.sigma)
        numbers = [level.sigma, a, b, a * level.sigma]
        if rows is None:
            numbers.append(self.target.eps_error(level)[0])
        largest = torch.stack([each.largest.expand(len(wanted)) for each in numbers]).amax(0)
        beyond = ~(largest < torch.finfo(dtype).max / MARGIN)
        if bool(beyond.any()):
            worst = int(beyond.nonzero()[-1])
            signal, sigma = (modes.largest[worst].item() for modes in (level.signal, level.sigma))
            problem = f"overflows {dtype} at a level of signal {signal:.2g} and sigma {sigma:.2g}"
            remedy = "use a schedule of a narrower range, or `target` 'x0' or 'v'"
            raise InputError("schedule", schedule, problem, remedy)
        if rows is None:
            self._trainable.add(dtype)

    def variance(self, level: Level, kappa: bool = True, *, over_noise: bool = False) -> Any:
        """Var[x0 | x] of every mode, or that ``over_noise``, divided by Σ: what the data's Gaussian says, times 1 − κ,
        the share that the network leaves of it, if κ is known and asked for.

        κ is capped at 0.9; otherwise a mode with zero variance would ignore the observation.
        """
        gaussian, covariance = require_gaussian(self.gaussian, "denoiser"), self.process.covariance
        variance = gaussian.at(level, covariance).spread ** 2
        if kappa and self.kappa is not None:
            share, _ = self.kappa.at(level, gaussian)
            variance = variance * (1.0 - share.map(lambda values: values.clamp(max=0.9)))
        return variance / covariance if over_noise else variance

    def eps(self, x: Tensor, level: Level) -> Tensor:
        """The white eps in x: Σ^-½ (x − signal · x̂0) / sigma."""
        return EPS.invert(self(x, level), x, level, self.process.covariance)

    def score(self, x: Tensor, level: Level) -> Tensor:
        """∇ log p(x) = Σ⁻¹ (signal · x̂0 − x) / sigma² (eq. 22, corrected by E10)."""
        return self.process.conditional_score(x, self(x, level), level)


def zero_net(x: Tensor, label: Tensor, **conditions: Any) -> Tensor:
    """A network that says 0."""
    return torch.zeros_like(x)


def as_tensor(result: Any) -> Tensor:
    """What a network returned: a tensor, or an object that has it in ``.sample``, as diffusers' models do."""
    tensor = result if isinstance(result, Tensor) else getattr(result, "sample", None)
    if not isinstance(tensor, Tensor):
        raise InputError("net", None, f"returned a {type(result).__name__}", "return a tensor, or one in .sample")
    return tensor


def require_gaussian(gaussian: GaussianModel | None, argument: str, value: object = None) -> GaussianModel:
    """The data's Gaussian, which this value of an argument needs, if it is known."""
    if gaussian is None:
        raise InputError(argument, value, "needs the data's Gaussian", NEEDS_GAUSSIAN)
    return gaussian


def check_denoiser(denoiser: object) -> None:
    """Refuse a bare network, or anything else, where a denoiser is meant."""
    expect("denoiser", denoiser, Denoiser, "wrap the network as nidiff.Denoiser(net, process)")
