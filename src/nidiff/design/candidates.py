"""Compare Σ and schedules for data by their Gaussian model, before any training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.waves import radial_mean
from nidiff.design.prediction import SmallModel, bands
from nidiff.diffusion.gaussian import GaussianModel
from nidiff.diffusion.process import Process
from nidiff.diffusion.roughness import LIMIT, roughness
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import as_schedule, schedule_facts
from nidiff.diffusion.spacing import SPACINGS
from nidiff.errors import InputError
from nidiff.notation import parse_call
from nidiff.sampling.sampler import as_sampler

NOISES = ("white", "gff:gamma=0.5", "gff:gamma=1", "matern:length_scale=2", "from_data:power=0.5", "from_data")
"""Σ that are compared, the plainest first; the last two are C^½ and C."""
CLOCKS = ("ddpm_linear", "ddpm_cosine", "flow", "designed", "designed:per_mode=true", "equal_snr")
"""Schedules that are compared, the plainest first. equal_snr is for Σ = C alone."""
FIXED = ("dpmpp_2m", "dpmpp_2m:spacing=logsnr")  # by which candidates are compared
SOLVERS = ("ddim", "heun", *FIXED, "angle")
STEPS = (5, 10, 20, 50)
JUDGED = (5, 10, 20)  # the numbers of steps that decide
NO_MATTER = 1e-3  # an error of the spectrum that nobody sees
AS_GOOD = 1.25  # errors within this factor are equally good


@dataclass(frozen=True)
class Candidate:
    """One Σ with one schedule, and what the data's Gaussian says of it."""

    covariance: str
    schedule: str
    roughness: float
    """The largest (C/λ)/(mean C/mean λ) over the finer half of the modes; above 10 the noise is the smoother."""
    snr_last: float
    """The largest SNR of a mode at the last level: the prior must have forgotten it."""
    snr_first: float
    """The least SNR of a mode at the first level: it must be resolved there."""
    errors: dict[str, dict[int, float]]
    """The predicted error of the spectrum, mean |S/C − 1|, by sampler and steps."""
    logsnr: Tensor = field(repr=False, compare=False)
    """The effective log-SNR [levels, bands], log(signal² C / (sigma² λ)), its mean over the modes of a band."""

    @property
    def faults(self) -> list[str]:
        """Why it is not recommended, whatever error is predicted."""
        reasons = {
            f"the noise is smoother than the data (C/Sigma {self.roughness:.3g})": self.roughness > LIMIT,
            f"the last level still shows a mode (SNR {self.snr_last:.2g})": self.snr_last > 0.1,
            f"the first level does not resolve a mode (SNR {self.snr_first:.2g})": self.snr_first < 10,
        }
        return [reason for reason, holds in reasons.items() if holds]

    @property
    def score(self) -> float:
        """The geometric mean over 5, 10 and 20 steps of DPM-Solver++'s error, with the better of its fixed spacings."""
        best = [max(NO_MATTER, min(self.errors[name][steps] for name in FIXED)) for steps in JUDGED]
        return torch.tensor(best, dtype=torch.float64, device="cpu").log().mean().exp().item()


@dataclass(frozen=True)
class Design:
    """All candidates, and the one that is recommended."""

    gaussian: GaussianModel
    candidates: list[Candidate]
    noises: dict[str, Covariance]
    recommended: Candidate
    left_out: list[str] = field(default_factory=list)
    """Schedules that cannot be compared, since they keep signal at their last level (`heat`)."""

    @property
    def baseline(self) -> Candidate | None:
        """White noise with the better of the usual schedules, if that is among the candidates."""
        white = [c for c in self.candidates if c.covariance == "white" and c.schedule.startswith("ddpm")]
        return min(white, key=lambda candidate: candidate.score, default=None)

    @property
    def reason(self) -> str:
        """Why the recommended candidate is recommended."""
        best, white = self.recommended, self.baseline
        if best.faults:
            return f"no candidate is without fault, and this one has the least error, but {', and '.join(best.faults)}"
        words = (
            f"the noise is at least as rough as the data (C/Sigma {best.roughness:.3g}), every mode is forgotten at "
            f"the last level (SNR {best.snr_last:.2g}) and resolved at the first (SNR {best.snr_first:.3g}), and the "
            f"error of the spectrum by DPM-Solver++ in 5, 10 and 20 steps is {_errors(best)}"
        )
        if white is None or best is white:
            return words + (": nothing else is better by a quarter" if best is white else "")
        return words + f", with white noise and {white.schedule} {_errors(white)}"


