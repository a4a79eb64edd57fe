"""The data's Gaussian: fitting it, what it says of noisy data, and the residual that is left to a network."""

import math
from itertools import pairwise

import pytest
import torch
from problems import refused

import nidiff
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import wavenumber
from nidiff.diffusion.gaussian import Kappa
from nidiff.sampling.angle import mean_angle
from nidiff.testing.problems import normal, smooth_net

SHAPE = (4, 6)
COLOURS = torch.tensor([[1.0, 0.6, 0.2], [0.6, 1.0, 0.1], [0.2, 0.1, 0.5]], dtype=torch.float64)
STEEP = nidiff.power_law(SHAPE, 2.67, normalize=False)
MEAN = 0.4 * normal(3, *SHAPE, seed=3)


def per_channel() -> nidiff.Covariance:
    """A spectrum of its own for every channel."""
    values = torch.stack([nidiff.power_law(SHAPE, p).eigenvalues for p in (1.0, 2.0, 3.0)])
    return nidiff.Channels(torch.tensor([1.0, 2.0, 3.0]).diag(), STEEP).with_eigenvalues(values)


def per_mode() -> nidiff.Covariance:
    """A spectrum of its own for every channel, and correlation between them."""
    each = [nidiff.power_law(SHAPE, p) for p in (1.0, 2.0, 3.0)]
    return nidiff.correlated(each, [[1.0, 0.6, 0.2], [0.6, 1.0, -0.4], [0.2, -0.4, 1.0]])


MODELS = {
    "shared": lambda: nidiff.GaussianModel(MEAN, STEEP),
    "each channel": lambda: nidiff.GaussianModel(MEAN, per_channel()),
    "between channels": lambda: nidiff.GaussianModel(MEAN, nidiff.Channels(COLOURS, STEEP, normalize=False)),
    "a matrix per mode": lambda: nidiff.GaussianModel(MEAN, per_mode()),
    "mixed edges": lambda: nidiff.GaussianModel(
        MEAN, nidiff.power_law(SHAPE, 2.0, boundary=("fixed", "periodic"), normalize=False)
    ),
    "cosine": lambda: nidiff.GaussianModel(MEAN, nidiff.power_law(SHAPE, 2.0, boundary="reflecting", normalize=False)),
    "white": lambda: nidiff.GaussianModel(MEAN, 0.3 * nidiff.Identity(SHAPE)),
}
every_model = pytest.mark.parametrize("model", [pytest.param(make(), id=name) for name, make in MODELS.items()])
FITTED = {"shared": "shared", "each channel": "each", "between channels": "joint", "cosine": "shared"}
FITTED |= {"a matrix per mode": "cross", "mixed edges": "shared"}


def steeper(base: nidiff.Schedule, shape: tuple[int, ...]) -> nidiff.Schedule:
    """Every mode at its own time."""
    late = wavenumber(shape)
    return nidiff.Schedule(base.logsnr.reshape(-1, *[1] * len(shape)) - late * base.time.reshape(-1, 1, 1))


