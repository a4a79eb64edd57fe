"""Which solver makes the best samples with few evaluations of the same trained network? Ours and those of others.

Give run directories of `nidiff train`, or models with their data; runs NAME-0, NAME-1, … are trainings of one problem.
Every method of others is tried in all of its settings on the first training of a problem, in two rounds, on noise of
its own; ours is what `nidiff tune` chose for that training, and stored with it. The best setting per number of
evaluations is then measured on every training, on other noise, the same for all methods. The metric is that of the kind
of data: of pictures the Fréchet distance of features (of pixels where they are smaller than 16×16), of fields the error
of the spectrum. What is measured is stored in --results and not measured again, also by several processes at once.
"""

import argparse
import fcntl
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from fields.peers import Network, draw
from timing import log
from torch import Tensor

import nidiff
from nidiff import style
from nidiff.data.dataset import Dataset, quantise
from nidiff.diffusion.mixture import MixtureModel
from nidiff.evaluation.evaluator import USUAL_FEATURES
from nidiff.evaluation.features import compute_features, load_features, reference_features
from nidiff.evaluation.metrics import METRICS, metrics_for
from nidiff.evaluation.real import RealSource, real_source
from nidiff.evaluation.samples import SampleSet
from nidiff.files import replace_text
from nidiff.generation.loaded_model import Model, SingleProcess, open_model
from nidiff.notation import parse_call

BATCH = 64  # images in one call of the network
FINALISTS = 3  # settings of a method that are tried again with all samples of the screening
SCREENING_SEED, REPORT_SEED = 10**6, 0
SMALL = 16  # pixels; features of photographs see nothing in smaller pictures
ENOUGH = 1000  # held-out items, to compare with them alone
MOST_REAL = 2048
COSINE = 200.0  # sigma; where the noisiest level has more, solvers may leave out those beyond 80
KEYS = {
    "pictures": ("frechet", "kernel", "precision", "recall", "spectrum"),
    "fields": ("spectrum", "values", "increments"),
}
BEST = {"pictures": "frechet", "fields": "spectrum"}
OURS = "nidiff"
HEADLINES = {"pictures": ("frechet",), "fields": ("spectrum", "values", "increments")}
LABELS = {"frechet": "Fréchet distance", "kernel": "kernel distance", "spectrum": "spectrum error"}
LABELS |= {"values": "distance of the values", "increments": "distance of the increments"}
LOW = 1.25  # sigma at which sampling begins, where starts are compared and ours begins at the prior


def settings(table: Tensor) -> dict[str, list[str]]:
    """The settings of every method of others, by its name, for a network with this sigma at every row."""
    end = ",top=80" if table[-1] > COSINE else ""
    rows = [f"spacing={name}{high}" for name in ("trailing", "linspace") for high in dict.fromkeys(["", end])]
    even = [f"spacing={name}{end}" for name in ("karras", "exponential")]
    rest = [f"spacing={name}{end}" for name in ("leading", "beta")]
    every = [*rows, *even, *rest, f"spacing=lu{end}"]
    own = [f"spacing={name},top=80" for name in ("karras", "logsnr", "rows")]
    near = [f"spacing={name},top=20" for name in ("karras", "logsnr")]

    def of(name: str, *options: Iterable[str]) -> list[str]:
        return [f"{name}:{','.join(filter(None, each))}" for each in itertools.product(*options)]

    return {
        "DPM++ 2M": of("dpmpp", every) + of("dpmpp", rows[:1], ["solver=heun"]),
        "DPM++ 3M": of("dpmpp", every, ["order=3"]),
        "DPM++ 2M SDE": of("dpmpp", every, ["noise=true"]),
        "UniPC": of("unipc", [*rows, *even], ("order=2", "order=3"))
        + of("unipc", [*rest, f"{rows[0]},solver=bh1"]),
        "DEIS": of("deis", [*rows, *even], ("order=2", "order=3")) + of("deis", rest),
        "SA-Solver": of("sa", [*rows, rest[0]], ("", "tau=0.5", "tau=1")) + of("sa", rows[:1], ["order=3"]),
        "iPNDM": of("ipndm", own, ("order=4", "order=2")) + of("ipndm", near, ("order=4", "order=3")),
        "GITS + iPNDM": of("gits", own[:1], ("order=4", "order=2"), ("cost=dev", "cost=l2")) + of("gits", near[:1]),
        "DPM-Solver-v3": of("v3", own, ("order=2", "order=3", "order=2,corrector=true"))
        + of("v3", own, ["pooled=true,plain=true"]) + of("v3", [*own[2:], *near[1:]], ["plain=true"]),
        "REAB": of("reab", [*own, *near[1:]], ("order=2", "order=3")),
    }  # fmt: skip


