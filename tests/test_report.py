"""What table, plot and report.html promise: the numbers as they are, fair marks, one file that fetches nothing."""

import csv
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from visitor import claimed_png

import nidiff
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.evaluation.results import Measured, Result, read_results
from nidiff.evaluation.table import MARKDOWN, csv_text, latex, markdown, number, text
from nidiff.model.manifest import write_manifest
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.report.denoising import denoise_levels, visible_rows
from nidiff.report.html import SECTIONS, run_section, write_report
from nidiff.report.loss import read_log, smoothed
from nidiff.report.quality import REAL, quality_figure
from nidiff.sampling.sampler import SAMPLERS
from nidiff.training.experiment import read_experiment
from nidiff.training.identity import settings_digest
from nidiff.training.run import RunDirectory

HOSTILE = '" onload=alert(1) <img src=x onerror=alert(1)>&"\'|$\\frac_%#{}~^`*[a](b)'


def result(run="a", sampler="ddim", steps=10, metrics=None, provenance=None, **others):
    """One result; a metric is its value, or (value, error)."""
    pairs = {name: v if isinstance(v, tuple) else (v, 0.01) for name, v in (metrics or {"FD-pixels": 7.0}).items()}
    usual = SAMPLERS[sampler].spacing if sampler in SAMPLERS else "uniform"
    settings = {"spacing": usual, "seeds": "0-999", **others}
    return Result(
        run,
        sampler,
        steps,
        metrics={name: Measured(*pair, name in ("precision", "recall")) for name, pair in pairs.items()},
        provenance={
            **{"features": "pixels", "features_sha256": "0123456789abcdef", "preprocessing": "none", "k": 3},
            **{"real": "digits, split test", "num_real": 299, "num_generated": 1000, "quantisation": "uint8"},
            **{"nidiff": "0.1.0", "commit": None, "torch": "2"},
            **(provenance or {}),
        },
        **settings,
    )


def written(results):
    return json.dumps([one.to_json() for one in results])


def paper():
    """Part of the paper's table."""
    table = {
        "DDPM": {1000: (6.05, 0.66, 0.54), 100: (12.25, 0.62, 0.48), 20: (26.35, 0.56, 0.24)},
        "NI-DDPM": {100: (12.68, 0.60, 0.49), 1000: (6.95, 0.62, 0.53), 20: (30.41, 0.52, 0.35)},
    }
    return [
        result(run, "ancestral", steps, {"FID": (fid, 0.05), "precision": p, "recall": r})
        for run, rows in table.items()
        for steps, (fid, p, r) in rows.items()
    ]


def markdown_rows(results):
    lines = [line for line in markdown(results).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def latex_rows(results):
    lines = [line for line in latex(results).splitlines() if line.endswith(r"\\")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))] for line in lines]


# The table -------------------------------------------------------------------------------------------------------


