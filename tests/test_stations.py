"""Values between the points of images: the operator, tables of stations, and what is refused."""

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff import operators as op

LAT, LON = np.linspace(67.5, -67.5, 7), np.arange(0, 360, 30.0)
EVENT = (len(LAT), len(LON))
GLOBE = {"coordinates": (LAT, LON), "periods": (None, 360.0)}


def places(count: int, seed: int = 0) -> np.ndarray:
    """Places of a globe, with longitudes from −180 to 180."""
    source = np.random.default_rng(seed)
    return np.stack([source.uniform(-67.5, 67.5, count), source.uniform(-180, 180, count)], 1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# The operator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bilinear", "nearest"])
def test_the_transpose_is_that_of_the_operator(kind):
    at, ones = places(40), torch.ones(1, 1, 40)
    near, far = (op.stations(at, **GLOBE, interpolation=each) for each in ("nearest", "bilinear"))
    like = torch.zeros(1, 1, *EVENT)
    domain = (near.transpose(ones, like) > 0) | (far.transpose(ones, like) == 0)  # the nearest points are in it
    assert not domain.all()
    for operator, x in (
        (op.stations(at, **GLOBE, interpolation=kind), normal(2, 3, *EVENT)),
        (op.stations(at, **GLOBE, interpolation=kind, domain=domain[0, 0]), normal(2, 1, *EVENT)),
        (op.stations([[0.5], [3.2]], (5,), interpolation=kind), normal(2, 1, 5)),
        (op.stations([[0.5, 1, 0.1]], (2, 3, 2), interpolation=kind), normal(1, 2, 2, 3, 2)),
    ):
        y = normal(*operator(x).shape, seed=1)
        back = operator.transpose(y, x)
        torch.testing.assert_close((operator(x) * y).sum(), (x * back).sum())
        assert abs((operator(x) * y).sum() - (x * back.flip(-1)).sum()) > 1e-3  # the control: another transpose
        operator.check_transposes(x)


def test_bilinear_is_exact_on_bilinear_fields_also_across_the_date_line():
    """A field that is linear in latitude and, between two meridians, in longitude; the cut at 180° is inside."""
    away = np.abs((LON - 120 + 180) % 360 - 180)  # a tent around 120° E: linear from 120° to 300°, across 180°
    field = torch.from_numpy((2 + 0.1 * LAT)[:, None] * (1 + away)[None])[None, None]
    at = places(200)
    expected = (2 + 0.1 * at[:, 0]) * (1 + np.abs((at[:, 1] - 120 + 180) % 360 - 180))
    np.testing.assert_allclose(op.stations(at, **GLOBE)(field)[0, 0], expected, rtol=1e-12)
    nearest = op.stations(at, **GLOBE, interpolation="nearest")(field)[0, 0].numpy()
    assert np.abs(nearest - expected).max() > 1  # the control
    # A grid from −180 to 180, and one that begins elsewhere, are the same one.
    for shift in (3, 6):
        turned = {"coordinates": (LAT, (np.roll(LON, shift) + 180) % 360 - 180), "periods": (None, 360.0)}
        seen = op.stations(at, **turned)(field.roll(shift, -1))
        torch.testing.assert_close(seen, op.stations(at, **GLOBE)(field))


def test_a_region_across_the_date_line_has_ends():
    lon = np.array([170.0, 175, -180, -175, -170])
    field = torch.arange(5.0, dtype=torch.float64).reshape(1, 1, 1, 5).expand(1, 1, 7, 5)
    seen = op.stations([[0, 177.5], [0, -182.5], [0, 187.5], [0, -169]], (LAT, lon), periods=(None, 360.0))(field)
    assert seen[0, 0].tolist() == [1.5, 1.5, 3.5, 4.0]
    with refused("points"):
        op.stations([[0, 0]], (LAT, lon), periods=(None, 360.0))
    with refused("points"):  # the control: without a circle 187.5 is elsewhere
        op.stations([[0, 187.5]], (LAT, np.unwrap(lon, period=360) - 360))


def test_stations_on_grid_points_are_a_mask():
    """The posterior of the same observation, by one operator or the other, under a Σ that does not commute with it."""
    gaussian = nidiff.GaussianModel(torch.zeros(2, *EVENT), nidiff.matern(EVENT, 2.0))
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.gaussian_free_field(EVENT))
    denoiser = gaussian.denoiser(process)
    rows, columns = np.array([0, 2, 6, 3]), np.array([0, 11, 5, 4])
    seen = torch.zeros(EVENT, dtype=torch.bool)
    seen[rows, columns] = True
    x0 = gaussian.sample((1, 2, *EVENT), generator=0)
    at = np.stack([LAT[rows], LON[columns] - 360], 1)
    samples = []
    for operator in (op.mask(seen), op.stations(at, **GLOBE), op.stations(at + np.array([0, 9.0]), **GLOBE)):
        observation = nidiff.Observation(operator(x0), operator, 0.1)
        posterior = nidiff.posterior(denoiser, observation)
        samples.append(nidiff.sample(posterior, (3, 2, *EVENT), sampler="ancestral", num_steps=8, generator=[0, 1, 2]))
    torch.testing.assert_close(samples[0], samples[1], rtol=0, atol=1e-5)
    assert (samples[0] - samples[2]).abs().max() > 1e-2  # the control: nine degrees further east


