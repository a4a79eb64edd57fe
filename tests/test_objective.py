"""The loss is the paper's, and means the same whatever the network predicts."""

import pytest
import torch
from problems import Unconditional, refused

import nidiff
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.target import TARGETS
from nidiff.testing.problems import Gaussian, normal, smooth_net

COV = nidiff.gaussian_free_field((4, 5))
SCHEDULE = nidiff.schedules.ddpm_linear(100)
PROCESS = nidiff.Process(SCHEDULE, COV)
SMLD = nidiff.schedules.smld_geometric(100, 20.0, 0.05)
PROCESSES = {
    "ddpm": nidiff.Process(SCHEDULE, nidiff.Identity((4, 5))),
    "ni-ddpm": PROCESS,
    "smld": nidiff.Process(SMLD, nidiff.Identity((4, 5))),
    "ni-smld": nidiff.Process(SMLD, COV),
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())


@every_process
def test_it_is_the_squared_error_of_white_eps(process):
    """Eq. 4, 16: ‖eps − eps_θ(signal x0 + sigma Σ^½ eps, t)‖², one value per image (a mean over its entries)."""
    net, x0, schedule = smooth_net((4, 5)), normal(6, 4, 5), process.schedule
    loss = nidiff.denoising_loss(nidiff.Denoiser(net, process), x0, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(100, (6,), generator=g)
    eps = torch.randn(6, 4, 5, generator=g, dtype=torch.float64)
    x = schedule.signal[rows, None, None] * x0 + schedule.sigma[rows, None, None] * process.covariance.sqrt(eps)
    assert loss.shape == (6,)
    assert torch.allclose(loss, (eps - net(x, rows)).square().mean((1, 2)), rtol=1e-12)


@pytest.mark.parametrize("name", ["smld", "ni-smld"])
def test_an_unconditional_network_has_both_forms_of_the_eps_loss(name):
    """Eq. 88, 100: ‖eps − ε(x)‖² with x from its law and eps = Σ^-½ (x − x0)/σ, or with x = x0 + σ Σ^½ eps."""
    process, net = PROCESSES[name], smooth_net((4, 5))
    denoiser = nidiff.Denoiser(Unconditional(lambda x: net(x, torch.zeros(len(x)))), process)
    x0, eps, level = normal(3, 4, 5), normal(3, 4, 5, seed=1), SMLD.level(torch.tensor([1, 50, 99]))
    sigma, root = level.sigma.values[:, None, None], torch.linalg.cholesky(process.covariance.dense())
    x = x0 + sigma * (normal(3, 20, seed=2) @ root.T).reshape(3, 4, 5)  # a draw by other means

    def loss(eps):
        return nidiff.denoising_loss(denoiser, x0, level=level, eps=eps)

    def error(eps, x):
        return (eps - net(x, torch.zeros(3))).square().mean((1, 2))

    behind = process.covariance.inv_sqrt(x - x0) / sigma
    assert torch.allclose(loss(behind), error(behind, x), rtol=1e-8)
    assert torch.allclose(loss(eps), error(eps, x0 + sigma * process.covariance.sqrt(eps)), rtol=1e-12)
    assert not torch.allclose(loss(eps), error(eps, x0 + sigma * COV.matmul(eps)), rtol=1e-2)  # a wrong root


@every_process
def test_the_score_loss_at_one_level_has_both_forms(process):
    """Eq. 12 (E11), 31, 50, 84, 95, 96: ‖s_θ(x) − ∇ log q(x | x0)‖² = ‖s_θ(x) + Σ^-½ eps / sigma‖²."""
    cov, level = process.covariance, process.schedule.level(torch.tensor([1, 50, 99]))
    net, x0, eps = smooth_net((4, 5)), normal(3, 4, 5), normal(3, 4, 5, seed=1)
    signal, sigma = (c.values[:, None, None] for c in (level.signal, level.sigma))
    loss = nidiff.denoising_loss(
        nidiff.Denoiser(net, process, target="score"), x0, weighting="target", level=level, eps=eps
    )
    x = (signal * x0 + sigma * cov.sqrt(eps)).requires_grad_()
    law = torch.distributions.MultivariateNormal((signal * x0).flatten(1), sigma**2 * cov.dense())
    (score,) = torch.autograd.grad(law.log_prob(x.flatten(1)).sum(), x)
    x = x.detach()
    assert torch.allclose(loss, (net(x, level.label) - score).square().mean((1, 2)), rtol=1e-8)
    assert torch.allclose(loss, (net(x, level.label) + cov.inv_sqrt(eps) / sigma).square().mean((1, 2)), rtol=1e-8)
    if cov is COV:  # eq. 12 as printed: a network that sees white noise
        printed = net(signal * x0 + sigma * eps, level.label) + cov.inv_sqrt(eps) / sigma
        assert not torch.allclose(loss, printed.square().mean((1, 2)), rtol=1e-3)


def test_levels_are_drawn_so_that_the_mean_is_the_sum_over_levels():
    """Eq. 32: E = 1/L Σ_t ℓ_t. A network whose error at level t is t + 1, so that a loss tells the level it is from."""
    schedule = nidiff.schedules.ddpm_linear(8)

    def net(x, label):
        return COV.inv_sqrt(x) / schedule.sigma[label][:, None, None] + 1 + label[:, None, None]

    denoiser, x0 = nidiff.Denoiser(net, nidiff.Process(schedule, COV)), torch.zeros(8000, 4, 5, dtype=torch.float64)
    loss = nidiff.denoising_loss(denoiser, x0, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount((loss.sqrt() - 1).round().long(), minlength=8)
    assert counts.shape == (8,)
    assert (counts / 1000 - 1).abs().max() < 0.15
    at = [nidiff.denoising_loss(denoiser, x0[:1], level=schedule.level(row)).item() for row in range(8)]
    assert at == pytest.approx([(row + 1) ** 2 for row in range(8)])
    assert loss.mean().item() == pytest.approx(sum(at) / 8, rel=0.05)


@every_process
@pytest.mark.parametrize("weighting", ["eps", "score", "noise"])
def test_a_weighting_is_the_score_error_with_lambda_inside_the_norm(process, weighting):
    """E13: ‖Λ^½ (s_θ − s)‖² with Λ = sigma² Σ (the paper's), sigma² I (its variant b), sigma² Σ² (c)."""
    power = {"eps": 0.5, "score": 0.0, "noise": 1.0}[weighting]
    denoiser, cov = nidiff.Denoiser(smooth_net((4, 5)), process), process.covariance
    x0, eps, level = normal(3, 4, 5), normal(3, 4, 5, seed=1), process.schedule.level(torch.tensor([1, 50, 99]))
    sigma, x = level.sigma.values[:, None, None], process.perturb(x0, level, eps)
    error = denoiser.score(x, level) - process.conditional_score(x, x0, level)
    expected = cov.power(sigma * error, power).square().mean((1, 2))
    loss = nidiff.denoising_loss(denoiser, x0, weighting=weighting, level=level, eps=eps)
    assert torch.allclose(loss, expected, rtol=1e-8)
    if weighting == "eps":  # the second line of eq. 34, 52, 86, 98
        inside = sigma * cov.sqrt(denoiser.score(x, level)) + eps
        assert torch.allclose(loss, inside.square().mean((1, 2)), rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "residual"])
def test_the_loss_does_not_depend_on_what_the_network_predicts(name):
    """Networks that say the same x̂0 in the terms of different targets have the same loss."""
    net = smooth_net((4, 5))
    reference = nidiff.Denoiser(net, PROCESS, target="x0")
    x0, eps, level = normal(3, 4, 5), normal(3, 4, 5, seed=1), SCHEDULE.level(torch.tensor([1, 50, 99]))
    translated = nidiff.Denoiser(lambda x, label: TARGETS[name].invert(net(x, label), x, level, COV), PROCESS, name)
    for weighting in ("eps", "score", "noise", "v"):
        options = {"weighting": weighting, "level": level, "eps": eps}
        ours, other = (nidiff.denoising_loss(denoiser, x0, **options) for denoiser in (translated, reference))
        assert torch.allclose(ours, other, rtol=1e-6)


def test_the_plain_error_of_the_target_is_available_and_differs():
    denoiser = nidiff.Denoiser(smooth_net((4, 5)), PROCESS, target="v")
    x0, eps, level = normal(3, 4, 5), normal(3, 4, 5, seed=1), SCHEDULE.level(torch.tensor([1, 50, 99]))
    x = PROCESS.perturb(x0, level, eps)
    v = level.signal.values[:, None, None] * COV.sqrt(eps) - level.sigma.values[:, None, None] * x0
    plain = nidiff.denoising_loss(denoiser, x0, weighting="target", level=level, eps=eps)
    assert torch.allclose(plain, (denoiser.output(x, level) - v).square().mean((1, 2)), rtol=1e-10)
    assert not torch.allclose(plain, nidiff.denoising_loss(denoiser, x0, level=level, eps=eps), rtol=0.1)
    assert torch.allclose(plain, nidiff.denoising_loss(denoiser, x0, weighting="v", level=level, eps=eps), rtol=1e-10)


def test_the_exact_denoiser_minimises_every_weighting():
    """Paired draws: any perturbation of the exact network has a larger mean loss (all weightings share the optimum)."""
    problem, count = Gaussian(COV), 5000
    exact = problem.denoiser(PROCESS)
    x0 = (problem.mean + normal(count, 20) @ torch.linalg.cholesky(problem.matrix).T).reshape(-1, 4, 5)
    shift, given = 0.2 * normal(4, 5, seed=9), {"level": SCHEDULE.level(40), "eps": normal(count, 4, 5, seed=7)}
    perturbed = nidiff.Denoiser(lambda x, label: exact.net(x, label) + shift, PROCESS, target="x0")
    for weighting in WEIGHTINGS:
        best, worse = (nidiff.denoising_loss(d, x0, weighting=weighting, **given).mean() for d in (exact, perturbed))
        assert worse > best * 1.005


def test_training_learns_the_exact_denoiser():
    """Least squares over a linear network at one level finds Tweedie's gain: the loss is minimised by E[x0 | x]."""
    cov = nidiff.gaussian_free_field((2, 2))
    problem = Gaussian(cov, mean_scale=0.0)
    process = nidiff.Process(SCHEDULE, cov)
    level = SCHEDULE.level(40)
    x0 = (normal(20000, 4) @ torch.linalg.cholesky(problem.matrix).T).reshape(-1, 2, 2)
    gain = torch.zeros(4, 4, dtype=torch.float64, requires_grad=True)
    denoiser = nidiff.Denoiser(lambda x, label: (x.flatten(1) @ gain).reshape(x.shape), process)
    optimizer = torch.optim.LBFGS([gain], max_iter=50)
    eps = normal(20000, 2, 2, seed=3)

    def closure():
        optimizer.zero_grad()
        loss = nidiff.denoising_loss(denoiser, x0, level=level, eps=eps).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    probe = normal(5, 2, 2, seed=4)
    assert torch.allclose(denoiser(probe, level), problem.denoise(probe, level), atol=0.06)


def test_float32_training_under_autocast_has_a_finite_loss_and_gradient():
    layer = torch.nn.Linear(20, 20)
    denoiser = nidiff.Denoiser(lambda x, label: layer(x.flatten(1)).reshape(x.shape), PROCESS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nidiff.denoising_loss(denoiser, torch.randn(3, 4, 5), generator=torch.Generator().manual_seed(0))
    loss.mean().backward()
    assert torch.isfinite(loss).all()
    assert layer.weight.grad.abs().sum() > 0


def test_bad_input_is_named():
    denoiser, x0 = nidiff.Denoiser(smooth_net((4, 5)), PROCESS), normal(2, 4, 5)
    for argument, call in (
        ("x0", lambda: nidiff.denoising_loss(denoiser, normal(4, 5))),
        ("x0", lambda: nidiff.denoising_loss(denoiser, torch.zeros(2, 4, 5, dtype=torch.uint8))),
        ("net", lambda: nidiff.denoising_loss(nidiff.Denoiser(lambda x, label: x[..., :1], PROCESS), x0)),
        ("net", lambda: nidiff.denoising_loss(nidiff.Denoiser(lambda x, label: (x, x), PROCESS), x0)),
        ("weighting", lambda: nidiff.denoising_loss(denoiser, x0, weighting="snr")),
    ):
        with refused(argument):
            call()


def test_only_the_plain_denoiser_is_trained():
    """Guidance and observations change x̂0 but not the output of the network, which the loss is of."""
    plain = nidiff.Denoiser(smooth_net((4, 5)), PROCESS)
    observed = nidiff.posterior(plain, nidiff.Observation.missing(normal(1, 4, 5), 0.0), method="replacement")
    with refused("denoiser"):
        nidiff.denoising_loss(observed, normal(1, 4, 5))
    assert nidiff.denoising_loss(plain, normal(1, 4, 5)).isfinite().all()