def test_every_row_has_as_many_cells_as_the_head():
    for results in (paper(), [*paper(), result(HOSTILE, HOSTILE, 5, {HOSTILE: 1.0})], [result()]):
        for rows, extra in ((markdown_rows(results), 2), (latex_rows(results), 1)):
            assert {len(row) for row in rows} == {len(rows[0])}
            assert len(rows) == len(results) + extra
        (spec,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", latex(results))
        assert len(spec) == len(latex_rows(results)[0])


def test_the_best_of_each_metric_and_number_of_steps_is_bold_in_both_directions():
    rows = [*zip(["DDPM"] * 3 + ["NI-DDPM"] * 3, markdown_rows(paper())[2:], strict=True)]
    bold = {(run, row[2], i) for run, row in rows for i in (3, 4, 5) if row[i].startswith("**")}
    # FID is lower and precision higher with DDPM throughout; recall is higher with NI-DDPM at 100 and 20 steps.
    better = {("NI-DDPM", "100", 5), ("NI-DDPM", "20", 5)}
    others = {("DDPM", steps, i) for steps in ("1000", "100", "20") for i in (3, 4, 5)}
    assert bold == better | others - {("DDPM", "100", 5), ("DDPM", "20", 5)}
    assert latex(paper()).count(r"\textbf{") == 9


def test_nothing_is_best_of_one_or_among_numbers_that_cannot_be_compared():
    assert "**" not in markdown([result("a", steps=10), result("b", steps=20)])
    alike = [result("a", metrics={"recall": 0.5}), result("b", metrics={"recall": 0.4})]
    assert "**0.500" in markdown(alike)
    alike[1].provenance["num_real"] = 1000
    assert "**" not in markdown(alike)
    alike.append(result("c", metrics={"recall": 0.3}))  # as a is made
    assert re.findall(r"\*\*(\S+) ", markdown(alike)) == ["0.500"]
    nan = [result("a", metrics={"recall": float("nan")}), result("b", metrics={"recall": (None, None)})]
    assert "**" not in markdown(nan)


def test_the_note_says_where_the_numbers_come_from_and_one_each_where_that_differs():
    mixed = [*paper(), result("other", provenance={"features_sha256": "fedcba9876543210"})]
    for write in (markdown, latex, text):
        assert write(paper()).count("01234567") == 1
        assert "[1]" not in write(paper())
        assert "fedcba98" in write(mixed)
    assert ("NI-DDPM [1]" in text(mixed), "other [2]" in text(mixed)) == (True, True)
    # Another model or version of nidiff is what a table compares; other images under the same name are not.
    assert "[1]" not in text([result(), result("b", provenance={"nidiff": "9", "commit": "x"})])
    assert "[2]" in text([result(), result("b", provenance={"real_sha256": "b" * 64})])


def test_settings_of_the_sampler_tell_rows_apart_and_a_metric_that_a_result_lacks_is_a_dash():
    others = [{"options": {"eta": 0.5}}, {}, {"spacing": "karras"}, {"clip": None}]
    results = [result("a", "ddim", **other) for other in others]
    rows = markdown_rows([*results, result("b", metrics={"KID-pixels": 2.0})])[2:]
    assert len({row[1] for row in rows[:4]}) == 4
    assert [row[4] for row in rows] == ["–"] * 4 + ["2.000 ± 0.010"]
    assert rows[-1][3] == "–"


def test_the_error_decides_the_digits():
    for value, error, shown in (
        (7.0123, 0.12, "7.01 ± 0.12"),
        (0.0021, 0.0003, "0.0021 ± 0.0003"),
        (9.99, 0.0996, "9.99 ± 0.10"),
        (0.81, 0.0, "0.81 ± 0"),
        (3.14159265, None, "3.142"),
        (None, 0.1, "–"),
        (float("nan"), 0.1, "–"),
        (1e300, 1e299, "1e+300 ± 1e+299"),
    ):
        assert number(Measured(value, error), MARKDOWN) == shown


def test_latex_escapes_all_that_is_special_and_the_terminal_gets_ascii():
    row = latex_rows([result(HOSTILE, "dpmpp_2m", 5, {"100%_#": 1.0})])[1]
    assert row[1] == r"dpmpp\_2m"
    # Without packages LaTeX knows letters with accents, but no mathematical signs.
    assert latex_rows([result("v − 1, 8×8")])[1][0] == r"v $-$ 1, 8$\times$8"
    body = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]", "", row[0])
    assert not set(body) & set("\\&%$#_{}~^")
    assert text([*paper(), result("größe − 2×2", metrics={"FID": 1.0})]).isascii()


