"""The hub: every sampler, loss and likelihood meets a network only as x̂0 = denoiser(x, level)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.matrix import Identity
from nidiff.diffusion.process import Process
from nidiff.diffusion.scaling import Scaling
from nidiff.diffusion.schedule import Level, Schedule, broadcast
from nidiff.diffusion.target import TARGETS, Target
from nidiff.errors import InputError, choose, expect, shown
from nidiff.recipe import is_number, plain

MARGIN = 1e3  # how large the images and outputs may be that a level multiplies
ONE = Identity((1,))


class Denoiser(torch.nn.Module):
    """A network, the process it was trained on and what it predicts; called with (x, level) it gives x̂0.

    ``net(x, label)`` is called in its own dtype; it returns a tensor, or an object with the tensor in ``.sample`` as
    diffusers' models do. ``target`` is a name in `TARGETS`, or a `Target`. ``clip`` is None (nothing is clipped) or c:
    x̂0 is clipped to [−c, c] in pixel space, which is not whitening-equivariant. ``scaling`` gives the units of the
    data; None if the data are x itself.
    """

    def __init__(
        self,
        net: Callable[..., Any],
        process: Process,
        target: str | Target = "eps",
        clip: float | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        if not (callable(net) and isinstance(process, Process)):
            raise InputError("Denoiser takes a network and a nidiff.Process: give both, in this order.")
        self.net = net
        self.process = process
        self.target: Target = choose("target", target, TARGETS)
        if not isinstance(self.target, Target):
            raise InputError(f"target={shown(target)} must be a name in TARGETS or a Target.")
        clip = plain(clip)
        if clip is not None and not (is_number(clip) and clip > 0):
            raise InputError(f"clip={shown(clip)} must be a positive number, or None for no clipping.")
        if scaling is not None and not isinstance(scaling, Scaling):
            raise InputError(f"scaling={shown(scaling)} must be a nidiff.Scaling, or None.")
        self.clip = clip
        self.scaling = scaling
        self._trainable: set[torch.dtype] = set()  # in which its levels were checked

    def forward(self, x: Tensor, level: Level) -> Tensor:
        """x̂0, the expected clean image given x: the expected denoised sample (eq. 23, corrected by E10)."""
        x0 = self.target.decode(self.output(x, level), x, level, self.process.covariance)
        return x0 if self.clip is None else x0.clamp(-self.clip, self.clip)

    @property
    def target_name(self) -> str | None:
        """The target's name in `TARGETS`; None for one that is not registered."""
        return next((name for name, target in TARGETS.items() if target == self.target), None)

    @property
    def device(self) -> torch.device:
        """Where the network is; the CPU for one without parameters."""
        return next((parameter.device for parameter in self.parameters()), torch.device("cpu"))

    def clipped(self, clip: float | None) -> "Denoiser":
        """The same with another clipping of x̂0."""
        return Denoiser(self.net, self.process, self.target, clip, self.scaling)

    def with_net(self, net: Callable[..., Any]) -> "Denoiser":
        """The same with another network."""
        return Denoiser(net, self.process, self.target, self.clip, self.scaling)

    def output(self, x: Tensor, level: Level) -> Tensor:
        """What the network says at x, in its own terms."""
        if not (isinstance(x, Tensor) and x.ndim and x.is_floating_point() and isinstance(level, Level)):
            raise InputError("x must be a batch of floats [B, ...], and level a level of the schedule: give both.")
        label = torch.as_tensor(level.label, device=x.device)
        if label.ndim and len(label) not in (1, len(x)):
            raise InputError(f"level is for {len(label)} images, but x has {len(x)}: give one per image.")
        if label.is_floating_point():  # between two rows of the schedule
            label = torch.as_tensor(level.label, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        own = next((p.dtype for p in self.parameters() if p.is_floating_point()), x.dtype)
        output = as_tensor(self.net(x.to(own), label.expand(len(x)))).to(x.dtype)
        if output.shape != x.shape:
            raise InputError(
                f"net returned shape {tuple(output.shape)} for x of shape {tuple(x.shape)}: make them equal."
            )
        return output

    def check_levels(self, dtype: torch.dtype, rows: Sequence[int] | None = None) -> None:
        """Refuse ``rows`` of the schedule at which sampling overflows in ``dtype``; without any, at which the loss may.

        x, x̂0 and, for the loss, what the network is to learn and the weight of its error must be finite.
        """
        schedule = self.process.schedule
        level: Any = schedule.level(torch.arange(len(schedule)) if rows is None else torch.tensor([*rows]))
        a, b = self.target.coefficients(level.signal, level.sigma)
        numbers = [level.sigma, a, b, a * level.sigma]
        if rows is None:
            one = torch.ones(len(schedule), 1, dtype=torch.float64)
            numbers += [self.target.eps_error(level)[0], self.target.encode(one, one, level.like(one), ONE)[:, 0]]
        largest = torch.stack([torch.as_tensor(each).abs().expand(level.sigma.shape) for each in numbers]).amax(0)
        beyond = ~(largest < torch.finfo(dtype).max / MARGIN)
        if bool(beyond.any()):
            worst = int(beyond.nonzero()[-1])
            raise InputError(
                f"schedule={schedule!r} has a level of signal {level.signal[worst]:.2g} and sigma "
                f"{level.sigma[worst]:.2g}, at which target={self.target_name!r} overflows "
                f"{str(dtype).removeprefix('torch.')}: use a schedule of a narrower range, or target 'x0' or 'v'."
            )

    def check_trainable(self, dtype: torch.dtype) -> None:
        """Refuse a schedule that has levels at which the loss may overflow; looked at once per dtype."""
        if dtype not in self._trainable:
            self.check_levels(dtype)
            self._trainable.add(dtype)

    def eps(self, x: Tensor, level: Level) -> Tensor:
        """The white eps behind x: Σ^-½ (x − signal · x̂0) / sigma."""
        return TARGETS["eps"].invert(self(x, level), x, level, self.process.covariance)

    def score(self, x: Tensor, level: Level) -> Tensor:
        """∇ log p(x) = Σ⁻¹ (signal · x̂0 − x) / sigma² (eq. 22, corrected by E10)."""
        return self.process.conditional_score(x, self(x, level), level)


def as_tensor(result: Any) -> Tensor:
    """What a network returned: a tensor, or an object that has it in ``.sample``, as diffusers' models do."""
    tensor = result if isinstance(result, Tensor) else getattr(result, "sample", None)
    if not isinstance(tensor, Tensor):
        raise InputError(f"net returned a {type(result).__name__}: let it return a tensor, or one in .sample.")
    return tensor


def check_denoiser(denoiser: object) -> None:
    """Refuse a bare network, or anything else, where a denoiser is meant."""
    expect("denoiser", denoiser, Denoiser, "wrap the network as nidiff.Denoiser(net, process)")


def unconditional(net: Callable[[Tensor], Any], harmonic: Schedule | None = None) -> torch.nn.Module:
    """A network of x alone, as one that is told the level and does not listen: s(x, σ) = −Σ^-½ ε(x) / σ (eq. 87, 99).

    Given the training schedule as ``harmonic``, ε is multiplied by σ_H / σ, σ_H the harmonic mean of its sigmas: the
    paper's correction (eq. 108), here to be compared with. Leave it out. The network's optimum averages 1/σ over
    p(σ | x), not over the training levels; at the dimension of images that is 1/σ within a percent, and the correction
    is wrong by the factor σ_H / σ: 0.0017 to 8.4 for the paper's own 232 levels (E32).
    """
    if not callable(net) or not (harmonic is None or isinstance(harmonic, Schedule)):
        raise InputError("unconditional takes a network, and as harmonic a nidiff.Schedule or None.")
    return _Unconditional(net, harmonic)


class _Unconditional(torch.nn.Module):
    def __init__(self, net: Callable[[Tensor], Any], harmonic: Schedule | None) -> None:
        super().__init__()
        self.net, self.harmonic = net, harmonic

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        output = as_tensor(self.net(x))
        if self.harmonic is None:
            return output
        factor = 1 / (1 / self.harmonic.sigma).mean() / self.harmonic.level(label).sigma
        return broadcast(factor, output) * output
