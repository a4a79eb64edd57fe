"""The law of posterior samples of a Gaussian texture that was blurred: its exact 2-Wasserstein distance to the truth.

The test of Pierret and Galerne (arXiv 2507.07008): data are a Gaussian texture, here the spot noise of one field of
turbulence, seen through a blur and noise. The exact denoiser is linear, so every step is affine, and all of Σ, the blur
and the data are diagonal in the same waves: the law of the samples is a Gaussian whose mean and variance are computed
mode by mode from the library's own steps, by a batch whose images are the responses to a unit of one draw each. No
network, and nothing is estimated, but for "dps" and five iterations of "mmps", which are not linear: of these, the
moments of 200 samples, of which chance alone makes about 0.09 of the distance below.

Printed: W2 over the root of the trace of the posterior's covariance, against steps, for white noise, for Σ ∝ C^½ and
for Σ ∝ C; methods with a setting have the best of five, which is printed too.
"""

import argparse
import math
import warnings

import torch
from stories.results import Results, markdown
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.sampling.sampler import as_sampler
from nidiff.sampling.step import Chain, run_chain
from nidiff.testing.problems import uniform_in_logsnr

SIDE, WIDTH, NOISE, DRAWN = 34, 1.5, 0.1, 200
STEPS = (10, 30, 100)
BLUR = op.blur(WIDTH, "periodic")
METHODS = {  # settings, and samplers
    "gaussian": (("gaussian:tolerance=1e-10",), ("ancestral:variance=gaussian", "ancestral", "heun")),
    "mmps, 5 iterations": (("mmps",), ("ancestral:variance=gaussian",)),
    "tmpd": (("tmpd",), ("ancestral",)),
    "pigdm": (
        tuple(f"pigdm:scale={scale},tolerance=1e-10" for scale in (0.1, 0.3, 1.0, 3.0, 10.0)),
        ("ancestral", "ddim"),
    ),
    "gradient": (
        tuple(f"gradient:scale={scale},tolerance=1e-10" for scale in (0.01, 0.03, 0.1, 0.3, 1.0)),
        ("ancestral",),
    ),
    "dps": (tuple(f"dps:scale={scale}" for scale in (0.003, 0.01, 0.03, 0.1, 0.3)), ("ancestral",)),
    "diffpir": (
        tuple(f"diffpir:weight={weight},tolerance=1e-10" for weight in (0.3, 1.0, 3.0, 10.0, 30.0)),
        ("diffpir:zeta=0.3", "diffpir:zeta=1.0"),
    ),
}
SAMPLED = ("dps", "mmps, 5 iterations")


def texture() -> nidiff.GaussianModel:
    """The spot noise of a field: the Gaussian of its own spectrum."""
    field = nidiff.load_dataset("turbulence", split="test").batch(torch.tensor([0]))[..., :SIDE, :SIDE].double()
    field = (field - field.mean()) / field.std()
    basis = nidiff.Spectral((SIDE, SIDE), torch.ones(SIDE, SIDE), "periodic").basis
    power = basis.power(field)[0, 0]
    power[0, 0] = power.max()  # the mean of a field is free
    return nidiff.GaussianModel(torch.zeros(1, SIDE, SIDE), nidiff.Covariance(power.clamp(min=1e-6), basis))


TEXTURE = texture()
SPECTRUM = TEXTURE.covariance.eigenvalues
BASIS = TEXTURE.covariance.basis
NOISES = {"white": nidiff.Spectral((SIDE, SIDE), torch.ones(SIDE, SIDE), "periodic")}
NOISES["C^½"], NOISES["C"] = TEXTURE.power(0.5), TEXTURE.power(1.0)


