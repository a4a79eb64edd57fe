"""A mixture is its dense formula under any Σ, its denoiser is exact, and a start from it loses what was measured."""

import math

import pytest
import torch
from problems import refused
from torch.distributions import MultivariateNormal

import nidiff
from nidiff.design import MixtureModel
from nidiff.diffusion.condition import CLASSES
from nidiff.interop import NonIsotropicScheduler
from nidiff.model.config import scheduler_config
from nidiff.sampling.warm import start_loss, start_row, warm_text
from nidiff.testing.problems import normal
from nidiff.training.identity import process_digest

ITEM = (2, 4, 3)
SIZE = math.prod(ITEM)
COV = nidiff.gaussian_free_field(ITEM[1:], 0.7)
PROCESS = nidiff.Process(nidiff.schedules.ddpm_linear(100, 1e-3, 0.2), COV)
PER_MODE = nidiff.Process(nidiff.Schedule(torch.linspace(6, -7, 100)[:, None, None] - COV.eigenvalues.log()), COV)


def made(rank=5, classes=(0, 1)):
    """Two components whose covariances commute neither with Σ nor with each other."""
    modes = nidiff.fit_gaussian(normal(50, *ITEM), basis=COV).covariance
    scales = 0.3 * (1 + torch.arange(2)[:, None]) + 0.2 * COV.eigenvalues.flatten() / COV.eigenvalues.max()
    covariances = [modes.with_eigenvalues(each.repeat(2)) for each in scales]
    return MixtureModel([0.3, 0.7], 2 * normal(2, *ITEM, seed=1), covariances, 0.4 * normal(2, rank, *ITEM), classes)


def dense(model, k):
    factor = model.factors[k].flatten(1).double()
    diagonal = nidiff.Covariance(model.variances[k], model.basis).dense()
    return diagonal + factor.T @ factor


def operator(modes):
    """A level's coefficient as a matrix over an item."""
    return (modes * torch.eye(SIZE, dtype=torch.float64).reshape(SIZE, *ITEM)).reshape(SIZE, SIZE)


@pytest.mark.parametrize("process", [PROCESS, PER_MODE], ids=["levels", "levels per mode"])
@pytest.mark.parametrize("rank", [0, 5, 40])
def test_density_and_denoiser_are_the_dense_formulas(process, rank):
    """Woodbury against the matrices themselves; the score of the density is that of the denoiser (Tweedie)."""
    model, x = made(rank), normal(7, *ITEM, seed=3).requires_grad_()
    for row in (0, 40, 99):
        level = process.schedule.level(row)
        signal, noise = operator(level.signal), operator(level.sigma**2 * COV)
        logs, means = [], []
        for k in range(2):
            total = signal @ dense(model, k) @ signal + noise
            centre = model.means[k].double().flatten()
            u = x.flatten(1) - signal @ centre
            logs.append(model.weights[k].log() + MultivariateNormal(torch.zeros(SIZE).double(), total).log_prob(u))
            means.append(centre + u @ torch.linalg.solve(total, signal @ dense(model, k)))
        logs = torch.stack(logs, 1)
        expected = (logs.softmax(1)[..., None] * torch.stack(means, 1)).sum(1)
        marginal, denoiser = model.at(level, COV), model.denoiser(process)
        assert torch.allclose(marginal.log_prob(x), logs.logsumexp(1), rtol=1e-9)
        assert torch.allclose(denoiser(x.detach(), level).flatten(1), expected, rtol=1e-7, atol=1e-9)
        score = torch.autograd.grad(marginal.log_prob(x).sum(), x)[0]
        assert torch.allclose(denoiser.score(x.detach(), level), score, rtol=1e-6, atol=1e-6)
        white = model.at(level, nidiff.Identity(ITEM[1:]))
        assert not torch.allclose(white.log_prob(x), logs.logsumexp(1), rtol=1e-7)


