"""The monthly temperatures of the NCEP/NCAR Reanalysis: maps, a few stations, and finer maps (docs/climate.md).

    python benchmarks/stories/climate.py air.mon.mean.nc runs/ncep-white-? runs/ncep-gff-?

Runs are called NAME-SEED. What is not yet in benchmarks/results/climate.json is drawn by the commands of the page (18
held-out months, 19 samples of each; stations of the run's own seed) and measured; then the tables are printed. The
rivals see the same observations and answer with 19 samples, too:

- kriging: the model's own Gaussian, stationary in its units, and no network;
- optimal interpolation: a Gaussian with the whole covariance of the training months, of which a share is replaced by
  that of kriging. The share is the best one for the last ten training years, given those before.

Everything is in degrees, with the weights of latitudes.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray
from numpy.typing import NDArray
from results import Results, markdown, mean_and_spread

import nidiff
from nidiff.cli import main
from nidiff.data.weights import point_weights
from nidiff.generation.baselines import BASELINES
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.generation.observed import Observed
from nidiff.inverse.scores import covered, crps

Array = NDArray[Any]

HELD_OUT = "time=2016-01:"
MONTHS, EVERY, COUNT, MAPS = 120, 7, 19, 480  # held out, every 7th is restored; samples of each, and of none
NOISE, FACTOR = 0.5, 4  # degrees of a station, and points of a block
SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
PLACES = {"Niño 3.4": (-5, 5, 190, 240), "Iceland": (60, 70, 320, 350)}  # degrees north and east
ZONES = {"0–20°": (0, 20), "20–60°": (20, 60), "60–90°": (60, 90)}
BANDS = (1, 2, 3, 5, 9, 17, 33, 73)  # waves round a circle of latitude
SAMPLERS = {"maps": "angle_2m", "from the mixture": "angle_2m:start=mixture,max_loss=0.01"}
METHODS = {"": "gaussian:tolerance=1e-3", " by its mixture": "mixture"}
TASKS = {
    "stations": ("--mask", "random:0.01", "--noise", str(NOISE)),
    "coarse": ("--scale", str(FACTOR)),
}


class Record:
    """The file of NOAA, in anomalies of two lists of months: those trained on, and those held out."""

    def __init__(self, path: str, held_out: str = HELD_OUT) -> None:
        options: Any = {"remove": "climatology", "scaling": "standard:per=pixel", "held_out": held_out}
        self.train = nidiff.load_dataset(path, **options)
        self.test = nidiff.load_dataset(path, split="test", **options)
        self.scale = torch.as_tensor(self.train.scaling.scale).numpy()[0]
        grid = self.train.grid
        self.latitude, self.longitude = (np.array(grid.coordinates[axis]) for axis in grid.axes)
        weights = point_weights("latitude", grid, self.train.shape)
        assert weights is not None
        self.weights = weights.numpy()[0]

    @cached_property
    def past(self) -> Array:
        """Anomalies [months, latitude, longitude] of the training years, in standard deviations."""
        return self.train.all()[:, 0].double().numpy()

    @cached_property
    def future(self) -> Array:
        """Those of the held-out months."""
        return self.test.all()[:, 0].double().numpy()

    @cached_property
    def normals(self) -> Array:
        """The climatology of the held-out months, in degrees."""
        return self.test.stored(torch.arange(len(self.test)))[:, 0].double().numpy() - self.scale * self.future

    def region(self, south: float, north: float, west: float, east: float) -> Array:
        return np.outer(
            (self.latitude >= south) & (self.latitude <= north), (self.longitude >= west) & (self.longitude <= east)
        )

    def mean(self, values: Array, where: Array | float = 1.0) -> Array:
        """The mean over the area, or a part of it."""
        weights = self.weights * where
        return (values * weights).sum((-2, -1)) / weights.sum()


# Gaussians ------------------------------------------------------------------------------------------------------------


class Gaussian:
    """N(0, (1 − share) S + share C) in standard deviations: S is the covariance of ``fields`` [N, latitude, longitude],
    and C that of a model. A share of 1 is kriging."""

    def __init__(self, fields: Array, covariance: nidiff.Covariance, share: float) -> None:
        self.fields, self.covariance, self.share = fields / np.sqrt(len(fields)), covariance, share

    def draw(self, count: int, seed: int) -> Array:
        rng = np.random.default_rng(seed)
        near = np.tensordot(rng.normal(size=(count, len(self.fields))), self.fields, 1)
        far = self.covariance.sample((count, 1, *self.fields.shape[1:]), torch.Generator().manual_seed(seed))
        return np.sqrt(1 - self.share) * near + np.sqrt(self.share) * far[:, 0].double().numpy()

    def gain(self, rows: Array, noise: float) -> Array:
        """B Hᵀ (H B Hᵀ + R)⁻¹ of observations by ``rows`` H [m, latitude, longitude], as [m, latitude, longitude]."""
        near = np.tensordot(np.tensordot(rows, self.fields, ((1, 2), (1, 2))), self.fields, 1)
        far = self.covariance.matmul(torch.from_numpy(rows[:, None]))[:, 0].double().numpy()
        across = (1 - self.share) * near + self.share * far
        seen = np.tensordot(across, rows, ((1, 2), (1, 2))) + noise**2 * np.eye(len(rows))
        return np.linalg.solve(seen, across.reshape(len(rows), -1)).reshape(rows.shape)

    def posterior(self, y: Array, rows: Array, noise: float, count: int, seed: int = 0) -> Array:
        """Samples [count, N, latitude, longitude] given y [N, m]: draws, moved by what they do not explain."""
        gain, rng = self.gain(rows, noise), np.random.default_rng(seed)
        draws = self.draw(count * len(y), seed).reshape(count, len(y), *rows.shape[1:])
        seen = np.tensordot(draws, rows, ((2, 3), (1, 2))) + noise * rng.normal(size=(count, *y.shape))
        return draws + np.tensordot(y - seen, gain, 1)


def rows_of(observed: Array, scale: Array) -> Array:
    """H [m, latitude, longitude] from standard deviations to the observed numbers [latitude, longitude], in degrees:
    those that are not NaN, or means over blocks."""
    if observed.shape == scale.shape:
        places = np.argwhere(~np.isnan(observed))
        rows = np.zeros((len(places), *scale.shape))
        rows[np.arange(len(places)), places[:, 0], places[:, 1]] = 1
        return rows * scale
    cells = torch.eye(scale.size, dtype=torch.float64).reshape(-1, 1, *scale.shape)
    pooled = nidiff.operators.pool(FACTOR)(cells)
    return pooled.flatten(1).T.reshape(-1, *scale.shape).numpy() * scale


# Scores ---------------------------------------------------------------------------------------------------------------


def scores(record: Record, samples: Array, truth: Array) -> dict[str, float]:
    """Of samples [S, N, latitude, longitude] of anomalies in degrees."""
    mean, draws, real = samples.mean(0), torch.from_numpy(samples), torch.from_numpy(truth)
    squares = (mean - truth) ** 2
    found = {"rmse": np.sqrt(record.mean(squares).mean())}
    found |= {zone: np.sqrt(record.mean(squares, part(record, *ends)).mean()) for zone, ends in ZONES.items()}
    if len(samples) > 1:
        found["crps"] = record.mean(crps(draws, real).numpy()).mean()
        for share in (0.5, 0.9):
            found[f"in {share:.0%}"] = record.mean(covered(draws, real, share).double().numpy()).mean()
        spread, error = (np.log(field.mean(0) ** 0.5)[1:-1] for field in (samples.var(0, ddof=1), squares))
        found["spread and error"] = np.corrcoef(spread.ravel(), error.ravel())[0, 1]
        found["beyond scale"] = np.corrcoef(*((f - np.log(record.scale[1:-1])).ravel() for f in (spread, error)))[0, 1]
    else:
        found["crps"] = record.mean(np.abs(mean - truth)).mean()
    return {name: float(value) for name, value in found.items()}


def part(record: Record, low: float, high: float) -> Array:
    """Where the latitude is between these, on either side of the equator."""
    return ((np.abs(record.latitude) >= low) & (np.abs(record.latitude) <= high)).astype(float)[:, None]


def zonal(record: Record, fields: Array) -> Array:
    """The power [bands] in waves round circles of latitude, of fields [..., latitude, longitude]."""
    size = fields.shape[-1]
    power = np.abs(np.fft.rfft(fields)) ** 2
    power[..., 1 : (size + 1) // 2] *= 2
    weights = record.weights.mean(1) / record.weights.mean(1).sum()
    each = np.einsum("nlk,l->k", power.reshape(-1, *power.shape[-2:]), weights) / power[..., 0, 0].size / size**2
    return np.array([each[low:high].sum() for low, high in pairwise(BANDS)])


def correlations(record: Record, fields: Array, place: str) -> Array:
    """Of each point with the mean over a place."""
    series = record.mean(fields, record.region(*PLACES[place]))
    series = series - series.mean()
    moved = fields - fields.mean(0)
    return np.tensordot(series, moved, 1) / np.sqrt((series**2).sum() * (moved**2).sum(0))


def climate(record: Record, fields: Array) -> dict[str, Array]:
    """What is compared of maps, about their own mean."""
    moved = fields - fields.mean(0)
    deviation = moved.std(0)
    standard = moved / deviation
    found = {"spectrum": zonal(record, moved), "variance": (moved**2).mean((0, 2))}
    found |= {place: correlations(record, fields, place) for place in PLACES}
    found["skewness"] = (standard**3).mean(0)
    found["beyond 3 sd"] = np.array(record.mean((np.abs(standard) > 3).mean(0)))
    return found


def compared(record: Record, mine: Mapping[str, Array], real: Mapping[str, Array]) -> dict[str, float]:
    """The differences of two climates: logarithms of spectra and variances, root mean squares of maps."""
    latitudes = record.weights.mean(1) / record.weights.mean(1).sum()
    found = {
        "spectrum": np.abs(np.log(mine["spectrum"] / real["spectrum"])).mean(),
        "variance": (np.abs(np.log(mine["variance"] / real["variance"])) * latitudes).sum(),
        "finest": mine["spectrum"][-1] / real["spectrum"][-1],
        "beyond 3 sd": mine["beyond 3 sd"],
    }
    found |= {name: np.sqrt(record.mean((mine[name] - real[name]) ** 2)) for name in (*PLACES, "skewness")}
    return {name: float(value) for name, value in found.items()}


# Files of the commands ------------------------------------------------------------------------------------------------


def write_months(path: str, out: Path) -> None:
    """Every seventh month of ten held-out years, the file that is restored."""
    if not out.exists():
        with xarray.open_dataset(path) as table:
            table.sel(time=slice("2016", "2025")).isel(time=slice(None, None, EVERY)).to_netcdf(out)


def restored(run: Path, months: Path, task: str, seed: int, way: str = "") -> tuple[Array, Array]:
    """Samples [S, N, latitude, longitude] and what was observed, in degrees."""
    out, method = run / (task + way.replace(" ", "-")), ("--num-steps", "10", "--method", METHODS[way])
    words = (*TASKS[task], *method, "--degrade", "--samples", str(COUNT), "--seed", str(seed), "--out", str(out))
    assert main(["restore", str(run), str(months), *words, "--quiet"]) == 0
    with np.load(out / "samples.npz") as file:
        samples = file["arr_0"][..., 0].astype(np.float64)
    return samples.swapaxes(0, 1), np.load(out / "observed.npy")[..., 0].astype(np.float64)


def sampled(run: Path, way: str) -> Array:
    """Maps [MAPS, latitude, longitude] of the held-out months, in degrees."""
    out = run / way.replace(" ", "-")
    words = ("--times", "2016-01:2025-12", "--sampler", SAMPLERS[way], "--num-steps", "10", "--seeds", f"0-{MAPS - 1}")
    assert main(["sample", str(run), *words, "--out", str(out), "--quiet"]) == 0
    with np.load(out / "samples.npz") as file:
        return file["arr_0"][..., 0].astype(np.float64)


class Story:
    """The measurements of one record and its runs, in files of ``folder``."""

    def __init__(self, path: str, runs: Sequence[Path], results: Results, folder: Path) -> None:
        self.path, self.runs, self.results, self.months = path, runs, results, folder / "months.nc"
        write_months(path, self.months)

    @cached_property
    def record(self) -> Record:
        return Record(self.path)

    @cached_property
    def truth(self) -> Array:
        """Anomalies of the restored months, in degrees."""
        return self.record.scale * self.record.future[:MONTHS:EVERY]

    @cached_property
    def covariance(self) -> nidiff.Covariance:
        """That of kriging, which is fitted to the training months: the same in all runs of one boundary."""
        gaussian = nidiff.load_model(self.runs[0] / "model").gaussian
        assert gaussian is not None
        return gaussian.covariance

    def share(self, rows: Array, noise: float) -> float:
        """That of C in optimal interpolation: the best one for the last ten training years, given those before."""
        past, scale, rng = self.record.past, self.record.scale, np.random.default_rng(0)
        before, after = past[:-MONTHS], past[-MONTHS::EVERY]
        y = np.tensordot(after, rows, ((1, 2), (1, 2)))
        y = y + noise * rng.normal(size=y.shape)
        errors = {}
        for share in SHARES:
            mean = np.tensordot(y, Gaussian(before, self.covariance, share).gain(rows, noise), 1)
            errors[share] = float(self.record.mean((scale * (mean - after)) ** 2).mean())
        return min(errors, key=lambda share: errors[share])

    def rivals(self, observed: Array, seed: int) -> Iterable[tuple[str, Callable[[], Array]]]:
        """Samples [S, N, latitude, longitude] of anomalies in degrees, by rival."""
        record = self.record
        rows = rows_of(observed[0], record.scale)
        is_mask = observed.shape[1:] == record.scale.shape
        normals = record.normals[:MONTHS:EVERY]
        seen = observed - (normals if is_mask else pooled(normals))
        y = seen.reshape(len(seen), -1)[:, ~np.isnan(seen[0]).ravel()]
        noise = NOISE if is_mask else 1e-3  # of numbers that are exact
        yield "climatology", lambda: np.zeros((1, *normals.shape))
        if not is_mask:
            yield "bicubic", lambda: self.bicubic(seen)[None]

        def gaussian(share: float) -> Array:
            return record.scale * Gaussian(record.past, self.covariance, share).posterior(y, rows, noise, COUNT, seed)

        yield "kriging", lambda: gaussian(1.0)
        yield "optimal interpolation", lambda: gaussian(self.share(rows, noise))
        if is_mask:
            yield "the run's mixture", lambda: self.by_mixture(seen)[None]

    def by_mixture(self, seen: Array) -> Array:
        """The mean given the stations, by the one Gaussian with a whole covariance that a run fits and stores."""
        model, noise = nidiff.load_model(self.runs[0]), torch.from_numpy(NOISE / self.record.scale).float()[None]
        assert model.mixture is not None
        whole, levels = model.mixture.denoiser(model.process), model.process.schedule
        observed = torch.from_numpy(seen / self.record.scale).float()[:, None]
        means = []
        for y in observed.split(1):
            given = nidiff.posterior(whole, nidiff.Observation.missing(y, noise), "mmps", iterations=30)
            with torch.no_grad():  # at the noisiest level x says nothing
                means.append(given(torch.zeros_like(y), levels.level(len(levels) - 1)))
        return self.record.scale * torch.cat(means)[:, 0].double().numpy()

    def bicubic(self, seen: Array) -> Array:
        model = open_model(self.runs[0], process_state())._replace(times=None)
        y = torch.from_numpy(seen[:, None]) / float(np.sqrt((self.record.scale**2).mean()))
        observed = Observed.of(model, nidiff.Observation(y, nidiff.operators.pool(FACTOR)), FACTOR)
        found = BASELINES["bicubic"](model, observed, 1, 0)
        assert found is not None
        return self.record.scale * found.mean[:, 0].double().numpy()

    def measure(self) -> None:
        for run in self.runs:
            name, seed = run.name, int(run.name.rpartition("-")[2])
            for way in SAMPLERS:
                key = f"{name}/maps" if way == "maps" else f"{run.name.rpartition('-')[0]} {way}-{seed}/maps"
                self.results.measured(key, lambda run=run, way=way: self.maps(sampled(run, way)))
            for task in TASKS:
                self.task(run, name, task, seed)
        real = climate(self.record, self.record.scale * self.record.future)
        past = self.record.scale * self.record.past
        self.results.measured("training years/maps", lambda: compared(self.record, climate(self.record, past), real))
        self.results.measured("held-out years/maps", lambda: compared(self.record, real, real))
        for number, first in enumerate(range(len(past) - 6 * MONTHS, len(past), MONTHS)):
            decade = past[first : first + MONTHS]
            self.results.measured(
                f"ten training years-{number}/maps",
                lambda decade=decade: compared(self.record, climate(self.record, decade), real),
            )
        for seed in range(3):
            for name, share in (("stationary Gaussian", 1.0), ("whole covariance", 0.1)):
                law = Gaussian(self.record.past, self.covariance, share)
                self.results.measured(
                    f"{name}-{seed}/maps",
                    lambda law=law, seed=seed: self.maps(self.record.scale * law.draw(MAPS, seed), are_anomalies=True),
                )

    def task(self, run: Path, name: str, task: str, seed: int) -> None:
        """Restored months of a run and, once for each seed, what the rivals make of the same observations."""
        kind, last = name.rpartition("-")[0], "the run's mixture" if task == "stations" else "optimal interpolation"
        for way in METHODS:
            key = f"{kind}{way}-{seed}/{task}"
            self.results.measured(key, lambda way=way: self.by_network(run, task, seed, way))
        if f"{last}-{seed}/{task}" in self.results.values:
            return
        _, observed = restored(run, self.months, task, seed)
        for rival, answer in self.rivals(observed, seed):
            self.results.measured(f"{rival}-{seed}/{task}", lambda answer=answer: self.scored(answer(), task))

    def by_network(self, run: Path, task: str, seed: int, way: str) -> dict[str, float]:
        samples, _ = restored(run, self.months, task, seed, way)
        return self.scored(samples - self.record.normals[:MONTHS:EVERY], task)

    def scored(self, samples: Array, task: str) -> dict[str, float]:
        found = scores(self.record, samples, self.truth)
        if task == "coarse":
            power, real = zonal(self.record, samples), zonal(self.record, self.truth)
            found |= {f"waves from {low}": float(ratio) for low, ratio in zip(BANDS, power / real, strict=False)}
        return found

    def maps(self, fields: Array, *, are_anomalies: bool = False) -> dict[str, float]:
        record = self.record
        if not are_anomalies:
            fields = fields - record.normals[:MONTHS][np.arange(len(fields)) % MONTHS]
        return compared(record, climate(record, fields), climate(record, record.scale * record.future))

    def store_figures(self, folder: Path) -> None:
        """What climate_figures.py draws, of the first run."""
        run, record = self.runs[0], self.record
        seed = int(run.name.rpartition("-")[2])
        samples, observed = restored(run, self.months, "stations", seed)
        samples = samples - record.normals[:MONTHS:EVERY]
        others = {name: answer for name, answer in self.rivals(observed, seed) if name != "climatology"}
        where = {"latitude": record.latitude, "longitude": record.longitude}
        month = {
            "truth": self.truth[0],
            "seen": np.argwhere(~np.isnan(observed[0])),
            "kriging": others["kriging"]().mean(0)[0],
            "whole": others["optimal interpolation"]().mean(0)[0],
            "mean": samples.mean(0)[0],
            "sample": samples[0, 0],
            "spread": samples.std(0, ddof=1)[0],
        }
        save(folder / "climate_stations.npz", where | month)
        normals = record.normals[:MONTHS][np.arange(MAPS) % MONTHS]
        sets = {
            "held-out years": record.scale * record.future,
            "training years": record.scale * record.past,
            "network": sampled(run, "maps") - normals,
            "network from the mixture": sampled(run, "from the mixture") - normals,
            "stationary Gaussian": Gaussian(record.past, self.covariance, 1.0).draw(MAPS, 0),
            "whole covariance": Gaussian(record.past, self.covariance, 0.1).draw(MAPS, 0),
        }
        maps = {
            f"{place}/{name}": correlations(record, fields, place) for place in PLACES for name, fields in sets.items()
        }
        save(folder / "climate_teleconnections.npz", where | maps | {"places": np.array([*PLACES])})


def save(file: Path, arrays: Mapping[str, Array]) -> None:
    """Two digits behind the point are enough for a figure, and compress well."""
    rounded = {
        name: array.round(2).astype(np.float16) if array.dtype == np.float64 else array
        for name, array in arrays.items()
    }
    np.savez_compressed(file, **rounded)


def pooled(fields: Array) -> Array:
    return nidiff.operators.pool(FACTOR)(torch.from_numpy(fields[:, None]))[:, 0].numpy()


# Tables ---------------------------------------------------------------------------------------------------------------

COLUMNS = {
    "maps": ("spectrum", "finest", "variance", "Niño 3.4", "Iceland", "skewness", "beyond 3 sd"),
    "stations": ("rmse", *ZONES, "crps", "in 50%", "in 90%"),
    "coarse": ("rmse", *ZONES, "crps", "in 50%", "in 90%", "spread and error", "waves from 17", "waves from 33"),
}


def tables(values: Mapping[str, Mapping[str, float]]) -> str:
    """Each row is the mean over seeds ± their standard deviation."""
    parts = []
    for task, columns in COLUMNS.items():
        rows: dict[str, list[Mapping[str, float]]] = {}
        for key, found in values.items():
            name, _, about = key.partition("/")
            if about == task:
                word, _, seed = name.rpartition("-")
                rows.setdefault(word if seed.isdigit() else name, []).append(found)
        lines = [
            [
                name,
                *(
                    mean_and_spread([each[column] for each in found if column in each] or [np.nan])
                    for column in columns
                ),
            ]
            for name, found in rows.items()
        ]
        parts.append(markdown([task, *columns], lines))
    return "\n\n".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, help="the folder of climate.json, if it is another one")
    parser.add_argument("--figures", type=Path, help="store the numbers of the figures, of the first run, in a folder")
    arguments = parser.parse_args()
    results = Results("climate", arguments.results) if arguments.results else Results("climate")
    story = Story(arguments.data, arguments.runs, results, arguments.runs[0].parent)
    story.measure()
    print(tables(results.values))
    if arguments.figures:
        story.store_figures(arguments.figures)
