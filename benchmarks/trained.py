"""Does the data's Gaussian help trained networks? Noise × target × solver at few evaluations, three seeds each.

Trains small networks on four kinds of data (paths of a particle, turbulence, digits, small photographs), all with the
same number of steps, data order and noise; draws samples at few evaluations with each solver; and prints a table of
what is wrong with them, mean ± standard deviation over the seeds. What is finished is kept in the folder --cache and
not done again, so that it can be stopped at any time.
"""

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fields import data, metrics, networks
from fields.peers import Network, draw
from fields.training import trained
from timing import log
from torch import Tensor

import nidiff
from nidiff.files import replace_text

NUM_STEPS = (3, 5, 10, 20)


class Problem(NamedTuple):
    """A kind of data, the network for it, how long to train, and how to measure."""

    load: Callable[[Path, Path | None], data.Data]
    network: Callable[[], torch.nn.Module]
    measure: Callable[[data.Data], Callable[[Tensor], metrics.Metrics]]
    boundary: str
    steps: int
    batch: int
    samples: int
    configurations: tuple[str, ...]
    shrinkage: float = 0.0
    """Of the fitted covariance."""


class Configuration(NamedTuple):
    """What a network is trained with: Σ ∝ C^power, C the covariance of the data, and what it predicts."""

    power: float
    target: str
    clip: float | None = None


class Solver(NamedTuple):
    """How to sample; ``kappa`` says whether the solver is told the κ and β of the network."""

    sampler: str
    spacing: str = "trailing"
    kappa: bool = False
    start: str = "prior"

    @property
    def label(self) -> str:
        return f"{self.sampler} {self.spacing}{' κ' if self.kappa else ''}{' warm' if self.start != 'prior' else ''}"


CONFIGURATIONS = {
    "white, eps": Configuration(0, "eps", 1.0),
    "white, v": Configuration(0, "v"),
    "C, v": Configuration(1, "v"),
    "C^½, v": Configuration(0.5, "v"),
    "white, residual": Configuration(0, "residual"),
    "C, residual": Configuration(1, "residual"),
    "C^½, residual": Configuration(0.5, "residual"),
}
USUAL = tuple(name for name in CONFIGURATIONS if name != "white, eps")

PROBLEMS = {
    "paths": Problem(
        data.paths,
        networks.DilatedConvolutions,
        lambda found: metrics.Paths(found.train),
        "reflecting",
        steps=1000,
        batch=64,
        samples=1000,
        configurations=USUAL,
    ),
    "turbulence": Problem(
        data.turbulence,
        lambda: networks.Patched(1, 32, (16, 32, 64), periodic=True),
        lambda found: metrics.Turbulence(found.train),
        "periodic",
        steps=600,
        batch=32,
        samples=256,
        configurations=USUAL,
    ),
    "digits": Problem(
        data.digits,
        networks.Plain,
        lambda found: metrics.Digits(found.train, found.labels),
        "reflecting",
        steps=800,
        batch=128,
        samples=1000,
        configurations=("white, eps", *USUAL),
        shrinkage=0.02,
    ),
    "photographs": Problem(
        data.photographs,
        lambda: networks.Patched(3, 16, (32, 64), periodic=False),
        lambda found: metrics.Photographs(found.train),
        "reflecting",
        steps=1200,
        batch=64,
        samples=512,
        configurations=("white, v", "white, residual"),
        shrinkage=0.02,
    ),
}

SOLVERS = [
    *(Solver("dpmpp_2m", spacing) for spacing in ("trailing", "logsnr", "karras")),
    *(Solver("angle_2m", spacing, kappa=True) for spacing in ("angle", "trailing", "logsnr")),
    *(Solver("angle_2m", spacing) for spacing in ("angle", "trailing")),
    *(Solver("angle", spacing, kappa=True) for spacing in ("angle", "trailing")),
    Solver("angle_2m", "angle", kappa=True, start="gaussian"),
    Solver("unipc"),
]


class Bench:
    """One problem: its data, what is fitted to them, and the metrics."""

    def __init__(self, name: str, cache: Path, data_dir: Path | None) -> None:
        self.name, self.cache, self.problem = name, cache, PROBLEMS[name]
        self.data = self.problem.load(cache, data_dir)
        self.gaussian = nidiff.fit_gaussian(
            self.data.train,
            basis=self.problem.boundary,
            channels="joint",
            shrinkage=self.problem.shrinkage,
        )

    @cached_property
    def measure(self) -> Callable[[Tensor], metrics.Metrics]:
        """The metrics of generated data."""
        return self.problem.measure(self.data)

    def denoiser(self, name: str, seed: int) -> nidiff.Denoiser:
        """A trained denoiser that knows the data's Gaussian."""
        configuration, problem = CONFIGURATIONS[name], self.problem
        covariance = self.gaussian.power(configuration.power)
        covariance = covariance if configuration.power else nidiff.Identity(covariance.event_shape)
        torch.manual_seed(seed)
        denoiser = nidiff.Denoiser(
            problem.network(),
            nidiff.Process(nidiff.schedules.ddpm_cosine(1000), covariance),
            configuration.target,
            clip=configuration.clip,
            gaussian=self.gaussian,
        )
        settings = {"steps": problem.steps, "batch": problem.batch, "seed": seed}
        folder = self.cache / self.name / f"{name.replace(', ', '-')}-{seed}"
        told = trained(denoiser, self.data.train, folder, settings)
        log(f"{self.name}, {name}, seed {seed}: loss {told['loss']:.4f}, {told['processor_seconds']} s")
        return denoiser

    def draw(self, denoiser: nidiff.Denoiser, solver: Solver, num_steps: int, seed: int) -> Tensor:
        """Samples, from noise that depends on the seed alone."""
        denoiser = denoiser if solver.kappa else denoiser.with_kappa(None)
        count = self.problem.samples
        shape, seeds = (count, *self.data.train.shape[1:]), range(seed * count, (seed + 1) * count)
        if solver.sampler == "unipc":
            return draw(Network(denoiser), "unipc", shape, num_steps, seeds)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return nidiff.sample(
                denoiser,
                shape,
                sampler=solver.sampler,
                spacing=solver.spacing,
                num_steps=num_steps,
                start=solver.start,
                generator=seeds,
                tile=256,
            )

    def quality(self, denoiser: nidiff.Denoiser, solver: Solver, num_steps: int, seed: int) -> metrics.Metrics:
        return self.measure(self.draw(denoiser, solver, num_steps, seed))