def truth() -> tuple[Tensor, Tensor, Tensor]:
    """y, and the mean and variance of every mode given y."""
    x0 = TEXTURE.sample((1, 1, SIDE, SIDE), 1, dtype=torch.float64)
    y = BLUR(x0) + NOISE * torch.randn(x0.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    unit = torch.zeros(SIDE, SIDE, dtype=torch.float64)
    unit[0, 0] = 1.0
    gain = BASIS.analyse(BLUR(BASIS.synthesise(torch.ones(1, 1, SIDE, SIDE, dtype=torch.float64))))[0, 0]
    variance = 1 / (1 / SPECTRUM + gain**2 / NOISE**2)
    return y, variance * gain / NOISE**2 * BASIS.analyse(y)[0, 0], variance


def law(noise: str, method: str, sampler: str, steps: int, drawn: int = 0) -> tuple[Tensor, Tensor]:
    """The mean and the standard deviation of every mode of the samples: exact, or those of so many that are drawn."""
    cov = NOISES[noise]
    process = nidiff.Process(uniform_in_logsnr(steps, "variance", -12.0, 9.0), cov)
    observation = nidiff.Observation(truth()[0], BLUR, NOISE)
    denoiser = nidiff.posterior(TEXTURE.denoiser(process), observation, method)
    chosen, options = as_sampler(sampler)
    levels = [process.schedule.level(row) for row in reversed(range(steps))]
    shape = (2 + (3 if "gaussian" in sampler else 1) * steps, 1, SIDE, SIDE)
    draws = [0]

    def response(spread: Tensor) -> Tensor:
        """The next draw: a unit in every mode of one image, and nothing in the others."""
        draws[0] += 1
        coefficients = torch.zeros(shape, dtype=torch.float64)
        coefficients[draws[0]] = spread.sqrt()
        return BASIS.synthesise(coefficients)

    if drawn:
        x = nidiff.sample(
            denoiser, (drawn, *shape[1:]), sampler=sampler, num_steps=steps, generator=0, dtype=torch.float64
        )
        modes = BASIS.analyse(x)[:, 0]
        return modes.mean(0), modes.std(0)
    ones = torch.ones_like(SPECTRUM)
    chain = Chain(denoiser, lambda: response(cov.eigenvalues), white=lambda _: response(ones))
    x = run_chain(chain, response(cov.eigenvalues), levels, chosen, options)
    modes = BASIS.analyse(x)[:, 0]
    return modes[0], (modes[1 : draws[0] + 1] - modes[0]).square().sum(0).sqrt()


def distance(noise: str, method: str, sampler: str, steps: int, drawn: int = 0) -> dict[str, float]:
    _, mean, variance = truth()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            found, spread = law(noise, method, sampler, steps, drawn)
        except nidiff.InputError:  # it diverged
            return {"mean": math.inf, "spread": math.inf, "W2": math.inf}
    size = variance.sum()
    of_mean, of_spread = ((found - mean).square().sum() / size, (spread - variance.sqrt()).square().sum() / size)
    return {"mean": of_mean.sqrt().item(), "spread": of_spread.sqrt().item(), "W2": (of_mean + of_spread).sqrt().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    arguments = parser.parse_args()
    steps = arguments.steps
    torch.set_num_threads(1)
    results, rows = Results("posterior_gaussian"), []
    for noise in NOISES:
        for method, (settings, samplers) in METHODS.items():
            for sampler in samplers:
                drawn = DRAWN if method in SAMPLED else 0

                def found(setting: str, count: int, noise=noise, sampler=sampler, drawn=drawn) -> dict[str, float]:
                    key = f"{noise}, {setting}, {sampler}, {count}"
                    if arguments.table and key not in results.values:
                        return {"W2": math.nan}
                    return results.measured(key, lambda: distance(noise, setting, sampler, count, drawn))

                cells = []
                for count in steps:
                    best = min(settings, key=lambda setting, count=count, found=found: found(setting, count)["W2"])
                    label = best.partition(":")[2].replace("tolerance=1e-10", "").strip(",")
                    cells.append(f"{found(best, count)['W2']:.3g}" + (f" ({label})" if label else ""))
                rows.append([noise, method, sampler, *cells])
                print(" | ".join(rows[-1]), flush=True)
    print(markdown(["Σ", "method", "sampler", *(f"{count} steps" for count in steps)], rows))


if __name__ == "__main__":
    main()
