"""Draw the figures of the documentation again: python scripts/figures.py [NAME …], or `make figures` for all.

Each is drawn from what the repository holds: models that ship, results of benchmarks, and the numbers behind a
figure in docs/figures, where computing them takes long. `--list` says which, and how they were made.
"""

import argparse
import fnmatch
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

import nidiff
from nidiff import style
from nidiff.cli import main as nidiff_command
from nidiff.data.figures import save_samples_figure
from nidiff.data.grid import Grid
from nidiff.data.pictures import grid_pixels
from nidiff.evaluation.results import read_results
from nidiff.report.contact import save_panels
from nidiff.report.noise import save_figure
from nidiff.report.quality import quality_figure

ROOT = Path(__file__).parent.parent
IMAGES, NUMBERS, RESULTS = ROOT / "docs/images", ROOT / "docs/figures", ROOT / "benchmarks/results"
sys.path += [str(ROOT / folder) for folder in ("scripts", "examples", "benchmarks", "benchmarks/stories")]


class Drawing(NamedTuple):
    """How a figure is drawn into a file, and from what."""

    draw: Callable[[Path], Any]
    source: str


def numbers(name: str) -> dict[str, Any]:
    """Those behind a figure."""
    with np.load(NUMBERS / f"{name}.npz") as found:
        return dict(found)


# Out of nothing, or from the models that ship -----------------------------------------------------------------------


def noise(out: Path, *words: str) -> None:
    run("noise", *words, "--out", out)


def models(out: Path) -> None:
    run("models", "--out", out)


def front_page(name: str, out: Path) -> None:
    import front_page

    getattr(front_page, name)(out)


def denoised_digits(out: Path) -> None:
    """Held-out digits under noise of the model's colour, half as large as the range from grey to white."""
    denoiser = nidiff.load_model("digits")
    x0 = nidiff.load_dataset("digits", split="test").batch(torch.tensor([0, 7, 12]))
    noisy = x0 + 0.5 * denoiser.process.noise(tuple(x0.shape), torch.Generator().manual_seed(0))
    restored(out, "denoise", "digits", 127.5 * (1 + noisy), "--noise", "63.75", "--samples", "8")