def test_whitened_it_is_the_isotropic_mixture():
    """y = Σ^-½ x of the mixture under Σ is that of whitened data under white noise."""
    model, x, level = made(), normal(5, *ITEM), PROCESS.schedule.level(30)
    noise = COV.eigenvalues.repeat(2, 1).reshape(ITEM)
    white = MixtureModel(
        model.weights,
        COV.inv_sqrt(model.means),
        [nidiff.Covariance(each / noise, model.basis) for each in model.variances.double()],
        COV.inv_sqrt(model.factors),
    )
    ours = COV.inv_sqrt(model.at(level, COV).expected(x))
    theirs = white.at(level, nidiff.Identity(ITEM[1:])).expected(COV.inv_sqrt(x))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, theirs.roll(1, 0), atol=1e-2)


def test_draws_have_the_law_and_an_image_depends_on_its_seed_alone():
    model = made()
    x = model.sample((20_000, *ITEM), 0).flatten(1).double()
    mean = (model.weights[:, None] * model.means.flatten(1)).sum(0)
    spread = sum(
        weight * (dense(model, k) + (model.means[k].flatten() - mean).double().outer(model.means[k].flatten() - mean))
        for k, weight in enumerate(model.weights)
    )
    assert (x.mean(0) - mean).abs().max() < 0.08
    assert (x.T.cov() - spread).norm() < 0.03 * spread.norm()
    for label in (0, 1):
        of_class = model.sample((20_000, *ITEM), 0, classes=torch.tensor([label])).flatten(1).double()
        assert (of_class.T.cov() - dense(model, label)).norm() < 0.05 * dense(model, label).norm()
        assert (of_class.T.cov() - dense(model, 1 - label)).norm() > 0.2 * dense(model, label).norm()
    null = model.sample((20, *ITEM), 0, classes=torch.tensor([7]))
    assert torch.equal(null, model.sample((20, *ITEM), 0))
    many, few = model.sample((5, *ITEM), [1, 2, 3, 4, 5]), model.sample((2, *ITEM), [4, 2])
    assert torch.equal(many[[3, 1]], few)


def test_mean_density_of_draws_is_the_entropy_of_one_component():
    one = MixtureModel([2.0], torch.zeros(1, *ITEM), [nidiff.Covariance(torch.ones(ITEM), made().basis)])
    x = one.sample((500, *ITEM), 0)
    assert torch.allclose(one.log_prob(x), one.at().log_prob(x))
    expected = -0.5 * (x.double().square().flatten(1).sum(1) + SIZE * math.log(2 * math.pi))
    assert torch.allclose(one.log_prob(x), expected)
    bits = one.bits_per_dim(x, bin_width=0.1)
    assert torch.allclose(bits, -(expected / SIZE + math.log(0.1)) / math.log(2))


# Fitting --------------------------------------------------------------------------------------------------------------

MIXING = normal(SIZE, SIZE, seed=5) / 3
X = normal(400, *ITEM)
X[:200] = (X[:200].flatten(1) @ MIXING).reshape(-1, *ITEM) + 5
LABELS = torch.arange(400) // 200


def test_all_directions_are_the_sample_covariance_and_every_rank_keeps_its_spectrum():
    data, share = X[:200].flatten(1), 0.1
    sample = data.T.cov(correction=0)
    for rank in (None, 0, 4, 30):
        model = nidiff.fit_mixture(X, LABELS, rank=rank, shrinkage=share)
        assert model.rank == min(SIZE if rank is None else rank, SIZE)
        fitted = dense(model, 0)
        vectors = model.basis.synthesise(torch.eye(SIZE, dtype=torch.float64).reshape(SIZE, *ITEM)).flatten(1)
        spectrum = [model.basis.evened((vectors @ each @ vectors.T).diag().reshape(ITEM)) for each in (fitted, sample)]
        smooth = nidiff.fit_gaussian(X[:200], shrinkage=share).covariance.eigenvalues
        assert torch.allclose(spectrum[0], smooth, rtol=1e-4)
        assert not torch.allclose(spectrum[1], spectrum[1].flip(-1), rtol=0.1)
        off = ((fitted - sample) - torch.diag((fitted - sample).diag())).norm() / sample.norm()
        assert off < 0.15 if model.rank == SIZE else off > 0.15
    assert torch.allclose(model.means[0], X[:200].mean(0).float(), atol=1e-5)
    assert model.classes.tolist() == [0, 1]


