"""The public names: few at the top, and all importable."""

import re
import tomllib
from pathlib import Path

import pytest

import nidiff

ROOT = Path(__file__).parent.parent


def test_the_top_has_at_most_fifty_names_and_all_of_them_exist():
    assert len(nidiff.__all__) <= 50
    for name in nidiff.__all__:
        assert getattr(nidiff, name) is not None
    with pytest.raises(AttributeError):
        nidiff.no_such_name  # noqa: B018


def test_what_an_extension_needs_is_in_public_places():
    from nidiff.data import Dataset, Grid
    from nidiff.design import Kappa
    from nidiff.sampling import SAMPLERS, SPACINGS, Chain, Sampler, Step, Visit
    from nidiff.schedules import SCHEDULES

    assert all(isinstance(registry, dict) for registry in (SAMPLERS, SPACINGS, SCHEDULES))
    assert all((Dataset, Grid, Kappa, Chain, Sampler, Step, Visit))


def test_the_lowest_versions_that_are_tried_are_those_that_are_stated():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    chosen = re.findall(r"\w+", extras["all"][0])[1:]
    stated = [*project["dependencies"], *(line for extra in chosen for line in extras[extra])]
    lowest = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(stated), re.M))
    tried = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints-lowest.txt").read_text(), re.M))
    assert tried.keys() == lowest.keys()
    other = [name for name in lowest if not f"{tried[name]}.".startswith(f"{lowest[name]}.")]
    assert other == ["huggingface_hub"]  # of which gradio takes no lower one


def test_the_old_words_of_the_page_of_promises_are_still_read():
    from nidiff.inverse.posterior import BEFORE, METHODS
    from nidiff.sampling.sampler import as_sampler

    page = (ROOT / "docs" / "promises.md").read_text().partition("## Old words")[2]
    assert re.findall(r"^\| `(.*?)`", page, re.M) == ["angle:finish=turn", "bound=", "--method jacobian"]
    assert as_sampler("angle:finish=turn")
    assert as_sampler("ddim:bound=0.5")[0] == as_sampler("ddim:max_loss=0.5")[0]
    assert METHODS[BEFORE["jacobian"]] is METHODS["mmps"]
    with pytest.raises(nidiff.InputError):
        as_sampler("ddim:no_such_word=0.5")


def test_the_citation_is_of_this_version():
    assert f"\nversion: {nidiff.__version__}\n" in (ROOT / "CITATION.cff").read_text()
