"""What table, plot and report.html promise: the numbers as they are, fair marks, one file that fetches nothing."""

import csv
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from PIL import Image

import nidiff
from nidiff.cli import main
from nidiff.commands.report import Report
from nidiff.errors import InputError
from nidiff.evaluation.results import Measured, Result, read_results
from nidiff.evaluation.table import MARKDOWN, csv_text, latex, markdown, number, text
from nidiff.randomness import generators_from_seeds, white_noise
from nidiff.report.denoising import denoise_levels, visible_rows
from nidiff.report.html import SECTIONS, write_report
from nidiff.report.loss import loss_figure, read_log, smoothed
from nidiff.report.quality import quality_figure
from nidiff.sampling.sampler import SAMPLERS
from nidiff.training.experiment import Experiment

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


def test_rows_go_by_run_and_sampler_named_once_then_from_many_steps_to_few():
    rows = markdown_rows([*paper(), result("DDPM", "ddim", 20, {"FID": 20.0})])[2:]
    assert [row[:3] for row in rows] == [
        *(["DDPM", "ancestral", "1000"], ["", "", "100"], ["", "", "20"]),
        ["", "ddim", "20"],
        *(["NI-DDPM", "ancestral", "1000"], ["", "", "100"], ["", "", "20"]),
    ]


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


def test_equal_values_are_both_best():
    assert markdown([result("a"), result("b"), result("c", metrics={"FD-pixels": 8.0})]).count("**") == 4


def test_the_note_says_where_the_numbers_come_from_and_one_each_where_that_differs():
    said = "Features pixels (sha256 01234567), preprocessing none; 299 real images of digits, split test; "
    for write in (markdown, latex, text):
        assert write(paper()).count(said) == 1
        assert "[1]" not in write(paper())
    mixed = [*paper(), result("other", provenance={"features_sha256": "fedcba9876543210"})]
    for write in (latex, text):
        assert "[1] Features pixels (sha256 01234567)" in write(mixed)
        assert "[2] Features pixels (sha256 fedcba98)" in write(mixed)
        assert "other [2]" in write(mixed)
        assert "NI-DDPM [1]" in write(mixed)
    changed = text([result(provenance={"real_sha256": "a" * 64}), result("b", provenance={"real_sha256": "b" * 64})])
    assert "of digits, split test (sha256 bbbbbbbb);" in changed  # other images under the same name
    # Another model or version of nidiff is what a table compares.
    assert "[1]" not in text([result(), result("b", provenance={"nidiff": "9", "commit": "x"})])


def test_a_metric_that_a_result_lacks_is_a_dash():
    results = [result("a", metrics={"FD-pixels": 1.0}), result("b", metrics={"KID-pixels": 2.0})]
    assert [row[3:] for row in markdown_rows(results)[2:]] == [["1.000 ± 0.010", "–"], ["–", "2.000 ± 0.010"]]


def test_settings_of_the_sampler_tell_rows_apart():
    results = [
        result("a", "ddim", options={"eta": 0.5}),
        result("a", "ddim"),
        result("a", "ddim", spacing="karras"),
        result("a", "ddim", clip=None),
    ]
    names = [row[1] for row in markdown_rows(results)[2:]]
    assert names == ["ddim, eta=0.5", "ddim", "ddim, karras", "ddim, clip=None"]


