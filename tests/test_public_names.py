"""The public names: few at the top, and all importable."""

import pytest

import nidiff


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