SCHEDULES = {
    "linear": nidiff.schedules.ddpm_linear(100),
    "cosine": nidiff.schedules.ddpm_cosine(100),
    "smld": nidiff.schedules.smld_geometric(50, 20.0, 0.05),
    "flow": nidiff.Schedule(torch.linspace(8, -8, 50, dtype=torch.float64), "sum"),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def noises(model: nidiff.GaussianModel) -> list[nidiff.Covariance]:
    """White, the data's own spectrum, and one between."""
    if model.covariance.is_constant:
        return [nidiff.Identity(SHAPE), nidiff.gaussian_free_field(SHAPE)]
    return [nidiff.Identity(SHAPE), model.power(1.0), model.power(0.5)]


def dense(model: nidiff.GaussianModel) -> tuple[torch.Tensor, torch.Tensor]:
    """μ and C of the whole item."""
    matrix = model.covariance.dense()
    repeats = math.prod(model.shape) // len(matrix)
    return model.mean.flatten(), torch.block_diag(*[matrix] * repeats)


# Fitting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "channels"), FITTED.items())
def test_a_fit_finds_the_model_that_the_data_came_from(name, channels):
    model = MODELS[name]()
    data = model.sample((20_000, *model.shape), torch.Generator().manual_seed(0), dtype=torch.float64)
    found = nidiff.fit_gaussian(data, basis=model.spatial, channels=channels, shrinkage=0.0)
    mean, matrix = dense(model)
    own_mean, own = dense(found)
    assert (own_mean - mean).abs().max() < 0.05
    assert (own - matrix).norm() < 0.05 * matrix.norm()
    # Negative control: the spectrum of another model is further away.
    other = dense(nidiff.GaussianModel(MEAN, nidiff.Identity(SHAPE)))[1]
    assert (own - matrix).norm() < 0.1 * (other - matrix).norm()


def test_every_mode_has_the_variance_of_the_data_in_it():
    """The fit is the diagonal of the sample covariance in the basis: by hand, in the cosine basis."""
    data = normal(50, 2, *SHAPE) @ normal(6, 6, seed=1)
    cosine = nidiff.power_law(SHAPE, 1.0, boundary="reflecting")
    centred = cosine.basis.analyse(data - data.mean(0))
    each = nidiff.fit_gaussian(data, basis="reflecting", shrinkage=0.0)
    assert torch.allclose(each.covariance.eigenvalues, centred.square().mean(0))
    assert torch.allclose(each.mean, data.mean(0))
    shared = nidiff.fit_gaussian(data, basis=cosine, channels="shared", shrinkage=0.0)
    assert torch.allclose(shared.covariance.eigenvalues, centred.square().mean((0, 1)))
    shrunk = nidiff.fit_gaussian(data, basis=cosine, channels="shared", shrinkage=0.3).covariance.eigenvalues
    exact = shared.covariance.eigenvalues
    radial = nidiff.fit_gaussian(data, basis="reflecting", channels="shared", average="radial", shrinkage=0.0)
    shell = wavenumber(SHAPE, "reflecting").round()
    for k in shell.unique():
        here = shell == k
        assert torch.allclose(radial.covariance.eigenvalues[here], exact[here].mean())
    assert torch.allclose(shrunk, 0.7 * exact + 0.3 * radial.covariance.eigenvalues)
    dense = nidiff.Dense(torch.diag(torch.arange(1.0, 25.0)), SHAPE)
    white = nidiff.fit_gaussian(data, basis=dense, channels="shared", shrinkage=1.0).covariance.eigenvalues
    assert torch.allclose(white, white.mean())


def test_one_pass_over_batches_of_any_size_is_the_same_fit():
    data = normal(30, 3, *SHAPE) + 5.0
    whole = nidiff.fit_gaussian(data, channels="joint")
    for parts in (data.split(7), iter(data.split(1)), (part.numpy() for part in data.split(30))):
        other = nidiff.fit_gaussian(parts, channels="joint")
        assert torch.allclose(other.mean, whole.mean, atol=1e-12)
        assert torch.allclose(other.covariance.dense(), whole.covariance.dense(), atol=1e-12)
    of_array = nidiff.fit_gaussian(data.numpy(), channels="joint")  # which is the data, and not their batches
    assert torch.equal(of_array.covariance.eigenvalues, whole.covariance.eigenvalues)


def test_signals_and_single_channels_fit():
    model = nidiff.fit_gaussian(normal(40, 16), basis="reflecting")
    assert model.shape == model.covariance.event_shape == (16,)
    assert nidiff.fit_gaussian(normal(10, 1, 2, 3, 4)).shape == (1, 2, 3, 4)
    pyramid = nidiff.pyramid((4, 4))
    assert nidiff.fit_gaussian(normal(20, 1, 4, 4), basis=pyramid).spatial == pyramid.basis


DOUBLE = {"dtype": torch.float64}
KAPPA = Kappa(torch.tensor([0.0, 99.0]), torch.ones(2, *SHAPE), torch.ones(2, *SHAPE))
DATA, PROCESS = normal(4, 1, 4, 4), nidiff.Process("ddpm_linear", STEEP)
PLAIN, SHARED = nidiff.Denoiser(smooth_net(SHAPE), PROCESS), MODELS["shared"]().denoiser(PROCESS)
BAD = [
    ("data", lambda: nidiff.fit_gaussian(torch.ones(5, 1, 4, 4))),
    ("data", lambda: nidiff.fit_gaussian(normal(1, 1, 4, 4))),
    ("data", lambda: nidiff.fit_gaussian(DATA / 0)),
    ("data", lambda: nidiff.fit_gaussian([DATA, normal(4, 1, 5, 4)])),
    ("shrinkage", lambda: nidiff.fit_gaussian(DATA, shrinkage=2)),
    ("basis", lambda: nidiff.fit_gaussian(DATA, basis=nidiff.Identity((5, 5)))),
    ("average", lambda: nidiff.fit_gaussian(DATA, basis=nidiff.pyramid((4, 4)), average="radial")),
    ("mean", lambda: nidiff.GaussianModel(normal(3, 5), STEEP)),
    ("gaussian", lambda: MODELS["shared"]().denoiser(nidiff.Process("ddpm_linear", nidiff.pyramid(SHAPE)))),
    ("schedule", lambda: nidiff.Process(steeper(SCHEDULES["linear"], SHAPE), nidiff.Identity(SHAPE))),  # no basis
    ("basis", lambda: MODELS["cosine"]().denoiser(nidiff.Process("offset_ramp", nidiff.Identity(SHAPE)))),
    ("x", lambda: nidiff.sample(SHARED, (1, 2, *SHAPE))),  # other channels
    ("kappa", lambda: SHARED.with_kappa(KAPPA)),  # of another schedule
    ("target", lambda: nidiff.Denoiser(smooth_net(SHAPE), PROCESS, "residual")),
    ("sampler", lambda: nidiff.sample(PLAIN.clipped(1.0), (1, *SHAPE), sampler="angle", spacing="trailing", **DOUBLE)),
    ("spacing", lambda: nidiff.sample(PLAIN, (1, *SHAPE), spacing="angle", **DOUBLE)),
    ("finish", lambda: nidiff.sample(SHARED, (1, *MEAN.shape), sampler="angle:finish=soon")),
    ("denoiser", lambda: nidiff.design.measure_kappa(PLAIN, MEAN[None])),
    ("data", lambda: nidiff.design.measure_kappa(SHARED, MEAN[None, :2])),
]


def test_bad_input_is_named():
    for argument, call in BAD:
        with refused(argument):
            call()


# What it says ----------------------------------------------------------------------------------------------------


@every_model
def test_the_density_is_that_of_the_dense_matrix(model):
    mean, matrix = dense(model)
    x = model.sample((5, *model.shape), dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(mean, matrix).log_prob(x.flatten(1))
    assert torch.allclose(model.log_prob(x), exact)
    bits = -(exact / mean.numel() + math.log(2 / 255)) / math.log(2)
    assert torch.allclose(model.bits_per_dim(x), bits)


@every_model
@every_schedule
def test_the_denoiser_is_the_exact_one(model, schedule):
    """E[x0 | x] by dense matrices, for white, matched and other noise."""
    mean, matrix = dense(model)
    for cov in noises(model):
        process = nidiff.Process(schedule, cov)
        denoiser = model.denoiser(process)
        noise = torch.block_diag(*[cov.dense()] * 3)
        x = normal(2, *model.shape)
        for row in (0, len(schedule) // 2, len(schedule) - 1):
            level = schedule.level(row)
            gain = level.signal * matrix @ torch.linalg.inv(level.signal**2 * matrix + level.sigma**2 * noise)
            exact = mean + (x.flatten(1) - level.signal * mean) @ gain.T
            assert torch.allclose(denoiser(x, level).flatten(1), exact, rtol=1e-6, atol=1e-8)


@every_model
@every_schedule
def test_the_residual_has_variance_one_in_every_mode_at_every_level(model, schedule):
    """cos² + sin² = 1, with draws of exactly the model's covariance: unit impulses in place of random numbers."""
    for cov in noises(model):
        process = nidiff.Process(schedule, cov)
        denoiser = model.denoiser(process)
        size = math.prod(model.shape)
        impulses = torch.eye(size, dtype=torch.float64).reshape(size, *model.shape)
        still = torch.zeros_like(impulses)
        for row in (0, len(schedule) // 2, len(schedule) - 1):
            level = schedule.level(row)
            data = denoiser.target.encode(model.colour(impulses), still, level, cov).flatten(1)
            noise = denoiser.target.encode(model.colour(still), impulses, level, cov).flatten(1)
            covariance = data.T @ data + noise.T @ noise
            assert torch.allclose(covariance, torch.eye(size, dtype=torch.float64), atol=1e-8)


@every_schedule
def test_decoding_inverts_encoding_with_a_level_per_image(schedule):
    model = MODELS["between channels"]()
    process = nidiff.Process(schedule, model.power(0.5))
    denoiser, rows = model.denoiser(process), torch.tensor([0, 20, 49])
    x0, eps = normal(3, *model.shape), normal(3, *model.shape, seed=1)
    level, target = schedule.level(rows), denoiser.target
    x = process.perturb(x0, level, eps)
    output = target.encode(x0, eps, level, process.covariance)
    assert torch.allclose(target.decode(output, x, level, process.covariance), x0, atol=1e-8)
    assert torch.allclose(target.invert(x0, x, level, process.covariance), output, atol=1e-5)
    alone = [denoiser(x[i : i + 1], schedule.level(int(row))) for i, row in enumerate(rows)]
    assert torch.allclose(denoiser(x, level), torch.cat(alone))


def test_what_the_network_sees():
    """ "z" has variance 1 in every mode; "both" is x and z along the channels; the rest of the formula is the same."""
    model, schedule = MODELS["each channel"](), nidiff.schedules.ddpm_linear(100)
    process, seen = nidiff.Process(schedule, nidiff.Identity(SHAPE)), []

    def net(x, label):
        seen.append(x)
        return 0.1 * x[:, -3:]

    x, level = normal(2, *model.shape), schedule.level(50)
    for sees in ("x", "z", "both"):
        nidiff.Denoiser(net, process, "residual", gaussian=model, sees=sees)(x, level)
    z = model.at(level, process.covariance).to_z(x)
    assert torch.equal(seen[0], x)
    assert torch.allclose(seen[1], z)
    assert torch.allclose(seen[2], torch.cat([x, z], 1))
    mean, matrix = dense(model)
    total = level.signal**2 * matrix + level.sigma**2 * torch.eye(len(matrix), dtype=torch.float64)
    density = torch.distributions.MultivariateNormal(level.signal * mean, total)
    distance = -2 * (density.log_prob(x.flatten(1)) - density.log_prob(density.mean))
    assert torch.allclose(z.flatten(1).square().sum(1), distance)


@every_schedule
def test_the_loss_weighs_the_residual_as_it_does_every_target(schedule):
    """The same x̂0 has the same eps error, score error and noise error, whatever the network predicts."""
    model = MODELS["between channels"]()
    process = nidiff.Process(schedule, model.power(0.5))
    plain = nidiff.Denoiser(smooth_net(model.shape), process, "x0", gaussian=model)
    silent = model.denoiser(process)

    def net(x, label):
        level = schedule.level(label)
        return silent.target.invert(plain(x, level), x, level, process.covariance)

    residual = nidiff.Denoiser(net, process, "residual", gaussian=model, sees="x")
    x0, eps = normal(3, *model.shape), normal(3, *model.shape, seed=1)
    given = {"eps": eps, "level": schedule.level(torch.tensor([3, 20, 40]))}
    for weighting in ("eps", "score", "noise"):
        mine, other = (nidiff.denoising_loss(d, x0, weighting=weighting, **given) for d in (residual, plain))
        assert torch.allclose(mine, other, rtol=1e-6)
    own, other = (nidiff.denoising_loss(d, x0, weighting="target", **given) for d in (residual, plain))
    assert not torch.allclose(own, other, rtol=1e-2)


def test_the_loss_of_a_network_that_says_nothing_is_one():
    """F has variance 1, if C is right; in float32, with a level per image."""
    model = MODELS["each channel"]()
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(1000), model.power(0.5))
    data = model.sample((4000, *model.shape), torch.Generator().manual_seed(0))
    wrong = nidiff.GaussianModel(2 * MEAN, nidiff.Identity(SHAPE))  # negative control
    right, other = (
        nidiff.denoising_loss(each.denoiser(process), data, generator=1, weighting="target").mean().item()
        for each in (model, wrong)
    )
    assert abs(right - 1) < 0.02
    assert abs(other - 1) > 0.05


# The angle -------------------------------------------------------------------------------------------------------


def nonlinear(process: nidiff.Process, model: nidiff.GaussianModel, **options) -> nidiff.Denoiser:
    return nidiff.Denoiser(smooth_net(model.shape), process, "x0", gaussian=model, **options)


@every_model
@every_schedule
def test_the_flow_is_dz_equals_f_dtheta(model, schedule):
    """For any network: a small step of the probability-flow ODE changes z by F dθ. And x̂0 alone would not do."""
    for cov in noises(model):
        process = nidiff.Process(schedule, cov)
        denoiser, x, small = nonlinear(process, model), normal(2, *model.shape), 1e-4
        logsnr = schedule.logsnr[len(schedule) // 2].item()
        here, below, above = (schedule.level_at(logsnr + change) for change in (0.0, -small, small))
        x0 = denoiser(x, here)
        velocity = process.flow(x, x0, here)
        now, before, after = (model.at(level, cov) for level in (here, below, above))
        slope = (after.to_z(x + small * velocity) - before.to_z(x - small * velocity)) / (2 * small)
        rate = (after.angle - before.angle) / (2 * small)
        assert torch.allclose(rate * now.residual(x, x0), slope, atol=1e-6)
        assert not torch.allclose(rate * (x0 - model.mean), slope, atol=1e-3)


@every_model
@pytest.mark.parametrize("sampler", ["angle", "angle_2m"])
def test_one_step_is_exact_for_gaussian_data_under_every_noise_and_schedule(model, sampler):
    """Every mode keeps its z: from N(signal μ, total) at the noisiest level to N(μ, C). Five schedules, three Σ."""
    schedules = [*SCHEDULES.values(), steeper(nidiff.schedules.ddpm_linear(60), SHAPE)]
    for schedule in schedules:
        for cov in noises(model)[1 if schedule.event_shape else 0 :]:
            process = nidiff.Process(schedule, cov)
            last = process.schedule.level(len(schedule) - 1)
            z = normal(3, *model.shape)
            start = model.at(last, cov).from_z(z)
            options = {"start": start, "dtype": torch.float64}
            for rows in ([len(schedule) - 1], [len(schedule) - 1, 30, 2]):
                drawn = nidiff.sample(model.denoiser(process), start.shape, sampler=sampler, spacing=rows, **options)
                assert torch.allclose(drawn, model.colour(z), atol=1e-10)
            other = nidiff.sample(model.denoiser(process), start.shape, sampler="dpmpp_2m", spacing=rows, **options)
            assert (other - model.colour(z)).abs().max() > 1e-3  # negative control


@pytest.mark.parametrize("name", SCHEDULES)
def test_with_kappa_one_it_is_ddim(name):
    """A network that knows x0: (z, F) turn, and the last step ends at x̂0."""
    schedule, model = SCHEDULES[name], MODELS["between channels"]()
    process = nidiff.Process(schedule, model.power(0.5))
    one = torch.ones(2, *model.shape, dtype=torch.float64)
    rows = torch.tensor([0.0, len(schedule) - 1.0], dtype=torch.float64)
    known = nonlinear(process, model, clip=3.0, kappa=Kappa(rows, one, one))
    unknown = nonlinear(process, model, clip=3.0, kappa=Kappa(rows, 0 * one, one))
    options = {"shape": (2, *model.shape), "num_steps": 6, "generator": [1, 2], "dtype": torch.float64}
    ddim = nidiff.sample(unknown, sampler="ddim", spacing="angle", **options)
    assert torch.allclose(nidiff.sample(known, sampler="angle", **options), ddim, atol=1e-9)
    assert not torch.allclose(nidiff.sample(unknown, sampler="angle", **options), ddim, atol=1e-3)


@pytest.mark.parametrize("share", [0.1, 5.0])
def test_where_kappa_is_not_known_it_is_the_mean_square_of_the_residual_but_at_most_one(share):
    """z' = cos(√κ Δ) z + sin(√κ Δ)/√κ F, image by image; a network that says too much has an F beyond variance 1."""
    model, schedule = MODELS["each channel"](), SCHEDULES["linear"]
    process = nidiff.Process(schedule, model.power(0.5))
    exact, plain = model.denoiser(process), nonlinear(process, model)

    def net(x, label):
        level = schedule.level(int(label[0]))
        return exact(x, level).lerp(plain(x, level), share)

    visits = []
    options = {"shape": (2, *model.shape), "sampler": "angle", "num_steps": 4, "generator": [1, 2], **DOUBLE}
    nidiff.sample(nidiff.Denoiser(net, process, "x0", gaussian=model), callback=visits.append, **options)
    for here, there in pairwise(visits):
        now, then = (model.at(visit.level, process.covariance) for visit in (here, there))
        residual = now.residual(here.x, here.x0)
        square = residual.square().flatten(1).mean(1)
        assert ((square > 1) == (share > 1)).all()
        root = Modes(square.clamp(max=1.0).sqrt())
        turn = root * (then.angle - now.angle)
        wanted = turn.map(torch.cos) * now.to_z(here.x) + turn.map(torch.sin) / root * residual
        assert torch.allclose(then.to_z(there.x), wanted, atol=1e-9)


@pytest.mark.parametrize("sampler", ["angle", "angle_2m"])
def test_with_kappa_one_a_single_clean_image_is_followed_exactly(sampler):
    """x = signal x0 + sigma n with the same n all along: (z, F) turn, and what F did before is what was expected."""
    model, schedule = MODELS["each channel"](), SCHEDULES["linear"]
    process = nidiff.Process(schedule, model.power(0.5))
    one, rows = torch.ones(2, *model.shape, dtype=torch.float64), torch.tensor([0.0, 99.0], dtype=torch.float64)
    x0, noise, visits = normal(2, *model.shape), normal(2, *model.shape, seed=1), []
    denoiser = nidiff.Denoiser(lambda x, label: x0, process, "x0", gaussian=model, kappa=Kappa(rows, one, one))
    top = schedule.level(99)
    options = {"sampler": sampler, "spacing": [99, 80, 50, 10], "callback": visits.append, **DOUBLE}
    nidiff.sample(denoiser, x0.shape, start=top.signal * x0 + top.sigma * noise, **options)
    for visit in visits:
        assert torch.allclose(visit.x, visit.level.signal * x0 + visit.level.sigma * noise, atol=1e-9)


@pytest.mark.parametrize("sampler", ["angle", "angle_2m"])
def test_as_much_of_the_residual_counts_as_is_trusted(sampler):
    """β = ¼ is the network whose F is a quarter, which is x̂0 a quarter of the way from E[x0 | x]."""
    model, schedule = MODELS["each channel"](), SCHEDULES["linear"]
    process = nidiff.Process(schedule, model.power(0.5))
    one, rows = torch.ones(2, *model.shape, dtype=torch.float64), torch.tensor([0.0, 99.0], dtype=torch.float64)
    exact, plain = model.denoiser(process), nonlinear(process, model)

    def quarter(x, label):
        level = schedule.level(int(label[0]))
        return exact(x, level).lerp(plain(x, level), 0.25)

    options = {"shape": (2, *model.shape), "sampler": sampler, "num_steps": 5, "generator": [1, 2], **DOUBLE}
    trusted = nidiff.Denoiser(quarter, process, "x0", gaussian=model, kappa=Kappa(rows, 0.3 * one, one))
    wanted = nidiff.sample(trusted, **options)
    drawn = [nidiff.sample(plain.with_kappa(Kappa(rows, 0.3 * one, trust * one)), **options) for trust in (0.25, 1.0)]
    assert torch.allclose(drawn[0], wanted, atol=1e-9)
    assert not torch.allclose(drawn[1], wanted, atol=1e-3)  # negative control


@pytest.mark.parametrize(("rows", "capped"), [([99, 90, 20], True), ([99, 40, 20], False)])
def test_the_change_of_the_residual_is_carried_on_no_further_than_it_was_seen(rows, capped):
    """κ = 0: z' = z + Δ (F + ½ stride (F − F before)), stride the ratio of the two steps of the clock, at most 1."""
    model, schedule = MODELS["each channel"](), SCHEDULES["linear"]
    process = nidiff.Process(schedule, model.power(0.5))
    zero = torch.zeros(2, *model.shape, dtype=torch.float64)
    denoiser = nonlinear(process, model, kappa=Kappa(torch.tensor([0.0, 99.0], dtype=torch.float64), zero, zero + 1))
    visits = []
    options = {"shape": (2, *model.shape), "sampler": "angle_2m", "spacing": rows, "generator": [1, 2], **DOUBLE}
    nidiff.sample(denoiser, callback=visits.append, **options)
    states = [model.at(visit.level, process.covariance) for visit in visits]
    z = [state.to_z(visit.x) for state, visit in zip(states, visits, strict=True)]
    first, second = (states[i].residual(visits[i].x, visits[i].x0) for i in (0, 1))
    clock = [mean_angle(model, state) for state in states]
    ratio = (clock[2] - clock[1]) / (clock[1] - clock[0])
    assert (ratio > 1.5) == capped
    change = second + 0.5 * min(1.0, ratio) * (second - first)
    assert torch.allclose(z[2], z[1] + (states[2].angle - states[1].angle) * change, atol=1e-9)


@pytest.mark.parametrize("sampler", ["angle", "angle_2m"])
def test_the_last_step_is_clipped_and_may_be_that_of_the_denoiser(sampler):
    model, schedule = MODELS["each channel"](), nidiff.schedules.ddpm_linear(100)
    zero = torch.zeros(2, *model.shape)
    kappa = Kappa(torch.tensor([0.0, 99.0], dtype=torch.float64), zero, zero + 1)
    denoiser = nonlinear(nidiff.Process(schedule, model.power(0.5)), model, clip=0.3, kappa=kappa)
    options = {"shape": (2, *model.shape), "sampler": sampler, "num_steps": 4, "generator": [1, 2], **DOUBLE}
    visits = []
    turned = nidiff.sample(denoiser, callback=visits.append, **options)
    assert turned.abs().max() == 0.3
    denoised = nidiff.sample(denoiser, finish="denoise", **options)
    assert torch.equal(denoised, visits[-1].x0)
    assert not torch.allclose(turned, denoised, atol=1e-3)
    assert nidiff.sample(denoiser.clipped(None), **options).abs().max() > 0.3


def test_kappa_is_the_share_that_is_explained():
    """0 for Gaussian data and their exact denoiser, 1 for a single clean image, and between for two."""
    model = MODELS["each channel"]()
    data = model.sample((600, *model.shape), torch.Generator().manual_seed(0), dtype=torch.float64)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(100), model.power(0.5))
    measured = nidiff.design.measure_kappa(model.denoiser(process), data, num_images=200)
    assert measured.kappa is not None
    assert measured.kappa.values.max() < 1e-12

    def knows(x, label):
        return data[:200][: len(x)] if len(x) == 128 else data[128:200]

    knowing = nidiff.Denoiser(knows, process, "x0", gaussian=model)
    kappa = nidiff.design.measure_kappa(knowing, data, num_images=200, num_rows=3).kappa
    assert kappa is not None
    assert (kappa.values.mean() - 1).abs() < 0.1  # clamped at 1, mode by mode
    assert kappa.trust.min() == 1
    later = Kappa(*(each[1:] for each in kappa[:3]))
    assert torch.equal(later.at(process.schedule.level(0), model)[0].values, kappa.values[1].double())
    middle, trust = kappa.at(process.schedule.level(25), model)
    assert torch.allclose(middle.values, (kappa.values[0] + kappa.values[1]).double() / 2, atol=0.02)
    assert bool((trust.values == 1).all())


@pytest.mark.parametrize("count", [30, 3000])
def test_beta_forgives_two_standard_errors(count):
    """β = 1 − max(0, mean(e) − 2 std(e)/√n)/mean(F²), e = F (F − F*), by its definition in one mode at one level."""
    model = nidiff.GaussianModel(torch.zeros(1, 1), nidiff.Diagonal([1.0], normalize=False))
    process = nidiff.Process(nidiff.Schedule([1.0, -1.0]), nidiff.Identity((1,)))
    data, seen = model.sample((count, 1, 1), torch.Generator().manual_seed(7), dtype=torch.float64), {}

    def net(x, label):  # what is wanted, and an error of the same size
        row = int(label[0])
        wiener, x0 = model.at(process.schedule.level(row), process.covariance), data[seen.get(row, 0) :][: len(x)]
        wanted = wiener.residual(x, x0)
        found = wanted + normal(*x.shape, seed=9000 + 2 * seen.get(row, 0) + row)
        seen[row] = seen.get(row, 0) + len(x)
        values.setdefault(row, []).append(torch.cat([found, wanted], 1)[..., 0])
        return x0 + wiener.spread * (found - wanted)

    values = {}
    denoiser = nidiff.Denoiser(net, process, "x0", gaussian=model)
    kappa = nidiff.design.measure_kappa(denoiser, data, num_images=count).kappa
    for row in (0, 1):
        found, wanted = torch.cat(values[row]).T
        error, power = found * (found - wanted), found.square().mean()
        excess = error.mean() - 2 * error.std(correction=0) / count**0.5
        beta = 1 - (excess / power).clamp(min=0).item()
        assert kappa.trust[row].item() == pytest.approx(beta, abs=1e-5)
        assert kappa.values[row].item() == pytest.approx(min(1.0, beta**2 * power.item()), abs=1e-5)
        assert abs(beta - 0.5) < 0.1 if count > 1000 else beta > 0.55


def test_an_error_of_the_network_is_not_trusted():
    """F = F* + noise of the same size: β = E[F F*]/E F² = ½."""
    model = MODELS["shared"]()
    data = model.sample((512, *model.shape), torch.Generator().manual_seed(0), dtype=torch.float64)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(100), model.power(0.5))
    exact = model.denoiser(process)
    noise = normal(512, *model.shape, seed=7)

    def net(x, label, seen=[0]):  # noqa: B006  (which part of the data comes next)
        part = slice(seen[0] % 512, seen[0] % 512 + len(x))
        seen[0] += len(x)
        level = process.schedule.level(int(label[0]))
        wiener = model.at(level, process.covariance)
        wrong = wiener.residual(x, data[part]) + noise[part]
        return exact(x, level) + wiener.spread * wrong

    kappa = nidiff.design.measure_kappa(nidiff.Denoiser(net, process, "x0", gaussian=model), data, num_rows=3).kappa
    assert kappa is not None
    assert (kappa.trust.mean() - 0.5).abs() < 0.1
    assert (kappa.values.mean() - 0.5).abs() < 0.1  # β² E F² = ¼ · 2
