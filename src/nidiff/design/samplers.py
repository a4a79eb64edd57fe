"""The samplers that are worth a trial with few steps, from what a denoiser knows about its data."""

from inspect import signature
from typing import Any

import torch

from nidiff.diffusion.denoiser import Denoiser
from nidiff.sampling.sampler import SAMPLERS

SPACINGS = ("trailing", "logsnr", "karras")
LEVELS = (0.5, 0.0, -1.0, -2.0)  # log-SNR at which to begin with a model of the data
HIGHEST = -8.76  # log-SNR of sigma = 80 signal, where others begin: any Gaussian will do there


def sampler_candidates(denoiser: Denoiser) -> list[str]:
    """Samplers as NAME:key=value,… for `nidiff.metrics.tune`: solvers with every spacing and amount of fresh noise, and
    where the data's Gaussian or mixture is known, those that use it, with starts at lower levels."""
    texts = [_text("dpmpp_2m", spacing=spacing, eta=eta) for eta in (0, 0.5, 1) for spacing in SPACINGS]
    texts += [_text("ipndm", spacing=spacing) for spacing in SPACINGS]
    start = "gaussian" if getattr(denoiser, "mixture", None) is None else "mixture"
    warm = ["dpmpp_2m"] if start == "mixture" else []
    can_rescale = denoiser.gaussian is not None and not denoiser.conditions  # images given a class vary less
    if denoiser.gaussian is not None:
        warm = ["dpmpp_2m", "gaussian_2m", "angle_2m"]
        for rescale in (None, "true") if can_rescale else (None,):
            for finish in ("step", "denoise"):
                several = ("angle", "trailing")
                texts += [_text("angle_2m", finish=finish, spacing=spacing, rescale=rescale) for spacing in several]
            texts += [_text("gaussian_2m", eta=eta, rescale=rescale) for eta in (0, 0.5, 1)]
            texts.append(_text("gaussian_2m", eta=0.5, spacing="trailing", finish="denoise", rescale=rescale))
            texts += [_text("dpmpp_2m", eta=eta, rescale=rescale) for eta in (0.5, 1)]
    schedule = denoiser.process.schedule
    levels = torch.tensor((*LEVELS, HIGHEST), dtype=torch.float64, device="cpu")
    *rows, highest = schedule.nearest_row(levels).round().int().tolist()
    if denoiser.gaussian is not None and highest < len(schedule) - 1:
        for name, eta in (("dpmpp_2m", 0), ("dpmpp_2m", 1), ("ipndm", 0)):
            several = ("logsnr", "karras")
            texts += [_text(name, spacing=each, eta=eta, start="gaussian", level=highest) for each in several]
    for level in (None, *rows) if warm else ():
        texts += [_text(name, eta=eta, start=start, level=level) for name in warm for eta in (0, 0.5)]
        texts.append(_text("dpmpp_2m", eta=1, start=start, level=level))
        if can_rescale:
            texts.append(_text("dpmpp_2m", eta=1, start=start, level=level, rescale="true"))
    return [*dict.fromkeys(filter(None, texts))]


def _text(name: str, **options: Any) -> str | None:
    """The sampler with those options that differ from its own; None where there is no such sampler or option."""
    if (sampler := SAMPLERS.get(name)) is None:
        return None
    known = {key: parameter.default for key, parameter in signature(sampler.step).parameters.items()}
    known |= sampler._asdict()
    usual = {"eta": 0, **known}  # a sampler without fresh noise has no such option
    changed = {key: value for key, value in options.items() if value is not None and value != usual.get(key)}
    if changed.keys() - known.keys():
        return None
    return ":".join(filter(None, [name, ",".join(f"{key}={value}" for key, value in changed.items())]))
