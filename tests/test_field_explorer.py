"""The page docs/explorer/fields.html draws the fields of nidiff: the same Σ, and draws with its spectrum."""

import base64
import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import open_page
from torch import Tensor

import nidiff
from nidiff.covariance.config import as_covariance
from nidiff.covariance.summary import summary
from nidiff.covariance.waves import Waves, radial_mean, wavenumber
from nidiff.report.spectrum import common_shells, expected_spectrum, mean_spectrum

PAGE = (Path(__file__).parent.parent / "docs/explorer/fields.html").as_uri()
DRAWS = 200
FIELDS = {
    "gff": nidiff.gaussian_free_field,
    "matern": nidiff.matern,
    "offset": nidiff.offset,
    "white": nidiff.Identity,
}
CASES = {
    "free field": {"field": "gff", "gamma": 1.0, "boundary": "periodic", "size": 64},
    "free field, fixed": {"field": "gff", "gamma": 1.5, "boundary": "fixed", "size": 64},
    "matern": {"field": "matern", "length_scale": 6.0, "smoothness": 1.5, "boundary": "reflecting", "size": 64},
    "offset": {"field": "offset", "strength": 0.1, "size": 64},
}
ENDS = [  # of the sliders, on every grid
    {"field": "gff", "gamma": -1, "boundary": "reflecting", "size": 128},
    {"field": "gff", "gamma": 0.05, "boundary": "periodic", "size": 32},
    {"field": "gff", "gamma": 2.5, "boundary": "fixed", "size": 128},
    {"field": "matern", "length_scale": 24, "smoothness": 2.5, "boundary": "reflecting", "size": 128},
    {"field": "matern", "length_scale": 0.5, "smoothness": 0.25, "boundary": "fixed", "size": 64},
    {"field": "offset", "strength": 0, "size": 32},
    {"field": "offset", "strength": 1, "size": 128},
    {"field": "white", "size": 64},
]


@pytest.fixture(scope="module")
def page(browser):
    """The page, for its functions."""
    with open_page(browser, PAGE) as explorer:
        yield explorer


def covariance(settings: dict[str, Any]) -> nidiff.Covariance:
    """The same Σ in Python."""
    numbers = {name: value for name, value in settings.items() if name not in ("field", "size")}
    return FIELDS[settings["field"]]((settings["size"],) * 2, **numbers)


def computed(page: Any, expression: str, settings: dict[str, Any]) -> Tensor:
    """A table of numbers that the page computes from settings ``s``, as float64."""
    script = """async ([expression, s]) => new Promise((resolve) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result.split(",")[1] ?? "");
      reader.readAsDataURL(new Blob([new Function("s", `return ${expression}`)(s)].flat()));
    })"""
    numbers = base64.b64decode(page.evaluate(script, [expression, settings]))
    return torch.frombuffer(bytearray(numbers), dtype=torch.float64)


def draws_of(page: Any, settings: dict[str, Any], count: int) -> Tensor:
    tables = computed(page, f"Array.from({{length: {count}}}, (_, seed) => explorer.draw(s, seed))", settings)
    return tables.reshape(count, settings["size"], settings["size"])


@pytest.fixture(scope="module")
def drawn(page):
    """Call it with the name of a case: 200 draws of the page."""
    return functools.cache(lambda case: draws_of(page, CASES[case], DRAWS))


def power_ratio(x: Tensor, cov: nidiff.Covariance) -> Tensor:
    """The mean power of every mode in draws, by Python's transforms, over λ: 1 in the mean if x ~ N(0, Σ)."""
    return Waves(cov.event_shape, cov.basis.boundary or "periodic").power(x.double()).mean(0) / cov.eigenvalues


def in_bands(ratio: Tensor, cov: nidiff.Covariance) -> Tensor:
    """Its mean over five bands of |k| with as many modes each, 819 of 4096.

    A squared coefficient of N(0, Σ) over λ is χ² with one degree of freedom: mean 1, variance 2. Over 200 draws and 819
    modes the mean has a standard deviation of √(2 / (200 · 819)) = 0.35 %, so that 2 % is nearly six of them. In a band
    with few modes 2 % would say nothing.
    """
    order = wavenumber(cov.event_shape, cov.basis.boundary or "periodic").flatten().argsort()
    return torch.stack([band.mean() for band in ratio.flatten()[order].tensor_split(5)])


