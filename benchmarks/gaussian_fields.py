"""How wrong is the spectrum of samples, against the number of evaluations, if the data are a Gaussian field and the
network is exact?

Nothing is drawn: what a sampler makes of every mode is computed (`nidiff.design.predict`). Data have the spectrum
C_k = ((4π²|k|² + 1)/(4π² + 1))^-s, |k| in cycles per side, as in arXiv 2509.02971: 1 at |k| = 1 (and at k = 0). Σ is
white, or the same with s − 1 (rougher), or with s (matched). Printed is the error in the finest band, the mean of
|S(k)/C(k) − 1| over 3n/16 ≤ |k| ≤ n/2, as Markdown. Evaluations are of the network: Heun takes 2 steps − 1 of them.
"""

import argparse
import math
import sys

import torch

import nidiff
from nidiff.covariance.families import Fourier
from nidiff.covariance.waves import wavenumber
from nidiff.diffusion.schedules import as_schedule, schedule_facts
from nidiff.diffusion.spacing import SPACINGS
from nidiff.sampling.warm import start_row

EVALUATIONS = (5, 10, 20, 50)
SCHEDULES = ("ddpm_linear", "ddpm_cosine", "designed", "designed:per_mode=true")
METHODS = ("DDIM", "Heun", "DPM++ trailing", "DPM++ log-SNR", "log-SNR, warm start", "angle")
PUBLISHED = (
    ("white", "linear interpolant", "1740 / 626 / 307 / 208 at 40 / 80 / 160 / 320"),
    ("rougher, s = 2", "linear interpolant", "0.22 / 0.054 / 0.017 / 0.0025, probably at 40 / 80 / 160 / 320"),
    ("matched", "linear interpolant", "0.0023 at 20 and at 40"),
    ("white", "designed", "3.9 / 0.065 / 0.0061 / 0.0037 at 40 / 80 / 160 / 320"),
    ("white", "designed per wavenumber", "1.36 / 0.037 / 0.0065 / 0.0051 at 40 / 80 / 160 / 320"),
)


def field(n: int, s: float) -> nidiff.Covariance:
    k = wavenumber((n, n))
    k[0, 0] = 1.0
    return Fourier((n, n), ((4 * math.pi**2 * k**2 + 1) / (4 * math.pi**2 + 1)) ** -s, normalize=False)


def noises(n: int, s: float) -> dict[str, nidiff.Covariance]:
    return {"white": nidiff.Identity((n, n)), "rougher": field(n, s - 1), "matched": field(n, s)}


def fine_error(prediction: nidiff.design.Prediction, n: int) -> float:
    return prediction.errors[math.ceil(3 * n / 16) : n // 2 + 1].abs().mean().item()


def errors(process: nidiff.Process, gaussian: nidiff.GaussianModel) -> dict[str, list[float]]:
    """The error in the finest band of every method at every number of evaluations."""
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    n, schedule = gaussian.shape[-1], process.schedule

    def note(method: str, name: str, rows: list[float], start: str = "prior") -> None:
        found[method].append(fine_error(nidiff.design.predict(process, gaussian, name, rows, start=start), n))

    for count in EVALUATIONS:
        note("DDIM", "ddim", SPACINGS["trailing"](schedule, count))
        note("Heun", "heun", SPACINGS["trailing"](schedule, (count + 1) // 2))
        note("DPM++ trailing", "dpmpp_2m", SPACINGS["trailing"](schedule, count))
        note("DPM++ log-SNR", "dpmpp_2m", SPACINGS["logsnr"](schedule, count))
        below = schedule.below(max(start_row(gaussian.denoiser(process), "gaussian"), count - 1))
        note("log-SNR, warm start", "dpmpp_2m", SPACINGS["logsnr"](below, count), "gaussian")
    note("angle", "angle", [len(schedule) - 1], "gaussian")
    return found


def row(process_of: dict[str, nidiff.Process], gaussian: nidiff.GaussianModel) -> dict[str, list[float]]:
    """The least over the schedules, for every method and number of evaluations."""
    every = [errors(process, gaussian) for process in process_of.values()]
    return {name: [min(values) for values in zip(*(each[name] for each in every), strict=True)] for name in METHODS}


def processes(covariance: nidiff.Covariance, gaussian: nidiff.GaussianModel) -> dict[str, nidiff.Process]:
    facts = schedule_facts(covariance, gaussian)
    return {text: nidiff.Process(as_schedule(text, facts), covariance) for text in SCHEDULES}


def number(value: float) -> str:
    if value < 1e-9:
        return f"{value:.0e}"
    return "1.0" if 0.995 <= value < 1.005 else f"{value:.2g}" if value < 100 else f"{value:.0f}"


def line(first: list[str], found: dict[str, list[float]]) -> str:
    return "| " + " | ".join([*first, *(" / ".join(map(number, found[name])) for name in METHODS)]) + " |"


def head(*first: str) -> str:
    titles = [*first, *METHODS[:-1], "angle, 1 evaluation"]
    return "| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|"


def bar() -> None:
    """The error over all bands of DPM++ on data |k|^-2.67 at 64², white noise."""
    print("\n| schedule | rows | 3 | 5 | 10 | 20 |\n|---|---|---|---|---|---|")
    gaussian = nidiff.GaussianModel(torch.zeros(64, 64), nidiff.power_law((64, 64), 2.67))
    for name in ("ddpm_linear", "ddpm_cosine"):
        process = nidiff.Process(name, nidiff.Identity((64, 64)))
        cells: dict[str, list[float]] = {}
        for count in (3, 5, 10, 20):
            first = start_row(gaussian.denoiser(process), "gaussian")
            for words, start, part in (
                ("", "prior", process.schedule),
                (", warm start", "gaussian", process.schedule.below(first)),
            ):
                fixed = [
                    nidiff.design.predict(process, gaussian, rows=spacing(part, count), start=start).error
                    for spacing in SPACINGS.values()
                ]
                cells.setdefault(f"best fixed{words}", []).append(min(fixed))
        for words in sorted(cells):
            print(f"| {name} | {words} | " + " | ".join(map(number, cells[words])) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--smoothness", type=float, nargs="+", default=[2, 3, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    gaussian = nidiff.GaussianModel(torch.zeros(128, 128), field(128, 3))
    print(head("128², s = 3: Σ", "schedule"))
    for name, covariance in noises(128, 3).items():
        for text, process in processes(covariance, gaussian).items():
            print(line([name, text], errors(process, gaussian)), flush=True)
    for name, schedule, numbers in PUBLISHED:
        print(f"| {name} | published: {schedule}, RK4 | {numbers} evaluations " + "| " * (len(METHODS) - 1) + "|")

    print("\n" + head("n", "s", "Σ"))
    sizes, smoothness = arguments.sizes, arguments.smoothness
    for n in sizes:
        for s in smoothness:
            gaussian = nidiff.GaussianModel(torch.zeros(n, n), field(n, s))
            for name, covariance in noises(n, s).items():
                # C/Σ decides: that of rougher noise is the same for every s, and of matched noise it is 1.
                if (
                    (name == "white")
                    or (name == "rougher" and s == smoothness[0])
                    or (n, s) == (sizes[0], smoothness[0])
                ):
                    first = [f"{n}²", f"{s:g}"] if name == "white" else [f"{n}²" if name == "rougher" else "any", "any"]
                    print(line([*first, name], row(processes(covariance, gaussian), gaussian)), flush=True)
                    print(f"{n}, s = {s:g}, {name}", file=sys.stderr)
    bar()


if __name__ == "__main__":
    main()
