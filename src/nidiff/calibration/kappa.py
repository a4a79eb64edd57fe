"""How much of the residual a network explains: what the `angle` samplers need to know of it."""

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import Denoiser, check_denoiser
from nidiff.diffusion.gaussian import Kappa
from nidiff.errors import InputError
from nidiff.randomness import white_noise
from nidiff.recipe import check_whole

BATCH = 128


@torch.no_grad()
def measure_kappa(
    denoiser: Denoiser, data: Tensor, *, num_images: int = 512, num_rows: int = 17, seed: int = 0
) -> Denoiser:
    """The same denoiser with κ = E F² of every mode at ``num_rows`` rows, from (at most) the first ``num_images`` of
    ``data`` [N, ...]: one evaluation of the network per image and row."""
    check_denoiser(denoiser)
    process, gaussian = denoiser.process, denoiser.gaussian
    if gaussian is None:
        raise InputError("denoiser does not know the data's Gaussian: give it gaussian=nidiff.fit_gaussian(data).")
    process.check_batch("data", data)
    num_images, last = check_whole("num_images", num_images), len(process.schedule) - 1
    images = data[:num_images].to(denoiser.device)
    if tuple(images.shape[1:]) != gaussian.shape or not len(images):
        raise InputError(f"data has shape {tuple(data.shape)}: give some [N, {', '.join(map(str, gaussian.shape))}].")
    rows = torch.linspace(0, last, check_whole("num_rows", num_rows, 2), dtype=torch.float64).round().unique()
    generator = torch.Generator(images.device).manual_seed(check_whole("seed", seed, 0))
    values = []
    for row in rows.tolist():
        level = process.schedule.level(int(row))
        wiener = gaussian.at(level, process.covariance)
        total = torch.zeros(gaussian.covariance.event_shape, dtype=torch.float64)
        for x0 in images.split(BATCH):
            eps = white_noise(x0.shape, generator, dtype=x0.dtype, device=x0.device)
            x = process.perturb(x0, level, eps)
            residual = wiener.residual(x, denoiser(x, level))
            power = gaussian.covariance.periodogram(residual.double().cpu())
            total += power.reshape(-1, *total.shape).sum(0)
        values.append(total * total.numel() / images.numel())
    return denoiser.with_kappa(Kappa(rows, torch.stack(values).clamp(0.0, 1.0)))
