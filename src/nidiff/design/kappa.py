"""How much of the residual a network explains: what the `angle` samplers need to know of it."""

import torch
from torch import Tensor

from nidiff.diffusion.condition import CLASSES, take_rows
from nidiff.diffusion.denoiser import Denoiser, check_denoiser, require_gaussian
from nidiff.diffusion.gaussian import Kappa
from nidiff.errors import InputError
from nidiff.progress import Progress
from nidiff.randomness import Generators, as_generator, white_noise
from nidiff.recipe import check_whole
from nidiff.sampling.warm import MAX_LOSS, integrated_loss

BATCH = 128


@torch.no_grad()
def measure_kappa(
    denoiser: Denoiser,
    data: Tensor,
    *,
    num_images: int = 512,
    num_rows: int = 17,
    generator: Generators = 0,
    progress: Progress | None = None,
) -> Denoiser:
    """The same denoiser with κ and β of every mode at ``num_rows`` rows, and what a start from its Gaussian or mixture
    loses there, from (at most) the first ``num_images`` of ``data`` [N, ...]: one evaluation of the network per image
    and row. They should not be those that the mixture was fitted to, which it may know by heart.

    β is 1 for a network that returns the conditional mean, and less for one whose errors would only add noise to that
    mode. With F* the F of the clean image, e = F (F − F*) has mean 0 for the former, and E[F F*] = E F² − E e. Of n
    images, two standard errors of the mean of e are forgiven:

        β = 1 − max(0, mean(e) − 2 std(e)/√n) / mean(F²)          between 0 and 1

    which is E[F F*]/E F² as n grows. κ = β² E F². Conditions that are `given` are those of ``data``. What the starts
    lose is in `nidiff.sampling.warm`; in units of the Gaussian's spread the error of a model is E (F_q − F*)².
    """
    check_denoiser(denoiser)
    process, gaussian = denoiser.process, require_gaussian(denoiser.gaussian, "denoiser")
    process.check_batch("data", data)
    num_images, last = check_whole("num_images", num_images), len(process.schedule) - 1
    images = data[:num_images].to(denoiser.device)
    if tuple(images.shape[1:]) != gaussian.shape or not len(images):
        remedy = f"give some [N, {', '.join(map(str, gaussian.shape))}]"
        raise InputError("data", None, f"has shape {tuple(data.shape)}", remedy)
    num_rows = check_whole("num_rows", num_rows, 2)
    rows = torch.linspace(0, last, num_rows, dtype=torch.float64, device="cpu").round().unique()
    source = as_generator(generator, len(images))
    mixture, classes = denoiser.mixture, denoiser.condition_values.get(CLASSES)
    shares, trusts, worse = [], [], []
    for number, row in enumerate(rows.tolist()):
        if progress is not None:
            progress(number, len(rows))
        level = process.schedule.level(int(row))
        wiener = gaussian.at(level, process.covariance)
        marginal = None if mixture is None else mixture.at(level, process.covariance)
        powers = []
        for index in torch.arange(len(images)).split(BATCH):
            x0 = images[index]
            part = [source[image] for image in index.tolist()] if isinstance(source, list) else source
            eps = white_noise(x0.shape, part, dtype=x0.dtype, device=x0.device)
            x = process.perturb(x0, level, eps)
            estimates = [denoiser.for_images(index)(x, level), x0]
            if marginal is not None:
                estimates.append(marginal.expected(x, take_rows(classes, index)))
            residual, wanted, *others = (wiener.residual(x, clean).cpu().double() for clean in estimates)
            each = (residual, residual - wanted, wanted, *(other - wanted for other in others))
            powers.append(torch.stack([gaussian.powers(one) for one in each]))
        power, error, *of_models = torch.cat(powers, dim=1)  # of the models, first of the Gaussian, where F = 0
        # F (F − wanted) has mean 0 if the network returns the conditional mean: only what exceeds its scatter counts.
        excess = (power + error - of_models[0]) / 2
        scatter = 2 * excess.std(0, correction=0) / len(excess) ** 0.5
        power = power.mean(0)
        trust = 1 - (excess.mean(0) - scatter).clamp(min=0.0) / power.clamp(min=1e-30)
        trusts.append(trust.clamp(0.0, 1.0))
        shares.append((trusts[-1].square() * power).clamp(0.0, 1.0))
        worse.append(torch.stack([(of_model - error).mean(0) for of_model in of_models]))
    losses = dict(zip(MAX_LOSS, integrated_loss(process, gaussian, rows, torch.stack(worse, 1)), strict=False))
    return denoiser.with_kappa(Kappa(rows, torch.stack(shares).float(), torch.stack(trusts).float(), losses))