def test_few_leading_directions_are_nearly_those_of_the_eigenvectors():
    """By random probes, without the matrix: of a steep spectrum in 200 dimensions."""
    steep = torch.arange(1, 201, dtype=torch.float64) ** -1.5
    data = (normal(3000, 200) * steep) @ torch.linalg.qr(normal(200, 200, seed=2))[0]
    values = torch.linalg.eigvalsh(data.T.cov(correction=0)).flip(0)
    model = nidiff.fit_mixture(data, rank=10, shrinkage=0.0)
    found = model.factors[0].double()
    assert torch.allclose((found @ found.T).diag().sort(descending=True).values[:5], values[:5], rtol=0.02)


def test_batches_and_pairs_are_the_same_data_and_clusters_are_found():
    whole = nidiff.fit_mixture(X, LABELS)
    batches = [(X[i : i + 90], LABELS[i : i + 90]) for i in range(0, 400, 90)]
    for again in (
        nidiff.fit_mixture(batches),
        nidiff.fit_mixture(iter(batches)),
        nidiff.fit_mixture(iter([each for each, _ in batches]), LABELS),
        nidiff.fit_mixture(X.numpy(), LABELS.tolist()),
    ):
        assert torch.allclose(again.log_prob(X), whole.log_prob(X), rtol=1e-4)
    alone = nidiff.fit_mixture(X)
    assert (len(alone), alone.classes) == (1, None)
    clusters = nidiff.fit_mixture([each for each, _ in batches], components=2)
    assert clusters.weights.tolist() == pytest.approx([0.5, 0.5])
    assert clusters.log_prob(X).mean() > alone.log_prob(X).mean() + 1
    assert torch.equal(clusters.means, nidiff.fit_mixture(X, components=2).means)
    assert nidiff.fit_mixture(X, LABELS, 2).classes.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("components", lambda: nidiff.fit_mixture(X, components=300)),
        ("components", lambda: nidiff.fit_mixture(X[:210], LABELS[:210], 6)),
        ("components", lambda: nidiff.fit_mixture(X, components=0)),
        ("data", lambda: nidiff.fit_mixture(X[:201], LABELS[:201])),  # a class of one item
        ("data", lambda: nidiff.fit_mixture(X[:1].repeat(9, 1, 1, 1))),
        ("data", lambda: nidiff.fit_mixture(iter([X]), components=2)),
        ("data", lambda: nidiff.fit_mixture([])),
        ("data", lambda: nidiff.fit_mixture(X * math.nan)),
        ("data", lambda: nidiff.fit_mixture([X, X[:, :1]])),
        ("labels", lambda: nidiff.fit_mixture(X, LABELS[:-1])),
        ("labels", lambda: nidiff.fit_mixture(X[:-1], LABELS)),
        ("labels", lambda: nidiff.fit_mixture(X, LABELS - 1)),
        ("labels", lambda: nidiff.fit_mixture(X, LABELS.float())),
        ("labels", lambda: nidiff.fit_mixture(X, LABELS[:, None])),
        ("labels", lambda: nidiff.fit_mixture([(X, LABELS[:5])])),
        ("shrinkage", lambda: nidiff.fit_mixture(X, shrinkage=2)),
        ("rank", lambda: nidiff.fit_mixture(X, rank=-1)),
        ("basis", lambda: nidiff.fit_mixture(X, basis=nidiff.Identity((5, 5)))),
        ("covariance", lambda: MixtureModel([1.0], X[:1], [nidiff.gaussian_free_field(ITEM[1:], zero_mode="zero")])),
        ("covariances", lambda: MixtureModel([1.0, 1.0], X[:2], [COV])),
        ("weights", lambda: MixtureModel([1.0, -1.0], X[:2], [COV, COV])),
        ("factors", lambda: MixtureModel([1.0], X[:1], [COV], X[:1])),
        ("classes", lambda: MixtureModel([1.0], X[:1], [COV], classes=[0.5])),
        ("shape", lambda: made().sample((4, 3, 3))),
        ("x", lambda: made().log_prob(X[:, :1])),
        ("mixture", lambda: made().at(PROCESS.schedule.level(3), nidiff.ar1(4, 0.5))),
        ("mixture", lambda: made().at(PROCESS.schedule.level(3), nidiff.Dense(torch.eye(12) + 0.1, ITEM[1:]))),
        (
            "mixture",
            lambda: nidiff.fit_gaussian(X, basis=COV).denoiser(PROCESS).with_mixture(nidiff.fit_mixture(X[:, 0])),
        ),
        ("mixture", lambda: made().denoiser(nidiff.Process(PROCESS.schedule, nidiff.ar1(3, 0.5))).with_mixture(COV)),
        ("mixture", lambda: MixtureModel.from_config({})),
    ],
)
def test_bad_input_is_refused(argument, call):
    with refused(argument):
        call()