MIXTURES: dict[tuple[Any, ...], MixtureModel] = {}  # of the trainings of a problem alike


class Problem:
    """A trained model, its data, and how samples are compared with them."""

    def __init__(self, run: Path, data: str | None = None) -> None:
        self.model: Model = open_model(run, SingleProcess(torch.device("cpu")))
        self.name, _, training = run.absolute().name.rpartition("-")
        self.name, self.training = (self.name, training) if training.isdigit() else (run.absolute().name, "0")
        self.source: RealSource = real_source(run, data, like=self.model.grid)
        self.train: Dataset = self.source.load("train", annotations=("labels",)).data
        self.held_out: Dataset = self.source.held_out().data
        self.is_picture = self.model.grid.kind == "picture" and self.model.grid.dtype == "uint8"
        self.kind = "pictures" if self.is_picture else "fields"
        self._denoisers: dict[tuple[Any, ...], nidiff.Denoiser] = {}
        net = self.model.denoiser.net
        if len(self.model.shape) == 3 and isinstance(net, torch.nn.Module):
            net.to(memory_format=torch.channels_last)

    @cached_property
    def features(self) -> Any:
        if self.kind == "fields":
            return None
        return load_features("pixels" if min(self.model.shape[1:]) < SMALL else USUAL_FEATURES)

    @cached_property
    def reference(self) -> Dataset:
        """What samples are compared with: of pictures the held-out ones, or the others where these are few. Fields are
        compared with what the network has learned from: a later part of a simulation may have another spectrum."""
        return self.held_out if self.is_picture and len(self.held_out) >= ENOUGH else self.train

    @cached_property
    def real(self) -> SampleSet:
        return self.samples(self._some(self.reference, MOST_REAL), "real")

    def samples(self, x: Tensor, name: str = "") -> SampleSet:
        """Items in the units of the model, with their features if they are pictures."""
        if self.kind == "fields":
            return SampleSet(x, grid=self.model.grid, boundary=self.model.boundary)
        pixels = quantise(x)
        if name:
            features = reference_features(pixels, self.features, name=f"{self.name} {name}").features
        else:
            features = compute_features(self.features, pixels)
        return SampleSet(pixels, features, self.features.name, boundary=self.model.boundary)

    def _some(self, data: Dataset, count: int, skip: int = 0) -> Tensor:
        """Items spread over the data, in random order if that has none of its own."""
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[skip : skip + count]
        return data.batch(order)

    def measure(self, generated: SampleSet, keys: Sequence[str]) -> dict[str, float]:
        """Metrics without errors; those over trainings count."""
        names = {
            key: label for label, metric in metrics_for(self.real).items() for key in METRICS if METRICS[key] is metric
        }
        answers = {key: METRICS[key].function(self.real, generated) for key in keys if key in names}
        measured = {key: answer[0] if isinstance(answer, tuple) else answer for key, answer in answers.items()}
        if not self.is_picture and len(keys) > 1:
            measured["held-out spectrum"] = METRICS["spectrum"].function(self._others, generated)
        return measured

    @cached_property
    def _others(self) -> SampleSet:
        return self.samples(self._some(self.held_out, MOST_REAL))

    def floor(self, count: int) -> dict[str, float]:
        """The metrics of as many other real data."""
        if self.reference is self.held_out:
            rest = self._some(self.train, count)
        elif len(self.train) >= MOST_REAL + count:
            rest = self._some(self.train, count, skip=MOST_REAL)
        else:
            rest = self._some(self.held_out, count)
        return self.measure(self.samples(rest), KEYS[self.kind])

    @cached_property
    def network(self) -> Network:
        return Network(self.model.denoiser, self._some(self.train, 512))

    def denoiser(self, mixture: bool = False, clusters: int | None = None, rank: int | None = None) -> nidiff.Denoiser:
        """Ours, with κ, and if need be with the ``mixture`` of the training data: the model's, or a Gaussian for each
        class, if there are classes, or for each of its ``clusters``."""
        if (mixture, clusters, rank) not in self._denoisers:
            denoiser = self.model.denoiser
            if mixture and (denoiser.mixture is None or clusters or rank):
                key = (self.name, clusters, rank)
                if key not in MIXTURES:
                    basis = denoiser.gaussian.spatial if denoiser.gaussian else "reflecting"
                    MIXTURES[key] = nidiff.fit_mixture(
                        self._batches(), self.train.labels, clusters, basis=basis, rank=rank
                    )
                denoiser = denoiser.with_mixture(MIXTURES[key])
            if denoiser.gaussian is not None and denoiser.kappa is None:
                denoiser = nidiff.design.measure_kappa(denoiser, self._some(self.held_out, 256))
            self._denoisers[mixture, clusters, rank] = denoiser
        return self._denoisers[mixture, clusters, rank]

    def _batches(self) -> list[Tensor]:
        return [self.train.batch(rows) for rows in torch.arange(len(self.train)).split(4096)]

    def draw(self, method: str, text: str, num_steps: int, count: int, seed: int) -> Tensor:
        """Samples of a method from seeds; the first noise of a seed is the same for all that begin at the prior."""
        name, options = parse_call("method", text)
        of_mixture = {key: options.pop(key) for key in ("clusters", "rank") if key in options}
        sampler = f"{name}:{','.join(f'{key}={value}' for key, value in options.items())}"
        parts = []
        for first in range(seed, seed + count, BATCH):
            seeds = range(first, min(first + BATCH, seed + count))
            shape = (len(seeds), *self.model.shape)
            if not method.startswith(OURS):
                parts.append(draw(self.network, text, shape, num_steps, seeds))
            else:
                denoiser = self.denoiser(options.get("start") == "mixture", **of_mixture)
                parts.append(nidiff.sample(denoiser, shape, sampler=sampler, num_steps=num_steps, generator=[*seeds]))
        return torch.cat(parts)