def test_csv_has_one_line_per_result_and_every_digit():
    third = result("c", "ddim", 20, {"recall": (1 / 3, None)}, options={"eta": 0.1 + 0.2})
    results = [*paper(), result(HOSTILE + '\n,"', provenance={"extra": "x,y"}), third]
    lines = list(csv.DictReader(io.StringIO(csv_text(results))))
    assert len(lines) == len(results)
    for line, made in zip(lines, results, strict=True):
        assert None not in line
        assert (line["run"], line["sampler"], int(line["num_steps"])) == (made.run, made.sampler, made.num_steps)
        assert json.loads(line["options"]) == made.options
        for name in ("FID", "FD-pixels", "precision", "recall"):
            pair = made.metrics.get(name, Measured(None, None))._asdict()
            for column, key in ((name, "value"), (f"{name} (error)", "error")):
                assert (float(line[column]) if line[column] else None) == pair[key]
        for key, value in made.provenance.items():
            assert line[key] == ("" if value is None else str(value))


def test_what_real_pictures_have_is_said_below_the_table_once_for_each_source():
    floor = {"floor": {"FD": {"value": 3.1, "error": 0.1}}, "floor_of": "30 held-out images"}
    results = [result(metrics={"FD": 5.0}, details=floor), result("b", metrics={"FD": 6.0}, details=floor)]
    assert markdown(results).count("30 held-out images in place of samples: FD 3.10 ± 0.10.") == 1
    assert latex(results).count(r"in place of samples: FD 3.10 $\pm$ 0.10.") == 1
    assert "in place of samples: FD 3.10 +- 0.10." in text(results)
    fields = result(metrics={"FD": 5.0}, details=floor, provenance={"num_items": 30})  # whose table has a column for it
    assert "in place of samples" not in markdown([fields])
    two = text([results[0], result("c", metrics={"FD": 5.0}, details=floor, provenance={"k": 5})])
    assert "[1] 30 held-out images in place" in two
    assert "[2] 30 held-out images in place" in two


def test_results_that_cannot_be_read_are_refused(tmp_path):
    file = tmp_path / "metrics.json"
    bad = [result(metrics={"FID": ("7", 0.1)})], [result(steps="10")]
    for content in (None, "{", "{}", "[3]", '[{"run": "a"}]', *map(written, bad)):
        if content is not None:
            file.write_text(content)
        with pytest.raises(InputError, match=r"metrics\.json"):
            read_results(file)
    file.write_text(written(paper()))
    assert read_results(file) == paper()


# The plot --------------------------------------------------------------------------------------------------------


def test_the_plot_has_a_panel_per_metric_and_the_numbers_with_their_errors():
    figure = quality_figure([*paper(), result("c", steps=20, metrics={"FID": (float("nan"), None)})])
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title().partition(":")[0] for axes in panels] == ["FID", "precision", "recall"]
    assert all(axes.get_xscale() == "log" for axes in panels)
    first, second = panels[0].containers  # of the third there is nothing to draw
    line, _, (bars,) = first
    assert list(line.get_ydata()) == [6.05, 12.25, 26.35]
    np.testing.assert_allclose(line.get_xdata().astype(float), [1000, 100, 20], rtol=0.1)  # a little aside of the other
    np.testing.assert_allclose([np.ptp(bar[:, 1]) for bar in bars.get_segments()], 0.1)
    assert list(second[0].get_ydata()) == [6.95, 12.68, 30.41]


def test_the_plot_has_a_dotted_line_where_real_data_are():
    floor = {"floor": {"FID": {"value": 3.15, "error": None}, "precision": {"value": None, "error": None}}}
    figure = quality_figure([result(metrics={"FID": 9.0, "precision": 0.5}, details=floor)])
    assert REAL in [words.get_text() for words in figure.legends[0].get_texts()]
    dotted = [[[*line.get_ydata()] for line in axes.lines if line.get_gid() == REAL] for axes in figure.axes[:2]]
    assert dotted == [[[3.15, 3.15]], []]


