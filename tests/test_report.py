"""What table, plot and report.html promise: the numbers as they are, fair marks, one file that fetches nothing."""

import csv
import io
import json
import os
import re
import shutil
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.evaluation.results import Measured, Result, read_results
from nidiff.evaluation.table import MARKDOWN, csv_text, latex, markdown, number, text
from nidiff.model.manifest import write_manifest
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.report.denoising import denoise_levels, visible_rows
from nidiff.report.html import SECTIONS, write_report
from nidiff.report.loss import read_log, smoothed
from nidiff.report.quality import quality_figure
from nidiff.sampling.sampler import SAMPLERS
from nidiff.training.experiment import read_experiment
from nidiff.training.identity import settings_digest

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


@pytest.mark.parametrize("results", [paper(), [*paper(), result(HOSTILE, HOSTILE, 5, {HOSTILE: 1.0})], [result()]])
def test_every_row_has_as_many_cells_as_the_head(results):
    for rows in (markdown_rows(results), latex_rows(results)):
        assert {len(row) for row in rows} == {len(rows[0])}
    assert len(markdown_rows(results)) == len(results) + 2
    assert len(latex_rows(results)) == len(results) + 1
    (spec,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", latex(results))
    assert len(spec) == len(latex_rows(results)[0])


def test_the_best_of_each_metric_and_number_of_steps_is_bold_in_both_directions():
    bold = {(row[2], i) for row in markdown_rows(paper())[2:5] for i in (3, 4, 5) if row[i].startswith("**")}
    other = {(row[2], i) for row in markdown_rows(paper())[5:] for i in (3, 4, 5) if row[i].startswith("**")}
    # FID is lower and precision higher with DDPM throughout; recall is higher with NI-DDPM at 100 and 20 steps.
    assert other == {("100", 5), ("20", 5)}
    assert bold == {(steps, i) for steps in ("1000", "100", "20") for i in (3, 4, 5)} - other
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


@pytest.mark.parametrize(
    "value, error, shown",
    [
        (7.0123, 0.12, "7.01 ± 0.12"),
        (7.0123, 0.34, "7.0 ± 0.3"),
        (0.0021, 0.0003, "0.0021 ± 0.0003"),
        (9.99, 0.0996, "9.99 ± 0.10"),
        (1234.5, 56.0, "1234 ± 56"),
        (0.81, 0.0, "0.81 ± 0"),
        (0.5, 1e-17, "0.5 ± 1e-17"),
        (3.14159265, None, "3.142"),
        (None, 0.1, "–"),
        (float("nan"), 0.1, "–"),
        (float("inf"), None, "–"),
        (1e300, 1e299, "1e+300 ± 1e+299"),
    ],
)
def test_the_error_decides_the_digits(value, error, shown):
    assert number(Measured(value, error), MARKDOWN) == shown


def test_latex_escapes_all_that_is_special():
    row = latex_rows([result(HOSTILE, "dpmpp_2m", 5, {"100%_#": 1.0})])[1]
    assert r"\&" in row[0]
    assert r"\textbackslash{}frac\_\%\#\{\}\textasciitilde{}\textasciicircum{}" in row[0]
    assert row[1] == r"dpmpp\_2m"
    # Without packages LaTeX knows letters with accents, but no mathematical signs.
    assert latex_rows([result("v − 1, 8×8")])[1][0] == r"v $-$ 1, 8$\times$8"
    body = re.sub(r"\\[a-z]+\{\}|\\[&%$#_{}]", "", row[0])
    assert not set(body) & set("\\&%$#_{}~^")
    assert r"100\%\_\#" in latex([result(metrics={"100%_#": 1.0})])


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


def test_the_terminal_gets_ascii():
    assert text([*paper(), result("größe − 2×2", metrics={"FID": 1.0})]).isascii()


@pytest.mark.parametrize(
    "content",
    [
        *("{", "{}", "[3]", '[{"run": "a"}]', written([result(metrics={"FID": ("7", 0.1)})])),
        *(written([result(steps="10")]), None),
    ],
)
def test_results_that_cannot_be_read_are_refused(tmp_path, content):
    file = tmp_path / "metrics.json"
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
    assert ["higher" in axes.get_title() for axes in panels] == [False, True, True]
    assert all(axes.get_xscale() == "log" for axes in panels)
    first, second = panels[0].containers  # of the third there is nothing to draw
    line, _, (bars,) = first
    assert list(line.get_ydata()) == [6.05, 12.25, 26.35]
    np.testing.assert_allclose(line.get_xdata().astype(float), [1000, 100, 20], rtol=0.1)  # a little aside of the other
    np.testing.assert_allclose([np.ptp(bar[:, 1]) for bar in bars.get_segments()], 0.1)
    assert list(second[0].get_ydata()) == [6.95, 12.68, 30.41]


@pytest.mark.parametrize(
    "results",
    [
        [result(metrics={"recall": (0.5, None)})],
        [result(f"{i}", steps=s, metrics={"FD": 100.0 / s}) for i in range(8) for s in (1, 10, 100)],
        [result(metrics={"FD": (-1e308, 1e308)}), result(steps=20, metrics={"FD": (1e308, -5.0)})],
        [result("x" * 5000 + "\udcff", "\udcff", metrics={"z" * 5000: 1.0})],
        [result("_$\\frac$", "$_", 5, metrics={"$x": -1.0} | {f"metric {i}": 1.0 for i in range(5)})],
    ],
    ids=["one point", "eight lines", "beyond floats", "not UTF-8", "hostile"],
)
def test_plots_of_any_size_can_be_drawn_and_their_lines_told_apart(results):
    figure = quality_figure(results)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    (legend,) = figure.legends
    runs = list(dict.fromkeys(made.run for made in results))
    assert len(legend.get_texts()) == len(runs)
    looks = {(handle.get_color(), handle.get_marker()) for handle in legend.legend_handles}
    assert len(looks) == len(runs)
    with Image.open(drawn) as image:
        assert np.asarray(image.convert("L")).std() > 5  # not a blank page


# Log and denoising -----------------------------------------------------------------------------------------------


def test_the_log_is_read_up_to_where_it_is_cut(tmp_path):
    file = tmp_path / "log.jsonl"
    assert read_log(file) == {"step": [], "loss": [], "images_per_s": []}
    line = '{"step": %d, "loss": 0.5, "images_per_s": 9.0, "learning_rate": 1}\n'
    file.write_text(line % 1 + "[]\n" + line % 2 + line.replace("0.5", "NaN") % 3 + (line % 4)[:30])
    assert read_log(file) == {"step": [1, 2], "loss": [0.5, 0.5], "images_per_s": [9, 9]}


@pytest.mark.parametrize("count", [1, 9, 35])
def test_smoothing_keeps_constants_and_straight_lines(count):
    assert smoothed([3.0] * count) == pytest.approx([3.0] * count)
    line = np.arange(count, dtype=float)
    width = max(1, count // 10) | 1
    inside = slice(width // 2, count - width // 2)
    np.testing.assert_allclose(smoothed(list(line))[inside], line[inside], atol=1e-9)
    if width > 1:
        jagged = line % 2
        assert smoothed(list(jagged)).std() < jagged.std()


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


@pytest.fixture(scope="module")
def finished(trained):
    return write_report(trained)


def test_the_page_is_one_file_that_fetches_nothing(finished):
    page = Page(finished)
    assert finished.name == "report.html"
    assert page.fetched
    assert all(source.startswith("data:image/") for source in page.fetched)
    assert "script" not in page.tags
    assert "default-src 'none'" in finished.read_text()
    assert finished.stat().st_size < 1_000_000
    assert all(page.alts)


def test_the_page_shows_every_section_of_a_finished_run(finished):
    page = Page(finished)
    assert all(heading in page.words for heading in SECTIONS)
    assert "Not shown" not in page.words
    for fact in ("1,498", "1 × 8 × 8", "4 of 4 steps", "ddpm_linear:num_levels=20", nidiff.__version__, "FD-pixels"):
        assert fact in page.words
    assert "nidiff train --config digits/experiment.json --out digits-again" in page.words
    assert page.alts.count("Grid of samples after step 4") == 1
    assert sum("Denoised image" in alt for alt in page.alts) == 6
    changed, _, usual = page.words.partition("other settings\n")
    assert ("batch_size" in changed, "learning_rate" in changed, "learning_rate" in usual) == (True, False, True)


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
    for words in (
        "2 of 4 steps, not ended",
        "has not ended",
        "samples/ has no pictures yet",
        "there are no results of this model yet",
    ):
        assert words in page.words
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


def test_the_image_to_denoise_must_have_the_shape_of_the_model(run, monkeypatch):
    monkeypatch.setattr("nidiff.report.html.SECTIONS", {})
    assert "shape (1, 4, 4)" in Page(write_report(run, torch.zeros(1, 4, 4))).words


def test_links_and_special_files_among_the_samples_are_not_shown(bare, tmp_path):
    secret = tmp_path / "secret.png"
    Image.fromarray(np.full((8, 8), 77, dtype=np.uint8)).save(secret)
    kept = len([alt for alt in Page(write_report(bare)).alts if alt.startswith("Grid")])
    (bare / "samples" / "000100.png").symlink_to(secret)
    (bare / "samples" / "000101.png").symlink_to("000101.png")  # a loop
    os.mkfifo(bare / "samples" / "000102.png")  # opening it would wait for ever
    (bare / "samples" / "000103.png").mkdir()
    (bare / "samples" / ("9" * 200 + ".png")).write_bytes(secret.read_bytes())
    (bare / "samples" / "000104.png").symlink_to("000004.png")  # inside the run
    page = Page(write_report(bare))
    grids = [alt for alt in page.alts if alt.startswith("Grid")]
    assert len(grids) == kept + 1
    assert "Grid of samples after step 104" in grids
    # The whole folder can be a link too.
    shutil.copytree(bare / "samples", tmp_path / "elsewhere", symlinks=True, ignore=lambda *_: ["000102.png"])
    shutil.rmtree(bare / "samples")
    (bare / "samples").symlink_to(tmp_path / "elsewhere")
    assert not [alt for alt in Page(write_report(bare)).alts if alt.startswith("Grid")]


def test_a_log_or_results_that_are_links_out_of_the_run_are_not_shown(run, finished, tmp_path):
    whole = Page(finished).words
    for name in ("log.jsonl", "metrics.json"):
        (run / name).rename(tmp_path / name)
        (run / name).symlink_to(tmp_path / name)
    words = Page(write_report(run)).words
    assert ("images per second" in whole, "FD-pixels" in whole) == (True, True)
    assert ("images per second" in words, "FD-pixels" in words) == (False, False)


def test_pictures_that_are_not_png_or_far_too_large_are_not_opened(bare):
    (bare / "samples" / "000100.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(bare / "samples" / "jpeg", format="jpeg")
    (bare / "samples" / "jpeg").rename(bare / "samples" / "000101.png")
    for step, side in ((102, 7000), (103, 100_000)):  # a header that promises too much
        file = bare / "samples" / f"000{step}.png"
        Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(file)
        content = bytearray(file.read_bytes())
        content[16:24] = struct.pack(">II", side, side)
        content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
        file.write_bytes(content)
    words = Page(write_report(bare)).words
    assert words.count("cannot be read") == 4


ODD_LINES = [
    "[" * 100_000,
    '{"step": ' + "9" * 5000 + "}",
    '{"step": 1e999, "loss": 1, "images_per_s": 1}',
    '{"step": 1, "loss": Infinity, "images_per_s": 1}',
    '{"step": 1, "loss": 1e300, "images_per_s": 1e300}',
    '{"step": ' + "9" * 400 + ', "loss": 1, "images_per_s": 1}',
    '{"step": [1], "loss": {}, "images_per_s": null}',
    '"\\ud800"',
    "\x00\xff",
]


def test_a_log_of_any_content_does_not_break_the_page(bare):
    good = '{"step": 7, "loss": 0.5, "images_per_s": 9.0}'
    lines = [*ODD_LINES, good, '{"step": -3, "loss": -1e50, "images_per_s": 1e-300}']
    (bare / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_log(bare / "log.jsonl")["step"] == [7, -3]
    page = Page(write_report(bare))
    assert any("Loss" in alt for alt in page.alts)
    (bare / "log.jsonl").unlink()
    (bare / "log.jsonl").mkdir()
    assert "log.jsonl has no line yet" in Page(write_report(bare)).words


@pytest.mark.parametrize(
    "facts", [{"image_shape": [[1], None, {}], "images": [1], "parameters": {}}, {"image_shape": [1] * 10**5}, [], None]
)
def test_facts_of_any_type_do_not_break_the_page(bare, facts):
    edited(bare, resolved=facts)
    assert "Settings that are not the default" in Page(write_report(bare)).words


def test_damaged_files_are_not_shown_and_the_rest_of_the_page_is(run):
    damage = {
        "metrics.json": "[" * 100_000,
        "model/scheduler/scheduler_config.json": "{",
        "model/unet/config.json": "[3]",
    }
    for name, content in damage.items():
        whole = (run / name).read_text()
        (run / name).write_text(content)
        page = Page(write_report(run))
        assert "Not shown" in page.words
        assert "Grid of samples after step 4" in page.alts
        (run / name).write_text(whole)


def test_many_large_grids_stay_within_two_megabytes_and_a_torn_one_is_named(bare):
    run = bare
    noise = np.random.default_rng(0).integers(0, 256, (500, 500, 3), dtype=np.uint8)
    Image.fromarray(noise).save(run / "samples" / "000001.png", compress_level=0)
    for step in range(2, 31):
        shutil.copy(run / "samples" / "000001.png", run / "samples" / f"{step:06d}.png")
    torn = run / "samples" / "000030.png"
    torn.write_bytes(torn.read_bytes()[:1000])
    page = Page(out := write_report(run))
    assert out.stat().st_size < 2_000_000
    assert "000030.png cannot be read" in page.words
    grids = [alt for alt in page.alts if alt.startswith("Grid")]
    assert len(grids) == 11
    assert grids[0] == "Grid of samples after step 1"


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


def test_the_command_writes_each_page_and_prints_its_path(bare, capsys, with_report):
    run, other = bare, Path(shutil.copytree(bare, bare.with_name("other")))
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{other / 'report.html'}\n"
    assert Page(run / "report.html").words != Page(other / "report.html").words


@pytest.mark.parametrize("bad", ["nowhere", "empty", "file"])
def test_what_is_not_a_run_is_refused_before_anything_is_written(bare, tmp_path, capsys, bad):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    run = bare
    (run / "report.html").unlink(missing_ok=True)
    assert main(["report", str(run), str(tmp_path / bad)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{bad}' is not a run directory" in err
    assert not (run / "report.html").exists()
    assert (tmp_path / "file").read_text() == "precious"


# Signals, fields, volumes and video ------------------------------------------------------------------------------

KINDS = {  # layout, shape of the data, whether they are pixels, and the axes that the page names
    "signal": ("NL", (8, 16), False, "channels, position"),
    "field": ("NCHW", (8, 2, 4, 8), False, "channels, height, width"),
    "video": ("NTHW", (8, 2, 4, 4), True, "channels, time, height, width"),
}


@pytest.mark.filterwarnings("ignore:clip=None")
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_every_kind_are_trained_on_sampled_and_shown(tmp_path, kind, with_report):
    layout, shape, is_pixels, axes = KINDS[kind]
    values = np.random.default_rng(0).normal(280, 12, shape)
    np.save(tmp_path / "data.npy", values.clip(0, 255).astype(np.uint8) if is_pixels else values.astype(np.float32))
    out = tmp_path / "run"
    tiny = [
        "--network",
        "unet",
        "--widths",
        "8",
        "--layers",
        "1",
        "--attention",
        "--batch-size",
        "4",
        "--cooldown",
        "0",
    ]
    often = ("--steps", "2", "--log-every", "1", "--num-samples", "2", "--num-steps", "2", "--target", "v")
    data = ("--data", str(tmp_path / "data.npy"), "--layout", layout)
    assert main(["train", "--out", str(out), *tiny, *often, *data, "--schedule", "ddpm_linear:num_levels=20"]) == 0
    with Image.open(out / "samples" / "000002.png") as drawn:
        assert drawn.width > 200
    page = Page(out / "report.html")
    assert page.words.count("Not shown") == 1  # its quality, which nobody has measured
    assert f"({axes})" in page.words
    assert {"Grid of samples after step 2", "The clean image"} <= {*page.alts}
    assert sum("Denoised image" in alt for alt in page.alts) >= 4
    assert out.joinpath("report.html").stat().st_size < 1_000_000