class Results:
    """The measurements made so far, in a JSON file that several processes write to."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def records(self) -> list[dict[str, Any]]:
        return json.loads(self.file.read_text()) if self.file.is_file() else []

    def of(self, **where: Any) -> list[dict[str, Any]]:
        return [record for record in self.records if all(record.get(key) == value for key, value in where.items())]

    def add(self, measured: Callable[[], dict[str, Any]], **where: Any) -> dict[str, Any]:
        """What was measured there, now if it was not before."""
        if known := self.of(**where):
            return known[0]["metrics"]
        begin = time.process_time()
        metrics = {key: float(f"{value:.5g}") for key, value in measured().items()}
        record = {**where, "metrics": metrics, "seconds": round(time.process_time() - begin, 1)}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.file.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # which closing it ends
            lines = [json.dumps(each, ensure_ascii=False) for each in [*self.records, record]]
            replace_text(self.file, "[\n" + ",\n".join(lines) + "\n]\n")
        finally:
            os.close(folder)
        shown = ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())
        place = " ".join(str(where[key]) for key in ("problem", "training", "method", "evaluations", "setting"))
        log(f"{place}: {shown}")
        return metrics


class Bench:
    """One problem and its trainings."""

    def __init__(self, runs: Sequence[Path], results: Results, options: argparse.Namespace) -> None:
        self.runs, self.results, self.options = runs, results, options
        self._open: dict[Path, Problem] = {}

    def problem(self, run: Path) -> Problem:
        if run not in self._open:
            self._open[run] = Problem(run, self.options.data)
        return self._open[run]

    def _quality(self, problem: Problem, keys: Sequence[str], *drawn: Any) -> Any:
        """The metrics of what `Problem.draw` draws."""
        try:
            x = problem.draw(*drawn)
            if not bool(x.isfinite().all()):
                return {BEST[problem.kind]: math.inf}
            return problem.measure(problem.samples(x), keys)
        except (ValueError, IndexError, AssertionError, nidiff.InputError) as error:  # of a setting that does not work
            log(f"{drawn[:3]}: {type(error).__name__}: {error}")
            return {BEST[problem.kind]: math.inf}

    def screen(self, num_steps: int) -> None:
        """Every setting of the methods of others on the first training, in two rounds."""
        problem = self.problem(self.runs[0])
        best, table = BEST[problem.kind], settings(problem.network.table)
        for method in [name.replace("_", " ") for name in self.options.methods or table]:
            texts = table[method]
            for size, left in zip(self.options.screen, (FINALISTS, 1), strict=True):
                where = {"problem": problem.name, "training": problem.training, "stage": "screening", "method": method}
                where |= {"evaluations": num_steps, "samples": size}
                scores = {
                    text: self.results.add(
                        lambda drawn=(method, text, num_steps, size): self._quality(
                            problem, [best], *drawn, SCREENING_SEED
                        ),
                        **where, setting=text,
                    )[best]
                    for text in texts
                }  # fmt: skip
                texts = sorted(scores, key=scores.__getitem__)[:left]

    def ours(self, num_steps: int) -> str:
        """The sampler that `nidiff tune` chose for the first training."""
        choice = self.problem(self.runs[0]).model.denoiser.choice_for(num_steps)
        if choice is None:
            sys.exit(
                f"{self.runs[0]} has no choice for {num_steps}: nidiff tune {self.runs[0]} --evaluations {num_steps}"
            )
        return choice.sampler

    def report(self, num_steps: int) -> None:
        """The chosen settings on every training; of the methods of others, the --rivals best."""
        first, count = self.problem(self.runs[0]), self.options.samples
        picked = chosen(self.results, first.name, num_steps, BEST[first.kind])
        others = sorted(picked, key=lambda method: picked[method][1])[: self.options.rivals]
        texts = {OURS: self.ours(num_steps)} | {method: picked[method][0] for method in others}
        if self.options.sampler is not None:
            texts[f"{OURS}, {self.options.sampler}"] = self.options.sampler
        for run in self.runs:
            problem = self.problem(run)
            where = {"problem": problem.name, "training": problem.training, "stage": "report", "samples": count}
            if run == self.runs[0]:
                self.results.add(lambda p=problem: p.floor(count), **where, method="real", setting="", evaluations=0)
            for method, text in texts.items():
                self.results.add(
                    lambda p=problem, drawn=(method, text): self._quality(
                        p, KEYS[p.kind], *drawn, num_steps, count, REPORT_SEED
                    ),
                    **where, method=method, setting=text, evaluations=num_steps,
                )  # fmt: skip
            if run != self.runs[0]:
                del self._open[run]

    def copying(self, num_steps: int) -> None:
        """How near samples are to their nearest training image, by the start, next to held-out images."""
        problem = self.problem(self.runs[0])
        count, best = self.options.samples, BEST[problem.kind]
        train = problem.train.all().flatten(1)
        features, some = None, self.options.neighbours
        if some and problem.features is not None and problem.features.name != "pixels":
            features = problem.samples(problem._some(problem.train, some), "neighbours").features
        where = {"problem": problem.name, "training": problem.training, "stage": "copying", "samples": count}

        def nearness(x: Tensor) -> dict[str, float]:
            generated = problem.samples(x)
            sets = [("pixels", x.flatten(1), train)]
            sets += [] if features is None else [("features", generated.features, features)]
            measured = problem.measure(generated, [best, "precision", "recall"])
            for name, mine, theirs in sets:
                nearest = torch.cat([torch.cdist(part, theirs).amin(1) for part in mine.split(256)]).double()
                for share in (0.01, 0.1, 0.5):
                    measured[f"{name} {share:g}"] = nearest.quantile(share).item()
            return measured

        skip = MOST_REAL if problem.reference is problem.held_out else 0  # which samples are compared with
        held_out = problem._some(problem.held_out, count, skip=skip)
        self.results.add(lambda: nearness(held_out), **where, method="held out", setting="", evaluations=0)
        text = self.options.sampler or self.ours(num_steps)
        rule = re.sub(r",?(start=\w+|level=\d+|clusters=\d+|rank=\d+)", "", text).rstrip(":")
        rule += "," if ":" in rule else ":"
        row = int((problem.network.table - LOW).abs().argmin())
        level = match.group() if (match := re.search(r"level=\d+", text)) else f"level={row}"
        starts = {text: text, "prior": f"{rule}start=prior", "Gaussian": f"{rule}start=gaussian,{level}"}
        for clusters in self.options.clusters:
            starts[f"mixture, {clusters} per class"] = f"{rule}start=mixture,{level},clusters={clusters}"
        for name, setting in starts.items():
            self.results.add(
                lambda setting=setting: nearness(problem.draw(OURS, setting, num_steps, count, REPORT_SEED)),
                **where, method=name, setting=setting, evaluations=num_steps,
            )  # fmt: skip


def chosen(results: Results, problem: str, num_steps: int, best: str) -> dict[str, tuple[str, float]]:
    """The best setting of every method that was screened at this number, and its score; where none was, at the nearest
    number. What was measured with the most samples counts."""
    known = results.of(problem=problem, stage="screening")
    counts = {record["evaluations"] for record in known}
    if not counts:
        return {}
    nearest = min(counts, key=lambda count: abs(math.log(count / num_steps)))
    picked: dict[str, dict[str, Any]] = {}
    for record in (record for record in known if record["evaluations"] == nearest):
        before = picked.get(record["method"])
        if before is None or (-record["samples"], record["metrics"][best]) < (
            -before["samples"],
            before["metrics"][best],
        ):
            picked[record["method"]] = record
    return {method: (record["setting"], record["metrics"][best]) for method, record in picked.items()}


# Pages


def tables(results: Results) -> str:
    """Of every problem: its metrics by method and evaluations with the ratio of ours to the best of the others, the
    settings and the other metrics, and how near samples are to training data; mean ± deviation over the trainings."""
    lines: list[str] = []
    for problem in dict.fromkeys(record["problem"] for record in results.records):
        mine = [record for record in results.of(problem=problem, stage="report") if record["metrics"]]
        if not mine:
            continue
        kind = "fields" if "values" in mine[0]["metrics"] else "pictures"
        counts = sorted({record["evaluations"] for record in mine} - {0})
        methods = [*dict.fromkeys(record["method"] for record in mine if record["method"] != "real")]
        for key in HEADLINES[kind]:
            real = [record["metrics"][key] for record in mine if record["method"] == "real"]
            lines += [f"### {problem}: {LABELS[key]}, {mine[0]['samples']:,} samples", ""]
            values = {(m, n): _values(mine, m, n, key) for m in methods for n in counts}
            rows = [["real data", *[_cell(real)] * len(counts)]]
            ordered = sorted(methods, key=lambda m: (OURS not in m, _mean([*values[m, counts[0]].values()])))
            rows += [[method, *(_cell([*values[method, count].values()]) for count in counts)] for method in ordered]
            rows.append(["*ours / best of the others*", *(_ratio(values, methods, count) for count in counts)])
            lines += _table(["method", *map(str, counts)], rows)
        keys = [key for key in mine[0]["metrics"] if key not in HEADLINES[kind]]
        for count in counts:
            rows = []
            for method in ["real", *methods]:
                some = [r for r in mine if r["method"] == method and r["evaluations"] in (0, count)]
                if some:
                    cells = [_cell([r["metrics"].get(key, math.nan) for r in some]) for key in keys]
                    rows.append([method, f"`{some[-1]['setting']}`".replace("``", ""), *cells])
            lines += [f"At {count} evaluations:", ""]
            lines += _table(["method", "setting", *(LABELS.get(key, key) for key in keys)], rows)
        if copies := results.of(problem=problem, stage="copying"):
            keys = [*dict.fromkeys(key for record in copies for key in record["metrics"])]
            rows = [
                [r["method"], *(f"{r['metrics'][key]:.3g}" if key in r["metrics"] else "" for key in keys)]
                for r in copies
            ]
            lines += ["Nearest training data:", "", *_table(["start", *(LABELS.get(key, key) for key in keys)], rows)]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:], ""]


def _values(records: list[dict[str, Any]], method: str, count: int, key: str) -> dict[str, float]:
    """By training."""
    chosen_ = (record for record in records if record["method"] == method and record["evaluations"] == count)
    return {record["training"]: record["metrics"].get(key, math.inf) for record in chosen_}


def _mean(values: list[float]) -> float:
    return statistics.mean(values) if values else math.inf


def _cell(values: list[float]) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 and math.isfinite(sum(values)) else ""
    return f"{statistics.mean(values):.3g}{spread}"


def _ratio(values: dict[tuple[str, int], dict[str, float]], methods: list[str], count: int) -> str:
    """The largest of the ratios of ours to a method of others, each over the trainings that both were measured on: one
    that was measured on fewer counts as well."""
    mine, ratios = values.get((OURS, count), {}), {}
    for method in methods:
        common = mine.keys() & values[method, count].keys()
        if OURS not in method and common:
            ratios[method] = [mine[training] / values[method, count][training] for training in sorted(common)]
    if not ratios:
        return ""
    rival = max(ratios, key=lambda method: _mean(ratios[method]))
    alone = "" if len(ratios[rival]) == len(mine) else f", {len(ratios[rival])} of {len(mine)} trainings"
    return f"{_cell(ratios[rival])} ({rival}{alone})"


@style.drawn
def figure(results: Results, file: Path) -> None:
    """Quality against evaluations, a panel per problem."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator

    reports = results.of(stage="report")
    problems = [*dict.fromkeys(record["problem"] for record in reports)]
    drawing, axes = plt.subplots(1, len(problems), figsize=(style.WIDTH, 3.4), squeeze=False, layout="constrained")
    methods = [*dict.fromkeys(r["method"] for r in reports if r["method"] != "real" and OURS not in r["method"])]
    looks = dict(zip(methods, style.looks(), strict=False))
    for panel, problem in zip(axes[0], problems, strict=True):
        mine = [record for record in reports if record["problem"] == problem]
        best = next(key for key in BEST.values() if key in mine[0]["metrics"])
        counts = sorted({record["evaluations"] for record in mine} - {0})
        for method in [*methods, OURS]:
            means = {n: _mean([*_values(mine, method, n, best).values()]) for n in counts}
            points = {n: mean for n, mean in means.items() if math.isfinite(mean)}
            colour, line = (style.ink(), "-") if method == OURS else looks[method]
            width = 2.6 if method == OURS else 1.2
            panel.plot([*points], [*points.values()], line, color=colour, marker="o", lw=width, label=method)
        real = _mean([record["metrics"][best] for record in mine if record["method"] == "real"])
        if real < panel.get_ylim()[1]:  # of few held-out items it may be more than that of many samples
            panel.axhline(real, color=style.look().soft, ls=":", lw=1)
        panel.set(xscale="log", yscale="log", title=f"{problem}: {LABELS[best]}", xlabel="evaluations")
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.minorticks_off()
        panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        panel.yaxis.set_major_formatter("{x:g}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(file)
    plt.close(drawing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", type=Path, help="run directories, or models with --data")
    parser.add_argument("--data", default=None, help="the data of models that do not say theirs")
    parser.add_argument("--evaluations", nargs="+", type=int, default=[5, 10, 3, 20, 4, 6, 8, 15])
    parser.add_argument("--stages", nargs="+", choices=("screen", "report", "copying"), default=("screen", "report"))
    parser.add_argument("--samples", type=int, default=2048, help="for the report")
    parser.add_argument("--screen", nargs=2, type=int, default=[64, 256], help="samples of the rounds of the screening")
    parser.add_argument("--methods", nargs="+", default=None, help="of others, to screen; default: all")
    parser.add_argument("--rivals", type=int, default=99, help="how many methods of others to report, the best ones")
    parser.add_argument("--clusters", nargs="*", type=int, default=[], help="of every class, for copying")
    parser.add_argument("--sampler", default=None, help="of ours, for copying, or for one more row of the report")
    parser.add_argument("--neighbours", type=int, default=2048, help="training pictures whose features are compared")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "rivals.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", action="store_true", help="print the tables of what is there")
    parser.add_argument("--figure", type=Path, default=None, help="draw quality against evaluations")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    results = Results(options.results)
    trainings: dict[str, list[Path]] = {}
    for run in options.runs:
        name, _, number = run.absolute().name.rpartition("-")
        trainings.setdefault(name if number.isdigit() else run.absolute().name, []).append(run)
    benches = [Bench(runs, results, options) for runs in trainings.values()]
    for num_steps in options.evaluations:
        for bench in benches:
            for stage in options.stages:
                getattr(bench, stage)(num_steps)
    if options.markdown:
        print(tables(results))
    if options.figure:
        figure(results, options.figure)


if __name__ == "__main__":
    sys.exit(main())