def restored(out: Path, command: str, model: str, items: Any, *words: str) -> None:
    """What `nidiff denoise` or `nidiff restore` makes of items."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/items.npy", np.asarray(items))
        run(command, model, f"{folder}/items.npy", *words, "--out", f"{folder}/found")
        out.write_bytes(Path(folder, "found", "restored.png").read_bytes())


def turbulence_from_points(out: Path) -> None:
    fields = nidiff.load_dataset("turbulence", split="test").values[[100, 900]]
    restored(out, "restore", "turbulence", fields, *["--mask", "random:0.03", "--degrade", "--samples", "4"])


def shirt_from_its_left_half(out: Path) -> None:
    clothes = nidiff.load_dataset("fashion-mnist", split="test")
    shirt = clothes.values[SHIRT : SHIRT + 1]
    restored(out, "restore", "fashion-mnist", shirt, *["--mask", "left", "--degrade", "--samples", "4"])


def turbulence_from_stations(name: str, out: Path) -> None:
    """A held-out field at 120 random places between the points, with noise."""
    field = nidiff.load_dataset("turbulence", split="test").values[[100]]
    places = np.random.default_rng(0).uniform(0, field.shape[-1], (120, 2))
    rows = [f"{down:.3f},{across:.3f},{0.1 * float(field.std()):.4g}" for down, across in places]
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/field.npy", np.asarray(field))
        Path(folder, "places.csv").write_text("\n".join(["height,width,error", *rows]) + "\n")
        given = (f"{folder}/field.npy", "--stations", f"{folder}/places.csv", "--degrade", "--samples", "9")
        run("restore", "turbulence", *given, "--num-steps", "25", "--out", f"{folder}/found")
        out.write_bytes(Path(folder, "found", name).read_bytes())


def run(*words: object) -> None:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        failed = nidiff_command([str(word) for word in words])
    if failed:
        print(said.getvalue(), file=sys.stderr)
        raise SystemExit(f"nidiff {' '.join(map(str, words))} failed")


# From numbers that are kept -----------------------------------------------------------------------------------------


def story(name: str, out: Path) -> None:
    """A figure whose example or benchmark has its function ``picture``."""
    __import__(name)
    sys.modules[name].picture(numbers(name), out)


def panels(name: str, out: Path) -> None:
    save_panels(out, {title: torch.from_numpy(images) for title, images in numbers(name).items()})


@style.drawn
def guidance(out: Path) -> None:
    """Three samples of each digit, a column each, for every guidance."""
    found = numbers("guidance")
    figure = Figure((6.4, 2.1 * len(found)), layout="constrained")
    for axes, (name, images) in zip(figure.subplots(len(found), 1), found.items(), strict=True):
        axes.imshow(grid_pixels(torch.from_numpy(images), 10).squeeze(-1), cmap=style.GREY, vmin=0, vmax=255)
        axes.set(xticks=[], yticks=[], ylabel=name)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    columns = [(digit + 0.5) * axes.get_xlim()[1] / 10 for digit in range(10)]
    figure.axes[0].set_xticks(columns, [str(digit) for digit in range(10)])
    figure.axes[0].xaxis.tick_top()
    figure.savefig(out)


def minutes(out: Path) -> None:
    import minutes

    kept = json.loads((RESULTS / "minutes.json").read_text())
    minutes.draw(minutes.in_lines(kept["rows"]), kept["real"], out)


def rivals(out: Path) -> None:
    import rivals

    rivals.figure(rivals.Results(RESULTS / "rivals.json"), out)


def table(out: Path) -> None:
    """The paper's table, measured on the models of CIFAR-10 that ship."""
    results = []
    for model, name in {"cifar10-ddpm": "DDPM", "cifar10-ni-ddpm": "NI-DDPM"}.items():
        for result in read_results(ROOT / "models" / model / "metrics.json"):
            if result.sampler != "ancestral":  # another for each number of steps
                result = replace(result, sampler="by nidiff tune", spacing=None, options={})
            results.append(replace(result, run=name))
    save_figure(quality_figure(results), out)


def samples(name: str, grid: Grid, out: Path) -> None:
    """Samples [N, C, *event] as `nidiff sample` draws them."""
    save_samples_figure(torch.from_numpy(numbers(name)["items"]).float(), grid, out)


@style.drawn
def speech(out: Path) -> None:
    """Spectrograms, in decibels below the loudest of each: four words by row, and the babble below."""
    found = numbers("speech")
    figure = Figure((style.WIDTH, 5.4), layout="constrained")
    grid = figure.subplots(4, 4, sharex=True, sharey=True)
    window = torch.hann_window(256)
    for panel, clip in zip(grid.flat, found["clips"].reshape(16, -1), strict=True):
        power = torch.stft(torch.from_numpy(clip).float(), 256, 64, window=window, return_complex=True).abs().square()
        levels = 10 * torch.log10(power / power.max() + 1e-6)
        panel.imshow(levels, origin="lower", aspect="auto", vmin=-50, vmax=0, extent=(0, clip.shape[-1] / 8000, 0, 4))
    for panel, word in zip(grid[0], found["words"], strict=True):
        digit, speaker = str(word).split("_")
        panel.set_title(f"{digit}, {speaker}", fontsize=style.SMALL)
    for panel, title in zip(grid[3], ("in babble", "short-time Wiener", "network", "clean"), strict=True):
        panel.set_title(title, fontsize=style.SMALL)
        panel.set_xlabel("seconds")
    for panel, title in zip(grid[:, 0], ("recordings", "fitted noise", "white noise", "babble"), strict=True):
        panel.set_ylabel(f"{title}\nkHz")
    figure.savefig(out)