@pytest.mark.parametrize(
    "value, error, shown",
    [
        (7.0123, 0.12, "7.01 ± 0.12"),
        (7.0123, 0.34, "7.0 ± 0.3"),
        (0.0021, 0.0003, "0.0021 ± 0.0003"),
        (-0.00012, 0.0025, "-0.0001 ± 0.0025"),
        (9.99, 0.0996, "9.99 ± 0.10"),
        (1234.5, 56.0, "1234 ± 56"),
        (0.81, 0.0, "0.81 ± 0"),
        (0.5, 1e-17, "0.5 ± 1e-17"),
        (3.14159265, None, "3.142"),
        (0.0, 0.02, "0.000 ± 0.020"),
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


def test_the_terminal_gets_aligned_ascii():
    lines = text([*paper(), result("größe − 2×2", metrics={"FID": 1.0})]).splitlines()
    assert "gr??e - 2x2" in lines[7]
    assert all(line.isascii() for line in lines)
    column = lines[0].index("steps")
    assert [int(line[column:].split()[0]) for line in lines[1:8]] == [1000, 100, 20, 1000, 100, 20, 10]
    assert "6.05 +- 0.05" in lines[1]


@pytest.mark.parametrize(
    "content, words",
    [
        ("{", "metrics.json' cannot be read"),
        ("{}", "it is not a list"),
        ('[{"run": "a"}]', "no 'metrics'"),
        (written([result(metrics={"FID": ("7", 0.1)})]), "not a number"),
        (written([result(steps="10")]), "of another type"),
        (None, "there is no metrics.json"),
    ],
)
def test_results_that_cannot_be_read_are_refused(tmp_path, content, words):
    file = tmp_path / "metrics.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=words):
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
        [result("_$\\frac$", "$_", metrics={"$x": -1.0})],
        [result(metrics={"FD": (-1e308, 1e308)}), result(steps=20, metrics={"FD": (1e308, -5.0)})],
        [result(steps=steps) for steps in (0, -5, 10**19)],
        [result("x" * 5000 + "\udcff", "\udcff", metrics={"z" * 5000: 1.0})],
        [result(metrics={f"metric {i}": 1.0 for i in range(300)})],
    ],
    ids=["one point", "eight lines", "hostile", "beyond floats", "no steps", "not UTF-8", "many metrics"],
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


@pytest.mark.parametrize("count", [1, 2, 9, 10, 35, 100])
def test_smoothing_keeps_constants_and_straight_lines(count):
    assert smoothed([3.0] * count) == pytest.approx([3.0] * count)
    line = np.arange(count, dtype=float)
    width = max(1, count // 10) | 1
    inside = slice(width // 2, count - width // 2)
    np.testing.assert_allclose(smoothed(list(line))[inside], line[inside], atol=1e-9)
    if width > 1:
        jagged = line % 2
        assert smoothed(list(jagged)).std() < jagged.std()


def test_a_log_of_one_line_can_be_drawn():
    loss_figure({"step": [20], "loss": [0.5], "images_per_s": [100.0]}).savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize("schedule", [nidiff.ddpm_linear(200), nidiff.smld_geometric(50, 30.0, 0.01)], ids=["vp", "ve"])
def test_a_network_that_knows_eps_gets_the_image_back_and_one_that_knows_nothing_does_not(schedule):
    process = nidiff.Process(schedule, nidiff.gaussian_free_field((8, 8)))
    x0 = torch.linspace(-1, 1, 64).reshape(1, 8, 8)
    eps = white_noise((1, 1, 8, 8), generators_from_seeds([5]))
    found = denoise_levels(nidiff.Denoiser(lambda x, label: eps, process), x0, seed=5)
    assert len(found) == 6
    assert all(step.error < 1e-3 for step in found)
    sigmas = [step.level.sigma / step.level.signal for step in found]
    assert sigmas == sorted(sigmas)
    blind = denoise_levels(nidiff.Denoiser(lambda x, label: 0 * x, process), x0, seed=5)
    noise = process.covariance.sqrt(eps).square().mean().sqrt().item()
    assert [step.error for step in blind] == pytest.approx([sigma * noise for sigma in sigmas], rel=1e-3)
    # Shown at unit scale, VE too.
    assert all(step.noisy.abs().max() < 5 for step in found)


def test_levels_are_spread_over_what_can_be_seen():
    cosine = nidiff.ddpm_cosine(1000)
    seen = cosine.logsnr[visible_rows(cosine, 6)]
    assert cosine.logsnr[-1] < -15  # most of the schedule's range is nothing but noise
    torch.testing.assert_close(seen, torch.linspace(6, -6, 6, dtype=torch.float64), atol=0.1, rtol=0)
    assert visible_rows(nidiff.ddpm_linear(1), 6) == [0]
    assert visible_rows(nidiff.ddpm_linear(3).shifted(100.0), 6) == [0, 1, 2]


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
    """Other settings in experiment.json; a run without an identity, such as one of version 0.1, does not notice."""
    stored = json.loads((run / "experiment.json").read_text()) | values
    stored.pop("identity", None)
    (run / "experiment.json").write_text(json.dumps(stored))


@pytest.fixture
def bare(run):
    """The run with its settings and samples only, where the page is not what matters: it is written sooner."""
    for name in ("log.jsonl", "metrics.json"):
        (run / name).unlink()
    shutil.rmtree(run / "model")
    return run


def test_the_page_is_one_file_that_fetches_nothing(run):
    out = write_report(run)
    assert out == run / "report.html"
    page = Page(out)
    assert page.fetched
    assert all(source.startswith("data:image/") for source in page.fetched)
    assert "script" not in page.tags
    assert "default-src 'none'" in out.read_text()
    assert out.stat().st_size < 1_000_000
    assert all(page.alts)


def test_the_page_shows_every_section_of_a_finished_run(run):
    page = Page(write_report(run))
    assert all(heading in page.words for heading in SECTIONS)
    assert "Not shown" not in page.words
    for fact in ("1,498", "1 × 8 × 8", "4 of 4 steps", "ddpm_linear:num_levels=20", nidiff.__version__):
        assert fact in page.words
    assert "step 2" in page.words
    assert "the first image of the training data" in page.words
    assert "Features pixels (sha256 01234567)" in page.words
    assert "nidiff train --config digits/experiment.json --out digits-again" in page.words
    assert page.alts.count("Grid of samples after step 4") == 1
    assert sum("Denoised image" in alt for alt in page.alts) == 6


def test_settings_other_than_the_default_are_told_from_the_rest(run):
    words = Page(write_report(run)).words
    before, _, after = words.partition("other settings\n")
    assert "batch_size" in before
    assert "learning_rate" in after
    assert "learning_rate" not in before


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


def test_a_run_with_nothing_but_its_settings_has_a_page(tmp_path):
    (tmp_path / "experiment.json").write_text(json.dumps(Experiment().to_json()))
    page = Page(write_report(tmp_path))
    assert page.words.count("Not shown") == len(SECTIONS) - 3  # a run of an earlier version has no Gaussian
    assert "not recorded" in page.words


def tiles(page):
    """The pictures of the denoising, as the page has them."""
    return re.findall(r'<img class="tile" src="([^"]+)"', page.read_text())


def test_the_page_of_a_stranger_shows_nothing_that_its_settings_name(run, tmp_path):
    """Whatever experiment.json says the data are, the page is the same: they are not opened."""
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
    edited(run, data="digits", data_dir=None)
    assert "the first image of the training data" in Page(write_report(run)).words


def test_the_image_to_denoise_can_be_given_and_must_have_the_shape_of_the_model(run, tmp_path):
    words = Page(write_report(run, torch.zeros(1, 8, 8))).words
    assert "an image of the data" in words
    assert "Not shown" not in words
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


def test_a_log_or_results_that_are_links_out_of_the_run_are_not_shown(run, tmp_path):
    whole = Page(write_report(run)).words
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
    "facts",
    [
        *({"image_shape": 3}, {"image_shape": [[1], None, {}]}, {"image_shape": [1] * 10**5}, {"images": [1]}),
        *({"parameters": {}, "images": True}, {"images": 10**19}, [], "x", 3, None),
    ],
)
def test_facts_of_any_type_do_not_break_the_page(bare, facts):
    edited(bare, resolved=facts)
    assert "Settings that are not the default" in Page(write_report(bare)).words


@pytest.mark.parametrize("name", ["metrics.json", "model/scheduler/scheduler_config.json", "model/unet/config.json"])
@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[3]", '{"a": ' + "9" * 5000 + "}", "Infinity", "\udcff"])
def test_damaged_files_are_not_shown_and_the_rest_of_the_page_is(run, name, content):
    (run / name).write_text(content, errors="surrogateescape")
    page = Page(write_report(run))
    assert "Not shown" in page.words
    assert "Grid of samples after step 4" in page.alts


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


def test_the_command_writes_each_page_and_prints_its_path(bare, capsys):
    run, other = bare, Path(shutil.copytree(bare, bare.with_name("other")))
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{other / 'report.html'}\n"
    assert Page(run / "report.html").words != Page(other / "report.html").words


@pytest.mark.parametrize("bad", ["nowhere", "empty", "file"])
def test_what_is_not_a_run_is_refused_before_anything_is_written(bare, tmp_path, capsys, bad):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("precious")
    run = bare
    (run / "report.html").unlink()  # that of nidiff train
    assert main(["report", str(run), str(tmp_path / bad)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{bad}' is not a run directory" in err
    assert not (run / "report.html").exists()
    assert (tmp_path / "file").read_text() == "precious"


def test_no_run_at_all_is_refused():
    with pytest.raises(InputError, match="RUN is missing"):
        tyro.cli(Report, args=[]).run()


def test_the_command_can_be_listed_without_importing_torch():
    probe = "import sys, nidiff.commands.report; print(*{'torch', 'matplotlib', 'tyro'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.split() == ["tyro"]


# Signals, fields, volumes and video ------------------------------------------------------------------------------

KINDS = {  # layout, shape of the data, whether they are pixels, and the axes that the page names
    "signal": ("NL", (8, 16), False, "channels, position"),
    "field": ("NCHW", (8, 2, 4, 8), False, "channels, height, width"),
    "video": ("NTHW", (8, 2, 4, 4), True, "channels, time, height, width"),
}


@pytest.mark.filterwarnings("ignore:clip=None")
@pytest.mark.parametrize("kind", KINDS)
def test_data_of_every_kind_are_trained_on_sampled_and_shown(tmp_path, kind):
    layout, shape, is_pixels, axes = KINDS[kind]
    values = np.random.default_rng(0).normal(280, 12, shape)
    np.save(tmp_path / "data.npy", values.clip(0, 255).astype(np.uint8) if is_pixels else values.astype(np.float32))
    out = tmp_path / "run"
    tiny = (
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
    )
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
