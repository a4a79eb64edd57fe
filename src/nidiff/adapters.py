"""Networks of others as a `nidiff.Denoiser`, and ours as what others call.

A `Convention` says what a network is given, x = signal(t) · x0 + sigma(t) · noise and the time t, and what it returns:
x0, the noise, a score or a velocity. It is a table over noise levels, so all conventions share one way in, `denoiser`,
one way out, `Network`, and one `probe`, which finds out from noisy data whether a network follows it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.families import Identity
from nidiff.diffusion.denoiser import Denoiser, as_tensor
from nidiff.diffusion.process import Process
from nidiff.diffusion.schedule import Schedule, as_table, interpolate
from nidiff.diffusion.schedules import flow as flow_levels
from nidiff.diffusion.schedules import smld_geometric
from nidiff.diffusion.target import target_on_its_own
from nidiff.errors import InputError, one_of
from nidiff.randomness import white_noise

PREDICTIONS = ("x0", "eps", "noise", "score", "v", "velocity")
ROWS = 1000  # of a convention whose time is continuous
FINE = 20_000  # points of its curve
PROBED = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the rows from little noise to much
CLEARLY = 1.2  # how many times the error of another convention that of this one may be, at any level
# A schedule's rule by what it keeps, where the signal and the sigma of all rows follow it.
KEEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "signal": lambda signal, sigma: signal,
    "variance": lambda signal, sigma: signal**2 + sigma**2,
    "sum": lambda signal, sigma: signal + sigma,
}


@dataclass(frozen=True, eq=False)
class Convention:
    """How a network is called: ``net(x, t)`` with x = signal · x0 + sigma · Σ^½ eps, at the levels of ``schedule``.

    ``times`` [L] are those of its rows. The network returns ``sign`` times the quantity that ``predicts`` names: "x0",
    "eps" (white), "noise" (Σ^½ eps), "score" (∇ log p of x), "v" (signal · noise − sigma · x0) or "velocity"
    (noise − x0). Between two rows the time is linear in the row, or follows ``curve``, log-SNR and time [M] each, where
    the time is continuous.
    """

    schedule: Schedule
    times: Tensor
    predicts: str = "x0"
    sign: float = 1.0
    curve: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        one_of("predicts", self.predicts, PREDICTIONS)
        if self.schedule.event_shape:
            raise InputError("schedule", self.schedule, "differs from mode to mode", "use nidiff.Denoiser itself")
        object.__setattr__(self, "times", as_table("times", self.times))
        if self.times.shape != self.schedule.logsnr.shape:
            problem = f"has shape {tuple(self.times.shape)}, and the schedule {len(self.schedule)} rows"
            raise InputError("times", None, problem, "give a time for every row")

    @classmethod
    def of(cls, signal: Tensor, sigma: Tensor, times: Tensor, *arguments: Any, **others: Any) -> "Convention":
        """The one whose rows have these signals and sigmas [L], from the least to the most noise."""
        logsnr = 2 * (signal.log() - sigma.log())
        for keeps, of_rows in KEEPS.items():
            if torch.allclose(of_rows(signal, sigma), torch.ones_like(logsnr), rtol=0, atol=1e-9):
                return cls(Schedule(logsnr, keeps), times, *arguments, **others)
        return cls(Schedule(logsnr, signal=signal), times, *arguments, **others)

    def time_of(self, logsnr: Tensor) -> Tensor:
        """The times of levels, float64."""
        known, times = self.curve or (self.schedule.logsnr, self.times)
        return interpolate(-logsnr, -known, times)

    def logsnr_of(self, time: Tensor) -> Tensor:
        """log-SNR at times of the convention; others are refused."""
        logsnr, times = self.curve or (self.schedule.logsnr, self.times)
        wanted = time.detach().to("cpu", torch.float64).reshape(-1)
        low, high = sorted(times[[0, -1]].tolist())
        beyond = torch.maximum(low - wanted, wanted - high)
        if bool((beyond > 1e-6 * (high - low)).any()):
            remedy = f"use {low:.6g} to {high:.6g}, or a convention with other levels"
            raise InputError("time", wanted[beyond.argmax()].item(), "is outside of the convention", remedy)
        if times[-1] < times[0]:
            logsnr, times = logsnr.flip(0), times.flip(0)
        return interpolate(wanted.clamp(low, high), times, logsnr)


# Conventions --------------------------------------------------------------------------------------------------------


def edm(sigma_min: float = 0.002, sigma_max: float = 80.0, num_levels: int = ROWS) -> Convention:
    """D(x, σ) ≈ x0 at x = x0 + σ · noise: EDM, k-diffusion, the preconditioned networks of PhysicsNeMo."""
    return _continuous(smld_geometric(num_levels, sigma_max, sigma_min), lambda logsnr: (-0.5 * logsnr).exp(), "x0")


def sde(schedule: Schedule, predicts: str = "score", time_scale: float = 1.0) -> Convention:
    """score(x, t) with t in (0, 1] of a VP or VE process, `nidiff.schedules.vp()` or ``ve()``: score_sde, and most
    networks in astronomy. ``time_scale`` multiplies t, as 999 where the network itself is meant, and not score_sde's
    function around it."""
    times = schedule.time[0] + (1 - schedule.time[0]) * _fine_times()
    curve = schedule.logsnr_at(times), time_scale * times
    return Convention(schedule, time_scale * schedule.time, predicts, curve=curve)


def discrete(schedule: Schedule, predicts: str = "eps") -> Convention:
    """eps(x, t) with t = 0, 1, … the row of a table, such as `nidiff.schedules.from_alphas_cumprod`: DDPM, ADM, iDDPM,
    diffusers."""
    return Convention(schedule, torch.arange(len(schedule), dtype=torch.float64), predicts)


def flow(data_at: float = 1.0, time_scale: float = 1.0, num_levels: int = ROWS) -> Convention:
    """A velocity of x on the straight line between data and noise, by the time at which the data are.

    ``data_at=1``: from noise at 0 to data at 1, with velocity x0 − noise (rectified flow, torchcfm, flow_matching of
    Meta). ``data_at=0``: noise at 1, with velocity noise − x0 (SD3, Flux; diffusers, with ``time_scale=1000``).
    """
    if data_at not in (0, 1):
        raise InputError("data_at", data_at, "is no end of the line", "choose 0 or 1")
    toward_noise = 1.0 if data_at == 0 else -1.0
    levels = flow_levels(num_levels)
    return _continuous(
        levels, lambda logsnr: time_scale * torch.sigmoid(-0.5 * toward_noise * logsnr), "velocity", toward_noise
    )


def azula(schedule: Callable[[Tensor], tuple[Tensor, Tensor]], num_levels: int = ROWS) -> Convention:
    """A denoiser of azula, which returns an object with E[x0 | x] in ``.mean``, by its ``denoiser.schedule``."""

    def levels(times: Tensor) -> tuple[Tensor, Tensor]:
        signal, sigma = (torch.as_tensor(column).expand(len(times)) for column in schedule(times))
        return signal, sigma

    times, fine = torch.linspace(0, 1, num_levels + 1, dtype=torch.float64)[1:], _fine_times()[1:]
    signal, sigma = levels(fine)
    return Convention.of(*levels(times), times, curve=(2 * (signal.log() - sigma.log()), fine))


def _fine_times() -> Tensor:
    """0 … 1, the denser the nearer to 0, where log-SNR changes fast."""
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-6, 0, FINE, dtype=torch.float64)])


def _continuous(
    schedule: Schedule, time_of: Callable[[Tensor], Tensor], predicts: str, sign: float = 1.0
) -> Convention:
    """One whose time is a function of log-SNR."""
    first, last = schedule.logsnr[[0, -1]].tolist()
    logsnr = torch.linspace(first, last, FINE, dtype=torch.float64)
    return Convention(schedule, time_of(schedule.logsnr), predicts, sign, (logsnr, time_of(logsnr)))


# In and out ---------------------------------------------------------------------------------------------------------


def denoiser(
    net: Callable[..., Any], convention: Convention, covariance: Covariance | Sequence[int], **arguments: Any
) -> Denoiser:
    """``net``, called by its convention, as a `nidiff.Denoiser` with these other ``arguments`` of it (``gaussian``,
    ``conditions``, …). ``covariance`` is the Σ of the noise that it was trained with, or the shape of the event, for
    white noise."""
    process = Process(convention.schedule, _noise(covariance))
    return Denoiser(AtTime(net, convention), process, convention.predicts, **arguments)


class AtTime(torch.nn.Module):
    """A network of (x, time) as one of (x, row)."""

    def __init__(self, net: Callable[..., Any], convention: Convention) -> None:
        super().__init__()
        self.net, self.convention = net, convention

    def forward(self, x: Tensor, label: Tensor, **conditions: Any) -> Tensor:
        logsnr = self.convention.schedule.logsnr
        rows = torch.arange(len(logsnr), dtype=torch.float64, device="cpu")
        time = self.convention.time_of(interpolate(label.detach().to("cpu", torch.float64), rows, logsnr))
        output = self.net(x, time.to(x), **conditions)
        mean = None if isinstance(output, Tensor) else getattr(output, "mean", None)
        return self.convention.sign * (mean if isinstance(mean, Tensor) else as_tensor(output))


class Network(torch.nn.Module):
    """A `nidiff.Denoiser` as a network of another ``convention``, with the same Σ: net(x, t) of t [] or [B].

    For the samplers of EDM it has sigma_min, sigma_max and round_sigma.
    """

    def __init__(self, denoiser: Denoiser, convention: Convention) -> None:
        super().__init__()
        self.denoiser, self.convention = denoiser, convention
        self._low, self._high = discrete(denoiser.process.schedule).schedule.logsnr[[-1, 0]].tolist()
        theirs = convention.schedule
        inside = (theirs.logsnr >= self._low - 1e-6) & (theirs.logsnr <= self._high + 1e-6)
        if not bool(inside.any()):
            problem = f"has log-SNR {theirs.logsnr[-1]:.3g} to {theirs.logsnr[0]:.3g}"
            remedy = f"choose one that meets the denoiser's, {self._low:.3g} to {self._high:.3g}"
            raise InputError("convention", None, problem, remedy)
        self.sigma_min, self.sigma_max = (theirs.sigma / theirs.signal)[inside][[0, -1]].tolist()

    def forward(self, x: Tensor, time: Tensor, **conditions: Any) -> Tensor:
        given = self.denoiser.given(**conditions) if conditions else self.denoiser
        logsnr = self.convention.logsnr_of(torch.as_tensor(time)).expand(len(x))
        if bool(((logsnr < self._low - 1e-6) | (logsnr > self._high + 1e-6)).any()):
            problem, remedy = (
                "is a level beyond those of the denoiser",
                f"use log-SNR {self._low:.4g} to {self._high:.4g}",
            )
            raise InputError("time", torch.as_tensor(time).flatten()[0].item(), problem, remedy)
        theirs, ours = (s.level_at(logsnr) for s in (self.convention.schedule, given.process.schedule))
        x0 = given((ours.signal / theirs.signal) * x, ours)
        output = target_on_its_own(self.convention.predicts).invert(x0, x, theirs, given.process.covariance)
        return self.convention.sign * output

    def round_sigma(self, sigma: Tensor) -> Tensor:
        """σ itself: every one is a level."""
        return torch.as_tensor(sigma)


# The probe ----------------------------------------------------------------------------------------------------------


def probe(
    net: Callable[..., Any],
    convention: Convention,
    x0: Tensor,
    covariance: Covariance | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    **conditions: Any,
) -> Tensor:
    """Refuse a network that does not follow the convention, and name the one that it seems to follow.

    Data ``x0`` [B, C, *event], as the network was trained on, are noised at five levels and denoised under the
    convention and under others that differ from it in one respect. The right one has the least error, and at every
    level less than x / signal and than the mean of the data have. Returned are the mean squared errors [5] of x̂0.
    """
    shape = tuple(x0.shape[2:]) if covariance is None else covariance
    eps = white_noise(x0.shape, generator, dtype=x0.dtype)
    errors = {"": _errors(net, convention, x0, eps, _noise(shape), conditions)}
    for name, other in _variants(convention):
        try:
            errors[name] = _errors(net, other, x0, eps, _noise(shape), conditions)
        except (InputError, RuntimeError, IndexError):  # such as an embedding of fewer rows
            continue
    best = min(errors, key=lambda name: errors[name].clamp(min=1e-12).log().mean().item())
    levels = [convention.schedule.level(_probed(convention, share)) for share in PROBED]
    noise = _noise(shape).sqrt(eps).square().mean()
    trivial = torch.stack([(float(each.sigma / each.signal) ** 2 * noise).clamp(max=x0.var()) for each in levels])
    if (worst := (errors[best] / trivial).max().item()) > CLEARLY:
        problem = (
            f"has an error {worst:.3g} times that of the noisy data, or of their mean, and no other convention fits"
        )
        raise InputError("net", None, problem, "give data as it was trained on, in its units, and a trained network")
    if (ratio := (errors[""] / errors[best]).max().item()) > CLEARLY:
        problem = f"denoises up to {ratio:.3g} times as badly under this convention as if {best}"
        raise InputError("net", None, problem, "change the convention so")
    return errors[""]


def _variants(convention: Convention) -> Iterator[tuple[str, Convention]]:
    """Conventions that differ in one respect, with what that is."""
    schedule = convention.schedule
    times, signal, sigma = convention.times, schedule.signal, schedule.sigma
    changed = partial(replace, convention, curve=None)
    yield "the sign of its output were the other one", changed(sign=-convention.sign)
    for name in PREDICTIONS:
        if name != convention.predicts:
            yield f"it predicted {name!r}", changed(predicts=name, sign=1.0)
    flipped = changed(times=times[0] + times[-1] - times)
    yield "its time ran the other way", flipped
    yield "its time ran the other way, and its output had the other sign", replace(flipped, sign=-convention.sign)
    largest = times.abs().max()
    for what, other in {
        "counted from 0 to 1": times / largest,
        "counted from 0 to 1000": 1000 * times / largest,
        "the row of the table": torch.arange(len(times), dtype=torch.float64),
        "σ": sigma / signal,
        "¼ log σ": (sigma / signal).log() / 4,
        "log σ": (sigma / signal).log(),
    }.items():
        if not torch.allclose(other, times, rtol=1e-2):
            yield f"its time were {what}", changed(times=other)
    norm = (signal**2 + sigma**2).sqrt()
    for what, scale in {
        "scaled to signal² + sigma² = 1": norm,
        "x0 + σ · noise": signal,
        "scaled to signal + sigma = 1": signal + sigma,
    }.items():
        if not torch.allclose(scale, torch.ones_like(scale), rtol=0, atol=1e-6):
            arguments = (times, convention.predicts, convention.sign)
            yield f"its input were {what}", Convention.of(signal / scale, sigma / scale, *arguments)


def _errors(
    net: Callable[..., Any], convention: Convention, x0: Tensor, eps: Tensor, noise: Covariance, conditions: Any
) -> Tensor:
    """The mean squared error of x̂0 at the levels that are probed."""
    model = denoiser(net, convention, noise)
    if conditions:
        model = model.given(**conditions)
    found = []
    with torch.no_grad():
        for share in PROBED:
            level = model.process.schedule.level(_probed(convention, share))
            error = (model(model.process.perturb(x0, level, eps), level) - x0).square().mean()
            found.append(error.nan_to_num(nan=torch.inf))
    return torch.stack(found)


def _probed(convention: Convention, share: float) -> int:
    return round(share * (len(convention.times) - 1))


def _noise(covariance: Covariance | Sequence[int]) -> Covariance:
    return covariance if isinstance(covariance, Covariance) else Identity(covariance)