# Starts ---------------------------------------------------------------------------------------------------------------


def test_the_measured_losses_are_the_divergences_and_that_of_the_right_mixture_is_none():
    """With the exact denoiser in place of a network, of data that are the mixture: KL(x ‖ Gaussian) by Monte Carlo."""
    model, count = made(), 400
    data = model.sample((count, *ITEM), 1)
    gaussian = nidiff.fit_gaussian(model.sample((20_000, *ITEM), 2), basis=COV, shrinkage=0.0)
    exact = model.denoiser(PROCESS)
    exact = nidiff.Denoiser(exact.net, PROCESS, "x0", gaussian=gaussian, mixture=model)
    measured = nidiff.design.measure_kappa(exact, data, num_images=count, num_rows=34)
    for row in (20, 49, 80):
        level = PROCESS.schedule.level(row)
        x = PROCESS.perturb(data, level, torch.randn(data.shape, generator=torch.Generator().manual_seed(row)))
        state = gaussian.at(level, COV)
        other = state.total.basis.analyse(x.double() - (level.signal * gaussian.mean.expand(x.shape)).double())
        normal_log = -0.5 * (other.square() / state.total.values + (2 * math.pi * state.total.values).log())
        kl = (model.at(level, COV).log_prob(x) - normal_log.flatten(1).sum(1)).mean().item() / SIZE
        assert start_loss(measured, "gaussian", row) == pytest.approx(kl, rel=0.12, abs=2e-3)
        assert start_loss(measured, "mixture", row) < 1e-3
    assert start_loss(measured, "gaussian", 20) > 0.05
    assert start_row(measured, "mixture", 0.01) < start_row(measured, "gaussian", 0.01)
    assert "by measurement" in warm_text(measured, 5, "mixture", 0.01)
    wrong = measured.with_mixture(made(rank=0))  # of which nothing is known: the bound of the Gaussian counts
    assert start_loss(wrong, "mixture", 20) > start_loss(measured, "gaussian", 20)
    worse = nidiff.design.measure_kappa(wrong, data, num_images=100, num_rows=9)
    assert start_loss(worse, "mixture", 0) > 0.02


def moments(x):
    flat = x.flatten(1).double()
    return flat.mean(0), flat.T.cov()


def test_a_start_from_the_mixture_is_exact_at_any_level_and_one_from_the_gaussian_is_not():
    model = made()
    gaussian = nidiff.fit_gaussian(model.sample((5000, *ITEM), 2), basis=COV)
    denoiser = nidiff.Denoiser(model.denoiser(PROCESS).net, PROCESS, "x0", gaussian=gaussian, mixture=model)
    wanted = moments(model.sample((20_000, *ITEM), 3))
    first = (model.means[0] - model.means[1]).double().flatten()

    def share(x):  # of the first component, by the side of the plane between the two
        middle = (model.means[0] + model.means[1]).double().flatten() / 2
        return ((x.flatten(1).double() - middle) @ first > 0).double().mean().item()

    right = share(model.sample((20_000, *ITEM), 3))
    for row in (5, 30):
        how = {"spacing": [row], "denoise": True, "sampler": "dpmpp_2m", "generator": 0}
        x = nidiff.sample(denoiser, (3000, *ITEM), start="mixture", **how)
        assert share(x) == pytest.approx(right, abs=0.03)
        assert (moments(x)[0] - wanted[0]).abs().max() < 0.15
        cold = nidiff.sample(denoiser, (3000, *ITEM), start="gaussian", **how)
        assert abs(share(cold) - right) > 0.05
    by_class = denoiser.given(**{CLASSES: [0] * 50 + [1] * 50})
    x = nidiff.sample(by_class, (100, *ITEM), start="mixture", level=10, num_steps=3, generator=range(100))
    assert share(x[:50]) == 1
    assert share(x[50:]) == 0