@pytest.mark.parametrize("settings", [*CASES.values(), *ENDS], ids=str)
def test_sigma_is_that_of_python_and_of_the_lines_that_it_shows(page, settings):
    cov = covariance(settings)
    torch.testing.assert_close(
        computed(page, "explorer.eigenvalues(s)", settings), cov.eigenvalues.flatten(), rtol=1e-6, atol=0.0
    )
    radial = computed(page, "explorer.radialMean(explorer.eigenvalues(s), s)", settings)
    torch.testing.assert_close(
        radial[~radial.isnan()], expected_spectrum(cov, common_shells([cov])), rtol=1e-6, atol=0.0
    )
    numbers, ours = page.evaluate("s => explorer.summary(s)", settings), summary(cov)
    assert numbers["condition"] == pytest.approx(ours.condition_number, rel=1e-6)
    assert numbers["rank"] == pytest.approx(ours.effective_rank, rel=1e-6)
    assert numbers["length"] == (None if ours.correlation_length is None else pytest.approx(ours.correlation_length))
    written = page.evaluate("s => explorer.written(s)", settings)
    program, name, spec, flag, *shape = shlex.split(written["command"])
    assert (program, name, flag) == ("nidiff", "noise", "--shape")
    for made in (eval(written["python"], {"nidiff": nidiff}), as_covariance(spec, tuple(map(int, shape)))):
        assert made.basis == cov.basis
        assert torch.equal(made.eigenvalues, cov.eigenvalues)


@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_spectrum_of_python_to_two_percent(page, drawn, case):
    settings, x = CASES[case], drawn(case)
    cov = covariance(settings)
    reference = cov.sample(x.shape, generator=torch.Generator().manual_seed(0))
    ratio, other = power_ratio(x, cov), power_ratio(reference, cov)
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.01)  # all 4096 modes: 0.16 % is one standard deviation
    assert (in_bands(ratio, cov) - 1).abs().max() < 0.02
    assert (in_bands(ratio, cov) / in_bands(other, cov) - 1).abs().max() < 0.02

    # Every |k| by its own error, and every one of the lowest modes.
    length = wavenumber(cov.event_shape, cov.basis.boundary or "periodic")
    shell = length.round().long()
    count = torch.bincount(shell.flatten())
    error = (radial_mean(ratio, shell) - 1).abs() / (2 / (DRAWS * count)).sqrt()
    assert error[count > 0].max() < 5
    assert (ratio[length <= 3] - 1).abs().max() < 5 * (2 / DRAWS) ** 0.5

    # The page's own transform measures the same.
    measured = computed(page, f"explorer.radialMean(explorer.meanPeriodogram(s, {DRAWS}), s)", settings)
    torch.testing.assert_close(measured[~measured.isnan()], mean_spectrum(x, common_shells([cov])), rtol=1e-9, atol=0.0)


def test_two_percent_tell_fields_apart(drawn):
    """Negative control: a slightly smoother Σ, and the sines of a fixed boundary for cosines."""
    x = drawn("free field")
    smoother = nidiff.gaussian_free_field((64, 64), gamma=1.05)
    assert (in_bands(power_ratio(x, smoother), smoother) - 1).abs().max() > 0.2
    x = drawn("matern")
    fixed = nidiff.matern((64, 64), length_scale=6.0, boundary="fixed")
    assert (in_bands(power_ratio(x, fixed), fixed) - 1).abs().max() > 0.5


def kolmogorov(x: Tensor) -> float:
    """Kolmogorov and Smirnov's statistic against N(0, 1): above 1.95 once in a thousand."""
    values = x.flatten().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    return (torch.special.ndtr(values) - steps).abs().max().item() * len(values) ** 0.5


def test_random_numbers_are_normal_and_seeds_independent(page):
    white = {"field": "white", "size": 64}
    x = draws_of(page, white, 20)
    assert kolmogorov(x) < 1.95 < kolmogorov(1.02 * x)
    alike = (x[:-1] * x[1:]).mean((1, 2)) * 64  # a standard normal number for each pair of seeds
    assert alike.abs().max() < 5
    assert torch.equal(computed(page, "explorer.draw(s, 7)", white), x[7].flatten())


def shown(page: Any) -> dict[str, str]:
    """What a visitor sees."""
    return page.evaluate("""() => ({
      picture: document.getElementById("picture").toDataURL(),
      ...Object.fromEntries(["spectrum", "correlation", "python", "command", "condition", "count"].map(
        (name) => [name, document.getElementById(name).innerHTML]))
    })""")


def test_the_keys_move_a_slider_and_everything_follows(browser):
    with open_page(browser, PAGE) as page:
        before = shown(page)
        page.get_by_label("γ").press("ArrowRight")
        after = shown(page)
        assert after.pop("count") == before.pop("count") == "1 draw"
        assert all(after[name] != before[name] for name in before)
        assert after["python"] == "nidiff.gaussian_free_field((64, 64), gamma=1.05)"
        assert "gamma=1.05" in page.url
        page.get_by_label("γ").press("ArrowLeft")
        assert shown(page)["picture"] == before["picture"]