def test_places_that_are_outside_or_make_no_sense_are_refused():
    with pytest.raises(nidiff.InputError) as caught:
        op.stations([[0, 0], [90, 10], [-90, 0], [70, 5]], **GLOBE)
    assert "2 of 4" in caught.value.problem
    assert "(90, 10), row 1" in caught.value.problem
    land = torch.zeros(EVENT, dtype=torch.bool)
    land[:, :6] = True
    op.stations([[0, 155]], **GLOBE, domain=land)  # one of its neighbours is in the domain
    for points, options, argument in (
        ([[0, 200]], {**GLOBE, "domain": land}, "points"),
        ([[0, 0, 0]], GLOBE, "points"),
        ([[0, np.nan]], GLOBE, "points"),
        ([], GLOBE, "points"),
        ([[0, 0]], {"coordinates": ([1, 1, 2], 4)}, "coordinates"),
        ([[0, 0]], {**GLOBE, "periods": (360.0,)}, "periods"),
        ([[0, 0]], {**GLOBE, "interpolation": "cubic"}, "interpolation"),
    ):
        with refused(argument):
            op.stations(points, **options)
    with refused("coordinates"):
        op.stations([[0, 0]], **GLOBE)(torch.zeros(1, 1, 4, 4))


def test_the_error_of_each_image_is_its_own():
    """A batch of images with masks and errors of their own is each of them alone."""
    y, noise = normal(3, 1, 4, 4).float(), normal(3, 1, 4, 4, seed=1).abs().float() + 0.1
    masks = normal(3, 1, 4, 4, seed=2) > 0
    gaussian = nidiff.GaussianModel(torch.zeros(1, 4, 4), nidiff.matern((4, 4), 2.0))
    denoiser = gaussian.denoiser(nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.matern((4, 4), 1.0)))
    level, x = denoiser.process.schedule.level(9), normal(3, 1, 4, 4, seed=3).float()
    together = nidiff.Observation(y, op.mask(masks), noise)
    method = "gaussian:tolerance=1e-7"  # conjugate gradients end where the whole batch is as near
    found = nidiff.posterior(denoiser, together, method)(x, level)
    for item in range(3):
        alone = nidiff.posterior(denoiser, together.for_images(torch.tensor([item])), method)
        torch.testing.assert_close(alone(x[item : item + 1], level), found[item : item + 1], atol=1e-5, rtol=0)
        other = nidiff.Observation(y[item : item + 1], op.mask(masks[item]), noise[item - 1])
        assert (nidiff.posterior(denoiser, other)(x[item : item + 1], level) - found[item]).abs().max() > 1e-3


def test_a_transpose_of_another_shape_is_named():
    gaussian = nidiff.GaussianModel(torch.zeros(1, 4), nidiff.matern((4,), 2.0))
    denoiser = gaussian.denoiser(nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.matern((4,), 1.0)))
    for transpose in (lambda y: y, lambda y: None):
        operator = op.linear(lambda x: x[..., :2], transpose)
        with refused("transpose"):
            nidiff.posterior(denoiser, nidiff.Observation(torch.zeros(1, 1, 2), operator, 0.1))