def test_plots_of_any_size_can_be_drawn_and_their_lines_told_apart():
    for results in (
        [result(metrics={"recall": (0.5, None)})],
        [result(f"{i}", steps=s, metrics={"FD": 100.0 / s}) for i in range(8) for s in (1, 10, 100)],
        [result(metrics={"FD": (-1e308, 1e308)}), result(steps=20, metrics={"FD": (1e308, -5.0)})],
        [result("x" * 5000 + "\udcff", "\udcff", metrics={"z" * 5000: 1.0})],
        [result("_$\\frac$", "$_", 5, metrics={"$x": -1.0} | {f"metric {i}": 1.0 for i in range(5)})],
    ):
        figure, drawn = quality_figure(results), io.BytesIO()
        figure.savefig(drawn, format="png")
        (legend,) = figure.legends
        looks = {(handle.get_color(), handle.get_marker()) for handle in legend.legend_handles}
        assert len(legend.get_texts()) == len(looks) == len({made.run for made in results})


# Log and denoising -----------------------------------------------------------------------------------------------


def test_smoothing_keeps_constants_and_straight_lines():
    for count in (1, 9, 35):
        assert smoothed([3.0] * count) == pytest.approx([3.0] * count)
        line = np.arange(count, dtype=float)
        half = count // 20
        np.testing.assert_allclose(smoothed(list(line))[half : count - half], line[half : count - half], atol=1e-9)
    assert smoothed(list(line % 2)).std() < (line % 2).std()


@pytest.mark.parametrize(
    "schedule", [nidiff.schedules.ddpm_linear(200), nidiff.schedules.smld_geometric(50, 30.0, 0.01)], ids=["vp", "ve"]
)
def test_a_network_that_knows_eps_gets_the_image_back_and_one_that_knows_nothing_does_not(schedule):
    process = nidiff.Process(schedule, nidiff.gaussian_free_field((8, 8)))
    x0 = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    eps = white_noise((1, 1, 8, 8), generators_from_seeds([5]))
    found = denoise_levels(nidiff.Denoiser(lambda x, label: eps, process), x0, seed=5)
    assert len(found) == 6
    assert all(step.error < 1e-3 for step in found)
    sigmas = [float(step.level.sigma / step.level.signal) for step in found]
    assert sigmas == sorted(sigmas)
    blind = denoise_levels(nidiff.Denoiser(lambda x, label: 0 * x, process), x0, seed=5)
    noise = process.covariance.sqrt(eps).square().mean().sqrt().item()
    assert [step.error for step in blind] == pytest.approx([sigma * noise for sigma in sigmas], rel=1e-3)
    # Shown at unit scale, VE too.
    assert all(step.noisy.abs().max() < 5 for step in found)


def test_levels_are_spread_over_what_can_be_seen():
    cosine = nidiff.schedules.ddpm_cosine(1000)
    seen = cosine.logsnr[visible_rows(cosine, 6)]
    assert cosine.logsnr[-1] < -15  # most of the schedule's range is nothing but noise
    torch.testing.assert_close(seen, torch.linspace(6, -6, 6, dtype=torch.float64), atol=0.1, rtol=0)
    assert visible_rows(nidiff.schedules.ddpm_linear(1), 6) == [0]
    assert visible_rows(nidiff.schedules.ddpm_linear(3).shifted(100.0), 6) == [0, 1, 2]