def test_each_choice_changes_the_picture(browser):
    with open_page(browser, PAGE) as page:
        seen = [shown(page)["picture"]]
        for choice in ("Reflecting", "Fixed", "128", "32", "Matérn"):
            page.get_by_label(choice, exact=True).check()
            seen.append(shown(page)["picture"])
        page.get_by_label("Seed").fill("5")
        page.get_by_role("button", name="New draw").click()
        assert page.inner_text("#count") == "2 draws"
        seen.append(shown(page)["picture"])
        assert len(set(seen)) == len(seen)
        assert 'boundary="fixed"' in page.inner_text("#python")
        page.get_by_label("Offset", exact=True).check()  # is periodic, and says so
        assert page.get_by_label("Fixed").is_hidden()
        assert page.inner_text("#python") == "nidiff.offset((32, 32), strength=0.1)"


def distance(page: Any, chart: str = "spectrum") -> float:
    """The mean distance of the dots from the line of a chart; of the spectrum above |k| = 0."""
    svg = shown(page)[chart]
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", re.search(r'class="sigma" d="([^"]*)"', svg)[1])
    line, dots = dict(points[1:]), re.findall(r"translate\(([\d.]+) ([\d.]+)\)", svg)
    away = [abs(float(y) - float(line[x])) for x, y in dots if x in line]
    assert len(away) > 20
    return sum(away) / len(away)


def test_the_dots_of_endless_draws_would_lie_on_the_line(browser):
    with open_page(browser, f"{PAGE}#gamma=1.5") as page:
        first = [distance(page, chart) for chart in ("spectrum", "correlation")]
        page.evaluate("total = explorer.eigenvalues(settings); draws = 1; showCharts()")
        assert max(distance(page, chart) for chart in ("spectrum", "correlation")) < 0.02 < min(first)  # pixels


def test_the_page_fits_a_phone_and_follows_light_and_dark_and_its_commands_are_copied(browser):
    for dark in (False, True):
        with open_page(browser, PAGE, width=390, dark=dark) as page:
            for choice in ("Offset", "White", "Matérn", "128", "Reflecting"):
                page.get_by_label(choice, exact=True).check()
                assert page.evaluate("document.documentElement.scrollWidth") <= 390
            papers = []
            for _ in range(2):
                papers.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                page.get_by_role("button", name="Light/dark").click()
            assert papers == ["rgb(255, 255, 255)", "rgb(22, 24, 27)"][:: -1 if dark else 1]
            page.context.grant_permissions(["clipboard-read", "clipboard-write"])
            page.get_by_role("button", name="Copy").last.click()
            page.get_by_role("button", name="Copied").wait_for()
            assert page.evaluate("navigator.clipboard.readText()").startswith("nidiff noise matern:length_scale=")


def test_the_address_keeps_the_settings_and_nonsense_in_it_is_ignored(browser):
    bad = "gamma=NaN&size=7&boundary=<b>&field=toString&seed=-1&length_scale=&strength=1e999&constructor=1&%E0"
    with open_page(browser, PAGE) as plain, open_page(browser, f"{PAGE}#{bad}") as page:
        assert shown(page) == shown(plain)
        good = "field=matern&length_scale=3&smoothness=0.5&boundary=fixed&size=32&seed=4"
        page.goto(f"{PAGE}#{good}")
        python = 'nidiff.matern((32, 32), length_scale=3, smoothness=0.5, boundary="fixed")'
        page.wait_for_function("text => document.getElementById('python').textContent === text", arg=python)
        page.get_by_label("Seed").fill("-5")
        assert page.evaluate("settings.seed") == 0
        page.get_by_label("Seed").fill("9")
        page.get_by_label("Seed").press("Enter")
        assert page.url == f"{PAGE}#{good.replace('seed=4', 'seed=9')}"


def test_a_page_that_fetches_or_fails_is_noticed(browser, tmp_path):
    """Negative control of `open_page`."""
    for content, problem in (
        ('<img src="http://127.0.0.1:9/x.png">', "fetched from elsewhere"),
        ("<script>console.error('boo')</script>", "boo"),
        ("<script>nothing()</script>", "nothing is not defined"),
    ):
        (tmp_path / "page.html").write_text(content)
        with pytest.raises(AssertionError, match=problem), open_page(browser, (tmp_path / "page.html").as_uri()):
            pass