class Results:
    """The measurements made so far, in a JSON file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
        self.known = {self._key(record) for record in self.records}

    @staticmethod
    def _key(record: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(record.get(key) for key in ("problem", "configuration", "seed", "solver", "num_steps"))

    def add(self, measured: Callable[[], metrics.Metrics], **where: Any) -> None:
        """Measure and write down, unless it is there already."""
        if self._key(where) in self.known:
            return
        record = {**where, "metrics": {key: round(value, 6) for key, value in measured().items()}}
        self.records.append(record)
        self.known.add(self._key(where))
        replace_text(self.file, json.dumps(self.records, indent=1, ensure_ascii=False) + "\n")

    def markdown(self) -> str:
        """One table per problem and metric: mean ± standard deviation over the seeds, against evaluations."""
        lines: list[str] = []
        for problem in dict.fromkeys(record["problem"] for record in self.records):
            mine = [record for record in self.records if record["problem"] == problem]
            floor = next((record["metrics"] for record in mine if record["solver"] == "held out"), {})
            counts = sorted({record["num_steps"] for record in mine} - {0})
            for metric in mine[0]["metrics"]:
                lines += [f"### {problem}: {metric}", ""]
                lines += [f"held out: {floor[metric]:.3g}", ""] if metric in floor else []
                lines += ["| trained with | solver | " + " | ".join(map(str, counts)) + " |"]
                lines += ["|" + " --- |" * (2 + len(counts))]
                rows = {(r["configuration"], r["solver"]) for r in mine if r["solver"] != "held out"}
                for configuration, solver in sorted(rows, key=_order):
                    cells = [
                        _cell([r["metrics"][metric] for r in mine if _is(r, configuration, solver, count)])
                        for count in counts
                    ]
                    lines += [f"| {configuration} | {solver} | " + " | ".join(cells) + " |"]
                lines += [""]
        return "\n".join(lines)


def _order(row: tuple[str, str]) -> tuple[int, int]:
    configuration, solver = row
    return [*CONFIGURATIONS].index(configuration), [each.label for each in SOLVERS].index(solver)


def _is(record: dict[str, Any], configuration: str, solver: str, num_steps: int) -> bool:
    return (record["configuration"], record["solver"], record["num_steps"]) == (configuration, solver, num_steps)


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3g}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=["paths", "turbulence", "digits"])
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=None)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--num-steps", nargs="+", type=int, default=NUM_STEPS, help="evaluations of the network")
    parser.add_argument("--solvers", nargs="*", default=None, help="labels of the solvers; none: only train")
    parser.add_argument("--cache", type=Path, default=Path("out/fields"), help="folder of data, weights and results")
    parser.add_argument("--data-dir", type=Path, default=None, help="where the binary files of CIFAR-10 are")
    parser.add_argument("--report", action="store_true", help="only print the tables of what is there")
    options = parser.parse_args()
    results = Results(options.cache / "results.json")
    for name in () if options.report else options.problems:
        bench = Bench(name, options.cache, options.data_dir)
        if options.solvers != []:
            results.add(
                lambda bench=bench: bench.measure(bench.data.held_out[: bench.problem.samples]),
                problem=name,
                configuration="",
                seed=0,
                solver="held out",
                num_steps=0,
            )
        for seed in options.seeds:
            for configuration in options.configurations or bench.problem.configurations:
                if configuration in bench.problem.configurations:
                    denoiser = bench.denoiser(configuration, seed)
                    for solver in SOLVERS:
                        if options.solvers is not None and solver.label not in options.solvers:
                            continue
                        if solver.sampler == "unipc" and denoiser.target_name != "eps":
                            continue
                        if solver.kappa and denoiser.kappa is None:
                            denoiser = nidiff.design.measure_kappa(denoiser, bench.data.train)
                        for num_steps in options.num_steps:
                            results.add(
                                partial(bench.quality, denoiser, solver, num_steps, seed),
                                problem=name,
                                configuration=configuration,
                                seed=seed,
                                solver=solver.label,
                                num_steps=num_steps,
                            )
    table = results.markdown()
    replace_text(options.cache / "results.md", table)
    print(table)


if __name__ == "__main__":
    sys.exit(main())