def _errors(candidate: Candidate) -> str:
    return " / ".join(f"{min(candidate.errors[name][steps] for name in FIXED):.2g}" for steps in JUDGED)


def compare(
    gaussian: GaussianModel,
    build: Callable[[str], Covariance],
    noises: Sequence[str] = NOISES,
    schedules: Sequence[str] = CLOCKS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Design:
    """Compare every Σ of ``noises``, which ``build`` makes of its text, under every one of ``schedules``.

    Recommended is, of the candidates without fault, the one with the least `score`; of several that are about as good,
    the plainest, which comes first. Left out are schedules that keep signal at their last level.
    """
    covariances = {name: build(name) for name in noises}
    pairs = [(noise, text) for noise in covariances for text in schedules if _fits(noise, text)]
    candidates, left_out = [], []
    for number, (noise, text) in enumerate(pairs):
        progress(number, len(pairs))
        covariance = covariances[noise]
        process = Process(as_schedule(text, schedule_facts(covariance, gaussian)), covariance)
        schedule = process.schedule
        if len(schedule) < max(STEPS):
            raise InputError("schedules", text, f"has {len(schedule)} levels", f"use at least {max(STEPS)}")
        if not schedule.forgets:
            left_out.append(text)
            continue
        effective = _effective_logsnr(schedule, gaussian, covariance)
        candidate = Candidate(
            covariance=noise,
            schedule=text,
            roughness=roughness(gaussian, covariance).ratio,
            snr_last=effective[-1].max().exp().item(),
            snr_first=effective[0].min().exp().item(),
            errors=_predicted(process, gaussian),
            logsnr=band_logsnr(schedule, gaussian, covariance),
        )
        candidates.append(candidate)
    progress(len(pairs), len(pairs))
    if not candidates:
        problem = "leave nothing to compare (equal_snr is for from_data alone, and schedules that keep signal, as heat"
        raise InputError("schedules", None, f"{problem} does, are left out)", "add ddpm_linear")
    sound = [candidate for candidate in candidates if not candidate.faults] or candidates
    least = min(candidate.score for candidate in sound)
    recommended = next(candidate for candidate in sound if candidate.score <= AS_GOOD * least)
    return Design(gaussian, candidates, covariances, recommended, list(dict.fromkeys(left_out)))


def _fits(noise: str, schedule: str) -> bool:
    """Whether they can be combined: equal_snr needs Σ = C."""
    if schedule.partition(":")[0] != "equal_snr":
        return True
    name, options = parse_call("covariances", noise)
    return name == "from_data" and options.get("power", 1) == 1


def _effective_logsnr(schedule: Schedule, gaussian: GaussianModel, covariance: Covariance, count: int = 101) -> Tensor:
    """log(signal² C / (sigma² λ)) [levels, modes of C], at ``count`` levels from the least to the most noise."""
    rows = torch.linspace(0, len(schedule) - 1, min(count, len(schedule)), dtype=torch.float64, device="cpu")
    rows = rows.round().long()
    ratio = (gaussian.covariance.eigenvalues / covariance.eigenvalues).log()  # [channels, *event]
    logsnr = schedule.logsnr[rows]
    logsnr = logsnr.reshape(len(rows), *[1] * (ratio.ndim + 1 - logsnr.ndim), *logsnr.shape[1:])
    return (logsnr + ratio).flatten(1)


def band_logsnr(schedule: Schedule, gaussian: GaussianModel, covariance: Covariance) -> Tensor:
    """The effective log-SNR [levels, bands], its mean over the modes of a band, at 101 levels or at all of fewer."""
    return radial_mean(_effective_logsnr(schedule, gaussian, covariance), bands(gaussian).flatten())


def _predicted(process: Process, gaussian: GaussianModel) -> dict[str, dict[int, float]]:
    """The error of the spectrum of every solver at every number of steps."""
    predicted: dict[str, dict[int, float]] = {}
    for name in SOLVERS:
        step, options = parse_call("sampler", name)
        model = SmallModel(process, gaussian, *as_sampler(step), most=96)
        if step == "angle":  # exact in any number of steps: what is left is the prior's error
            predicted[name] = dict.fromkeys(STEPS, model.error([len(process.schedule) - 1]))
        else:
            spacing = SPACINGS[options.get("spacing", "trailing")]
            predicted[name] = {steps: model.error(spacing(process.schedule, steps)) for steps in STEPS}
    return predicted