@style.drawn
def rock(out: Path) -> None:
    """Slices of blocks of 32 x 32 x 32 voxels, pores dark, and one of a larger block."""
    found = numbers("rock")
    figure = Figure((style.WIDTH, 3.1), layout="constrained")
    small, large = figure.subfigures(1, 2, width_ratios=(2.1, 1))
    grid = small.subplots(len(found["slices"][0]), len(found["ways"]))
    for column, title, pores in zip(grid.T, found["ways"], found["slices"], strict=True):
        column[0].set_title(str(title).replace(" ", "\n", 1), fontsize=style.SMALL)
        for panel, plane in zip(column, pores, strict=True):
            draw_pores(panel, plane)
    panel = large.subplots()
    draw_pores(panel, found["larger"])
    panel.set_title("64³ voxels, periodic", fontsize=style.SMALL)
    figure.savefig(out)


def draw_pores(panel: Axes, plane: Any) -> None:
    panel.imshow(plane, cmap="Greys", vmin=0, vmax=1.2, interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(True)


@style.drawn
def resolution_fields(out: Path) -> None:
    """Two of the data, and one of each run: above in pixels, below on its own grid."""
    from resolution import NAMES, WAYS

    found = numbers("resolution")
    titles, shown = ["data", *(NAMES[run] for run in found["runs"])], found["fields"].astype(np.float32)
    figure = Figure((style.WIDTH, 2 * style.WIDTH / len(titles) + 0.3), layout="constrained")
    grid = figure.subplots(2, len(titles))
    for axes, field in zip(grid.flat, shown, strict=True):
        axes.imshow(field, vmin=-1.5, vmax=3, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=style.SMALL)
    for axes, way in zip(grid[:, 1], WAYS, strict=True):
        axes.set_ylabel(way)
    figure.savefig(out)


def record(name: str, out: Path) -> None:
    """Maps of the NCEP/NCAR Reanalysis."""
    import climate_figures

    getattr(climate_figures, name)(numbers(f"climate_{name}"), out)


SHIRT = 40
CLOTHES = "Fashion-MNIST, which is downloaded if it is not there"
HEARTBEATS = Grid(("time",), channels=("amplitude",), units=("1 = full scale",), rate=256)
TURBULENCE = Grid(
    ("time", "y", "x"),
    channels=("vorticity",),
    units=("1/s",),
    coordinates={"time": tuple(0.25 * frame for frame in range(8))},
    axis_units={"time": "s"},
)
PINK = ["white", "power_law:exponent=1,boundary=reflecting", "--shape", "1024", "--num-images", "3"]
FIGURES = {
    "noise.png": Drawing(noise, "nidiff noise"),
    "signals_noise.png": Drawing(lambda out: noise(out, *PINK), f"nidiff noise {' '.join(PINK)}"),
    "models.png": Drawing(models, "nidiff models"),
    "turbulence.png": Drawing(partial(front_page, "turbulence"), "models that ship (scripts/front_page.py)"),
    "fashion.png": Drawing(partial(front_page, "fashion"), f"models that ship, {CLOTHES} (scripts/front_page.py)"),
    "denoised_digits.png": Drawing(denoised_digits, "nidiff denoise digits"),
    "restored_turbulence.png": Drawing(turbulence_from_points, "nidiff restore turbulence --mask random:0.03"),
    "restored_stations.png": Drawing(partial(turbulence_from_stations, "restored.png"), "nidiff restore turbulence"),
    "scores_stations.png": Drawing(partial(turbulence_from_stations, "scores.png"), "nidiff restore turbulence"),
    "restored_fashion.png": Drawing(shirt_from_its_left_half, f"nidiff restore fashion-mnist --mask left, {CLOTHES}"),
    "minutes.png": Drawing(minutes, "benchmarks/results/minutes.json (benchmarks/minutes.py)"),
    "rivals.png": Drawing(rivals, "benchmarks/results/rivals.json (benchmarks/rivals.py, hours)"),
    "table.png": Drawing(table, "models/cifar10-*/metrics.json (the commands of docs/table1.md, hours)"),
    "climate.png": Drawing(
        partial(story, "climate"), "docs/figures/climate.npz (the commands of docs/climate.md, 4 min)"
    ),
    "climate_stations.png": Drawing(
        partial(record, "stations"),
        "docs/figures/climate_stations.npz (benchmarks/stories/climate.py --figures, NOAA PSL, an hour)",
    ),
    "climate_teleconnections.png": Drawing(
        partial(record, "teleconnections"),
        "docs/figures/climate_teleconnections.npz (benchmarks/stories/climate.py --figures, NOAA PSL, an hour)",
    ),
    "volumes.png": Drawing(
        partial(story, "volumes"), "docs/figures/volumes.npz (the commands of docs/volumes.md, 4 min)"
    ),
    "few_steps.png": Drawing(
        partial(story, "few_steps"), "docs/figures/few_steps.npz (benchmarks/few_steps.py, 4 min)"
    ),
    "demo.png": Drawing(
        partial(panels, "demo"), "docs/figures/demo.npz (the pixels of the picture that nidiff demo drew)"
    ),
    "offset_noise.png": Drawing(
        partial(panels, "offset_noise"),
        "docs/figures/offset_noise.npz (the pixels of the picture that examples/offset_noise.py drew)",
    ),
    "smld_digits.png": Drawing(
        partial(panels, "smld_digits"),
        "docs/figures/smld_digits.npz (the pixels of the picture that examples/smld_digits.py drew)",
    ),
    "guidance.png": Drawing(
        guidance,
        "docs/figures/guidance.npz (the pixels of a picture of nidiff sample, as benchmarks/RESULTS.md has it)",
    ),
    "signals_samples.png": Drawing(
        partial(samples, "signals_samples", HEARTBEATS),
        "docs/figures/signals_samples.npz (nidiff train and sample, as docs/signals.md has it, 3 min)",
    ),
    "speech.png": Drawing(speech, "docs/figures/speech.npz (benchmarks/stories/speech.py)"),
    "rock.png": Drawing(rock, "docs/figures/rock.npz (benchmarks/stories/rock.py)"),
    "video_samples.png": Drawing(
        partial(samples, "video_samples", TURBULENCE),
        "docs/figures/video_samples.npz (nidiff train and sample, as docs/video.md has it, 4 min)",
    ),
    "video_v_white.png": Drawing(
        partial(samples, "video_v_white", TURBULENCE),
        "docs/figures/video_v_white.npz (nidiff train and sample, as docs/video.md has it, 2 min)",
    ),
    "resolution.png": Drawing(
        partial(story, "resolution"), "docs/figures/resolution.npz (the commands of docs/resolution.md, 10 min)"
    ),
    "resolution_fields.png": Drawing(
        resolution_fields, "docs/figures/resolution.npz (the commands of docs/resolution.md, 10 min)"
    ),
}
LARGE = 200_000  # bytes
SCREENSHOTS = ("explore_*.png", "field_explorer.png")  # of pages in a browser: scripts/screenshots.py


def is_screenshot(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in SCREENSHOTS)


def smaller(file: Path) -> None:
    """Without an alpha channel, compressed well; with 256 colours if it is large all the same."""
    with Image.open(file) as opened:
        picture = opened.convert("RGB")
    picture.save(file, optimize=True)
    if file.stat().st_size > LARGE:
        picture.quantize(256).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of them; all if none is given")
    parser.add_argument("--list", action="store_true", help="list them with what they are drawn from")
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    names = [name if name.endswith(".png") else f"{name}.png" for name in options.names] or [*FIGURES]
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"there is no figure {unknown[0]!r}: use {', '.join(FIGURES)}.")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in names:
        drawing = FIGURES[name]
        if options.list:
            print(f"{name:25} {drawing.source}")
        else:
            begin = time.perf_counter()
            drawing.draw(options.out / name)
            smaller(options.out / name)
            print(f"{name:25} {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
