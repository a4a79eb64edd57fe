"""The public names: few at the top, all importable, and those that moved say where they are."""

import importlib

import pytest

import nidiff


def test_the_top_has_at_most_fifty_names_and_all_of_them_exist():
    assert len(nidiff.__all__) <= 50
    for name in nidiff.__all__:
        assert getattr(nidiff, name) is not None
    with pytest.raises(AttributeError):
        nidiff.no_such_name  # noqa: B018


@pytest.mark.parametrize("namespace", nidiff.MOVED)
def test_names_that_moved_say_where_they_are(namespace):
    module = importlib.import_module(f"nidiff.{namespace}")
    for name in nidiff.MOVED[namespace].split():
        assert getattr(module, name) is not None
        with pytest.raises(AttributeError, match=f"nidiff.{namespace}.{name}"):
            getattr(nidiff, name)


def test_what_an_extension_needs_is_in_public_places():
    from nidiff.data import Dataset, Grid
    from nidiff.design import Kappa
    from nidiff.sampling import SAMPLERS, SPACINGS, Chain, Sampler, Step, Visit
    from nidiff.schedules import SCHEDULES

    assert all(isinstance(registry, dict) for registry in (SAMPLERS, SPACINGS, SCHEDULES))
    assert all((Dataset, Grid, Kappa, Chain, Sampler, Step, Visit))