# report.html -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags must balance; what a browser would fetch, and what it would show, is collected."""

    VOID = ("meta", "img", "br")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open, self.fetched, self.tags, self.alts, self.words = [], [], [], [], ""
        self.feed(path.read_text())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        assert not any(name.startswith("on") for name in attributes), attributes
        self.fetched += [attributes[name] for name in ("src", "href", "srcset", "data", "action") if name in attributes]
        if tag == "img":
            self.alts.append(attributes["alt"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            self.fetched += re.findall(r"url\(|@import|https?:", data)
        else:
            self.words += data


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run, with samples of two steps and a result."""
    out = tmp_path_factory.mktemp("runs") / "digits"
    tiny = ("--widths", "8", "--attention", "--batch-size", "8", "--precision", "fp32", "--cooldown", "0")
    often = ("--steps", "4", "--log-every", "1", "--sample-every", "2", "--num-samples", "4", "--num-steps", "2")
    assert main(["train", "--out", str(out), *tiny, *often, "--schedule", "ddpm_linear:num_levels=20"]) == 0
    (out / "metrics.json").write_text(written([result("digits", "ddim", steps) for steps in (10, 20)]))
    return out


@pytest.fixture
def run(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "digits"))


def edited(run, **values):
    """Other settings in experiment.json, with the digests that a stranger would give them."""
    stored = json.loads((run / "experiment.json").read_text()) | values
    (run / "experiment.json").write_text(json.dumps(stored))
    stored["identity"]["settings"] = settings_digest(read_experiment(run))
    (run / "experiment.json").write_text(json.dumps(stored))
    if (run / "model").is_dir():
        write_manifest(run / "model", stored["identity"])


@pytest.fixture
def bare(run):
    """The run with its settings and samples only, where the page is not what matters: it is written sooner."""
    for name in ("log.jsonl", "metrics.json"):
        (run / name).unlink()
    shutil.rmtree(run / "model")
    return run


def test_the_page_of_a_finished_run_is_one_file_that_fetches_nothing_and_shows_every_section(trained):
    finished = write_report(trained)
    page = Page(finished)
    assert page.fetched
    assert all(source.startswith("data:image/") for source in page.fetched)
    assert "script" not in page.tags
    assert "default-src 'none'" in finished.read_text()
    assert finished.stat().st_size < 1_000_000
    assert all(page.alts)
    assert all(heading in page.words for heading in SECTIONS)
    assert "Not shown" not in page.words
    for fact in ("1,498", "1 × 8 × 8", "4 of 4 steps", "ddpm_linear:num_levels=20", nidiff.__version__, "FD-pixels"):
        assert fact in page.words
    assert "nidiff train --config digits/experiment.json --out digits-again" in page.words
    assert page.alts.count("Grid of samples after step 4") == 1
    assert sum("Denoised image" in alt for alt in page.alts) == 6


def test_what_comes_from_files_is_escaped(run):
    facts = {"images": HOSTILE, "parameters": HOSTILE, "image_shape": [HOSTILE]}
    edited(run, data=HOSTILE, covariance=HOSTILE, sampler=HOSTILE, resolved=facts)
    mine = result(HOSTILE, HOSTILE, metrics={HOSTILE: 1.0}, provenance={"real": HOSTILE, "features": HOSTILE})
    (run / "metrics.json").write_text(written([mine]))
    (run / "model").rename(run / "gone")
    hostile = run.rename(run.with_name(HOSTILE.replace("/", "")))
    page = Page(write_report(hostile))
    assert all(source.startswith("data:image/") for source in page.fetched)
    assert page.words.count("<img src=x onerror=alert(1)>") >= 6  # as text


def test_a_run_that_is_still_going_has_a_page_that_says_what_is_missing(run):
    shutil.rmtree(run / "model" / "unet")
    shutil.rmtree(run / "samples")
    (run / "model" / "manifest.json").unlink()  # it comes with the network
    (run / "metrics.json").unlink()
    log = (run / "log.jsonl").read_text()
    (run / "log.jsonl").write_text(log[: log.index("\n", log.index('"step": 3')) - 9])
    page = Page(write_report(run))
    assert "2 of 4 steps" in page.words
    assert page.words.count("Not shown") == 3
    assert "--out digits --resume" in page.words
    assert any("Loss" in alt for alt in page.alts)


def tiles(page):
    """The pictures of the denoising, as the page has them."""
    return re.findall(r'<img class="tile" src="([^"]+)"', page.read_text())


def test_the_page_of_a_stranger_shows_nothing_that_its_settings_name(run, tmp_path, monkeypatch, with_report):
    """Whatever experiment.json says the data are, the page is the same: they are not opened."""
    monkeypatch.setattr("nidiff.report.html.SECTIONS", {})  # but that of the denoising, which alone shows data
    secret = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    np.savez(tmp_path / "secret.npz", secret)
    shown = []
    for data in (tmp_path / "secret.npz", tmp_path / "moved"):
        edited(run, data=str(data))
        page = write_report(run)
        assert "a sample of seed 0" in Page(page).words
        assert "Not shown" not in Page(page).words
        shown.append(tiles(page))
    edited(run, data="digits", data_dir=str(tmp_path))
    shown.append(tiles(write_report(run)))
    assert shown[0] == shown[1] == shown[2]
    # The control: who names the file sees it, and only then.
    assert main(["report", str(run), "--data", str(tmp_path / "secret.npz")]) == 0
    assert "an image of the data" in Page(run / "report.html").words
    assert tiles(run / "report.html") != shown[0]
    assert "shape (1, 4, 4)" in Page(write_report(run, torch.zeros(1, 4, 4))).words  # not that of the model


def section(run, heading):
    return run_section(RunDirectory.open(run), heading)


def grids(run):
    """The grids of samples on the page of a run."""
    return re.findall('alt="(Grid of samples[^"]*)"', section(run, "Samples over training"))


def test_links_and_special_files_among_the_samples_are_not_shown(bare, tmp_path):
    samples, secret, kept = bare / "samples", tmp_path / "secret.png", len(grids(bare))
    Image.fromarray(np.full((8, 8), 77, dtype=np.uint8)).save(secret)
    (samples / "000100.png").symlink_to(secret)
    (samples / "000101.png").symlink_to("000101.png")  # a loop
    os.mkfifo(samples / "000102.png")  # opening it would wait for ever
    (samples / "000103.png").mkdir()
    (samples / ("9" * 200 + ".png")).write_bytes(secret.read_bytes())
    (samples / "000104.png").symlink_to("000004.png")  # inside the run
    assert len(grids(bare)) == kept + 1
    assert "Grid of samples after step 104" in grids(bare)
    # The whole folder can be a link too.
    shutil.copytree(samples, tmp_path / "elsewhere", symlinks=True, ignore=lambda *_: ["000102.png"])
    shutil.rmtree(samples)
    samples.symlink_to(tmp_path / "elsewhere")
    assert not grids(bare)


def test_a_log_and_results_that_are_links_out_of_the_run_are_not_shown(run, tmp_path):
    for name, heading in (("log.jsonl", "Training"), ("metrics.json", "Quality")):
        assert "<img" in section(run, heading)
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
        assert "<img" not in section(run, heading)


def test_pictures_that_are_not_png_or_torn_or_far_too_large_are_named_and_the_page_stays_small(bare):
    samples = bare / "samples"
    for file in samples.iterdir():
        file.unlink()
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), dtype=np.uint8)
    for step in range(1, 8):
        Image.fromarray(noise).save(samples / f"00000{step}.png", compress_level=0)
    (samples / "000008.png").write_bytes((samples / "000001.png").read_bytes()[:1000])
    (samples / "000009.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    Image.fromarray(noise).save(samples / "000010.png", format="jpeg")
    for step, side in ((11, 7000), (12, 100_000)):  # a header that promises too much
        (samples / f"0000{step}.png").write_bytes(claimed_png(side, side))
    shown = section(bare, "Samples over training")
    assert len(shown) < 2_000_000
    assert shown.count("cannot be read") == 5
    assert grids(bare) == [f"Grid of samples after step {step}" for step in range(1, 8)]
    for step in range(13, 40):
        shutil.copy(samples / "000001.png", samples / f"0000{step}.png")
    assert len(grids(bare)) <= 12


ODD_LINES = [
    *("[" * 100_000, "[]", '{"step": ' + "9" * 5000 + "}", '"\\ud800"', "\x00\xff"),
    '{"step": 1e999, "loss": 1, "images_per_s": 1}',
    '{"step": 1, "loss": NaN, "images_per_s": 1}',
    '{"step": 1, "loss": 1e300, "images_per_s": 1e300}',
    '{"step": ' + "9" * 400 + ', "loss": 1, "images_per_s": 1}',
    '{"step": [1], "loss": {}, "images_per_s": null}',
]


def test_a_log_and_facts_of_any_content_do_not_break_the_page(bare):
    good = '{"step": 7, "loss": 0.5, "images_per_s": 9.0}'
    lines = [*ODD_LINES, good, '{"step": -3, "loss": -1e50, "images_per_s": 1e-300}', good[:30]]  # cut by a kill
    assert read_log(bare / "log.jsonl") == {"step": [], "loss": [], "images_per_s": []}
    (bare / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_log(bare / "log.jsonl")["step"] == [7, -3]
    assert "<img" in section(bare, "Training")
    (bare / "log.jsonl").unlink()
    (bare / "log.jsonl").mkdir()
    assert "log.jsonl has no line yet" in section(bare, "Training")
    strange = {"image_shape": [[1], None, {}], "images": [1], "parameters": {}}
    for facts in (strange, {"image_shape": [1] * 10**5}, [], None):
        edited(bare, resolved=facts)
        assert "not the default" in section(bare, "Experiment")


def test_damaged_files_are_not_shown_and_the_rest_of_the_page_is(run):
    damage = {
        "Quality": ("metrics.json", "[" * 100_000),
        "Noise": ("model/scheduler/scheduler_config.json", "{"),
        "Denoising one image": ("model/unet/config.json", "[3]"),
    }
    for heading, (name, content) in damage.items():
        (run / name).write_text(content)
        assert "Not shown" in section(run, heading)
    page = Page(write_report(run))
    assert "Not shown" in page.words
    assert "Grid of samples after step 4" in page.alts


def test_the_page_is_the_same_when_it_is_written_again_and_the_old_one_stays_if_it_cannot_be(bare):
    run = bare
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    (run / "experiment.json").write_text("{")
    with pytest.raises(InputError, match=r"experiment\.json"):
        write_report(run)
    assert (run / "report.html").read_bytes() == first
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".tmp")) == []


# The command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_each_page_or_refuses_before_anything_is_written(bare, tmp_path, capsys, with_report):
    run, other = bare, Path(shutil.copytree(bare, bare.with_name("other")))
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{other / 'report.html'}\n"
    assert Page(run / "report.html").words != Page(other / "report.html").words
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    (run / "report.html").unlink()
    for bad in ("nowhere", "empty", "file"):
        assert main(["report", str(bare), str(tmp_path / bad)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert bad in err
    assert not (bare / "report.html").exists()
    assert (tmp_path / "file").read_text() == "precious"


# Signals, fields and video ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:clip=None")
@pytest.mark.parametrize("layout, shape, axes", [("NL", (8, 16), "position"), ("NTHW", (8, 2, 4, 4), "time, height")])
def test_data_of_other_kinds_are_trained_on_sampled_and_shown(tmp_path, layout, shape, axes, with_report):
    values = np.random.default_rng(0).normal(100, 30, shape)
    np.save(tmp_path / "data.npy", values.astype(np.uint8 if "T" in layout else np.float32))
    out = tmp_path / "run"
    tiny = ["--network", "unet", "--widths", "8", "--attention", "--batch-size", "4", "--cooldown", "0"]
    often = ["--steps", "2", "--log-every", "1", "--num-samples", "2", "--num-steps", "2", "--target", "v"]
    data = ("--data", str(tmp_path / "data.npy"), "--layout", layout)
    assert main(["train", "--out", str(out), *tiny, *often, *data, "--schedule", "ddpm_linear:num_levels=20"]) == 0
    page = Page(out / "report.html")
    assert page.words.count("Not shown") == 1  # its quality, which nobody has measured
    assert f"(channels, {axes}" in page.words
    assert {"Grid of samples after step 2", "The clean image"} <= {*page.alts}
    assert sum("Denoised image" in alt for alt in page.alts) >= 4