def test_a_start_needs_neither_the_basis_of_the_noise_nor_a_gaussian_if_the_level_is_given():
    cov = nidiff.Dense(torch.eye(12) + 0.3, ITEM[1:])
    process = nidiff.Process(PROCESS.schedule, cov)
    denoiser = nidiff.Denoiser(lambda x, label: x, process, "x0", mixture=made())
    visits = []
    how = {"start": "mixture", "num_steps": 1, "generator": 1, "callback": visits.append}
    nidiff.sample(denoiser, (4000, *ITEM), level=50, **how)
    level, total = process.schedule.level(50), torch.kron(torch.eye(2).double(), cov.dense())
    data = moments(made().sample((20_000, *ITEM), 3))[1]
    expected = float(level.signal) ** 2 * data + float(level.sigma) ** 2 * total
    assert (moments(visits[0].x)[1] - expected).norm() < 0.08 * expected.norm()
    assert "not known" in warm_text(denoiser, 3, "mixture", level=50)
    with refused("start"):  # without one nobody knows where to begin
        nidiff.sample(denoiser, (2, *ITEM), start="mixture")


# Stored ---------------------------------------------------------------------------------------------------------------


def test_a_mixture_is_saved_with_the_model_and_is_part_of_what_it_is(tmp_path):
    net = torch.nn.Conv2d(2, 2, 1)
    gaussian = nidiff.fit_gaussian(X, basis=COV)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net

        def forward(self, x, label):
            return self.inner(x)

    plain = nidiff.Denoiser(Net(), PROCESS, "x0", gaussian=gaussian)
    denoiser = nidiff.design.measure_kappa(plain.with_mixture(made()), X.float(), num_images=20, num_rows=3)
    nidiff.save_model(plain, tmp_path / "plain")
    nidiff.save_model(denoiser, tmp_path / "model")
    loaded = nidiff.load_model(tmp_path / "model", Net())
    how = {"start": "mixture", "max_loss": 0.3, "num_steps": 3, "generator": [1, 2]}
    assert torch.equal(nidiff.sample(loaded, (2, *ITEM), **how), nidiff.sample(denoiser, (2, *ITEM), **how))
    assert loaded.mixture.classes.tolist() == [0, 1]
    for start in ("gaussian", "mixture"):
        assert start_row(loaded, start, 0.1) == start_row(denoiser, start, 0.1)
    assert nidiff.load_model(tmp_path / "plain", Net()).mixture is None
    # The scheduler of diffusers keeps it, a run's identity does not count it, and a changed file is noticed.
    scheduler = NonIsotropicScheduler.from_pretrained(tmp_path / "model" / "scheduler")
    scheduler.save_config(tmp_path / "again")
    again = NonIsotropicScheduler.from_pretrained(tmp_path / "again").denoiser(Net())
    assert torch.equal(again.mixture.factors, denoiser.mixture.factors)
    assert process_digest(scheduler_config(denoiser)) == process_digest(scheduler_config(plain))
    assert (tmp_path / "model" / "scheduler" / "mixture.safetensors").is_file()
    assert not (tmp_path / "plain" / "scheduler" / "mixture.safetensors").exists()
    assert denoiser.at((8, 6)).mixture is None
    file = tmp_path / "model" / "scheduler" / "mixture.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    with refused("file"):
        nidiff.load_model(tmp_path / "model", Net())
