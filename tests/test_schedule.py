"""Schedules are the isotropic ones, in float64, and every column follows from log-SNR."""

import json
import math
import pickle

import pytest
import torch
from problems import refused

import nidiff
from nidiff.diffusion.schedule import Schedule
from nidiff.diffusion.schedules import SCHEDULES, as_schedule, table
from nidiff.interop.config import from_diffusers
from nidiff.recipe import remembered

ALL = {
    "ddpm_linear": lambda: nidiff.schedules.ddpm_linear(1000),
    "ddpm_cosine": lambda: nidiff.schedules.ddpm_cosine(1000),
    "smld_geometric": lambda: nidiff.schedules.smld_geometric(232, 50.0, 0.01),
    "vp": lambda: nidiff.schedules.vp(500),
    "ve": lambda: nidiff.schedules.ve(300),
    "scaled_linear": lambda: nidiff.schedules.scaled_linear(1000),
    "from_betas": lambda: nidiff.schedules.from_betas([0.02 * 1.3**i for i in range(13)]),
    "from_alphas_cumprod": lambda: nidiff.schedules.from_alphas_cumprod(torch.linspace(0.99, 0.01, 12)),
    "table": lambda: table(range(6, -6, -1), "signal"),
    "equal_snr": lambda: nidiff.schedules.equal_snr(0.3, 500),
    "designed": lambda: nidiff.schedules.designed(1e-3, num_levels=50),
    "flow": lambda: nidiff.schedules.flow(100, time_shift=3.0),
}
PER_MODE = {"heat", "blurring", "soft_conditioning", "blue", "offset_ramp"}  # tests/test_per_mode.py
every_schedule = pytest.mark.parametrize("make", ALL.values(), ids=ALL.keys())


def test_the_list_of_cases_is_the_registry():
    assert ALL.keys() | PER_MODE == SCHEDULES.keys()


@every_schedule
def test_columns_are_float64_from_least_to_most_noise(make):
    schedule = make()
    assert schedule.signal.dtype == schedule.sigma.dtype == torch.float64
    assert (schedule.sigma.diff() > 0).all()
    assert (schedule.signal.diff() <= 0).all()
    assert torch.allclose((schedule.signal / schedule.sigma).log() * 2, schedule.logsnr, rtol=1e-12, atol=1e-12)


@every_schedule
def test_a_shift_moves_log_snr_by_that_constant_and_keeps_the_rule(make):
    schedule, moved = make(), make().shifted(1.5)
    before, after = (2 * (s.signal / s.sigma).log() for s in (schedule, moved))
    assert torch.allclose(after - before, torch.full_like(before, 1.5), rtol=1e-10)
    assert torch.allclose(moved.logsnr_at(schedule.time), schedule.logsnr_at(schedule.time) + 1.5, rtol=1e-10)
    for each in (schedule, moved):
        level = each.level(torch.tensor([0.0, 3.25, 10.5]))  # between rows, too
        kept = {"signal": level.signal, "variance": level.signal**2 + level.sigma**2, "sum": level.signal + level.sigma}
        assert torch.allclose(kept[each.keeps].values, torch.ones(3, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nidiff.schedules.ddpm_linear, {"beta_schedule": "linear"}),
        (nidiff.schedules.ddpm_cosine, {"beta_schedule": "squaredcos_cap_v2"}),
    ],
)
def test_ddpm_tables_are_those_of_diffusers(ours, theirs):
    from diffusers import DDPMScheduler

    peer = DDPMScheduler(num_train_timesteps=1000, **theirs).alphas_cumprod.double()  # float32 inside
    schedule = ours(1000)
    assert torch.allclose(schedule.signal.square(), peer, rtol=1e-3, atol=1e-7)
    assert torch.allclose(schedule.sigma.square(), 1 - peer, rtol=1e-3, atol=1e-7)


def test_ddpm_is_the_product_of_the_forward_steps():
    """ᾱ_t = ∏ (1 − β_s), so that x_t = √(1−β_t) x_{t−1} + √β_t Σ^½ z composes to the table."""
    cosine = torch.cos((torch.arange(51, dtype=torch.float64) / 50 + 0.008) / 1.008 * math.pi / 2).square()
    for schedule, betas in (
        (nidiff.schedules.ddpm_linear(50, 1e-3, 0.3), torch.linspace(1e-3, 0.3, 50, dtype=torch.float64)),
        (nidiff.schedules.ddpm_cosine(50), (1 - cosine[1:] / cosine[:-1]).clamp(max=0.999)),
    ):
        signal, variance = 1.0, 0.0
        for row, beta in enumerate(betas.tolist()):
            signal, variance = signal * math.sqrt(1 - beta), variance * (1 - beta) + beta
            assert schedule.signal[row].item() == pytest.approx(signal, rel=1e-10)
            assert schedule.sigma[row].item() == pytest.approx(math.sqrt(variance), rel=1e-10)


def test_smld_scales_are_geometric_and_end_where_asked():
    sigma = nidiff.schedules.smld_geometric(207, 20.0, 0.01).sigma
    assert sigma[[0, -1]].tolist() == pytest.approx([0.01, 20.0], rel=1e-12)
    ratio = sigma[1:] / sigma[:-1]
    assert torch.allclose(ratio, ratio[0].expand(206), rtol=1e-10)


def test_vp_is_the_integral_of_beta():
    """ᾱ(t) = exp(−∫β), ∫β = t β_min + t²/2 (β_max − β_min) (appendix A, linear β)."""
    schedule = nidiff.schedules.vp(100, beta_min=0.1, beta_max=20.0)
    time = schedule.time
    integral = time * 0.1 + time**2 / 2 * 19.9
    assert torch.allclose(schedule.signal, torch.exp(-integral / 2), rtol=1e-12)
    assert torch.allclose(schedule.sigma.square(), -torch.expm1(-integral), rtol=1e-10)


@every_schedule
def test_levels_are_exact_at_rows_and_the_two_ways_to_ask_agree_between(make):
    schedule = make()
    level = schedule.level(7)
    assert (float(level.signal), float(level.sigma)) == (schedule.signal[7].item(), schedule.sigma[7].item())
    between = schedule.level(7.25)
    assert schedule.sigma[7] < float(between.sigma) < schedule.sigma[8]
    again = schedule.level_at(2 * math.log(float(between.signal / between.sigma)))
    assert again.label == pytest.approx(7.25, abs=1e-9)
    assert float(again.sigma) == pytest.approx(float(between.sigma), rel=1e-9)


def test_draws_are_uniform_over_the_rows_and_per_image():
    schedule = nidiff.schedules.ddpm_linear(8)
    labels = schedule.draw(8000, torch.Generator().manual_seed(0)).label
    counts = torch.bincount(labels, minlength=8)
    assert counts.shape == (8,)
    assert (counts / 1000 - 1).abs().max() < 0.15
    own = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    first = schedule.draw(2, own).label
    assert first[1] == schedule.draw(1, [torch.Generator().manual_seed(4)]).label[0]


def same(a: Schedule, b: Schedule) -> bool:
    time = torch.linspace(0.2, 1.0, 7, dtype=torch.float64)
    return torch.equal(a.logsnr, b.logsnr) and a.keeps == b.keeps and torch.equal(a.logsnr_at(time), b.logsnr_at(time))


@every_schedule
def test_a_schedule_is_rebuilt_from_its_configuration_and_from_a_pickle(make):
    for schedule in (make(), make().shifted(0.7).shifted(-0.2), Schedule(make().logsnr, make().keeps)):
        config = json.loads(json.dumps(schedule.to_config()))
        assert same(as_schedule(config), schedule)
        assert same(pickle.loads(pickle.dumps(schedule)), schedule)
    assert not same(make(), make().shifted(1e-6))


def test_a_schedule_is_written_in_one_line():
    assert same(
        as_schedule("vp:num_levels=50,beta_max=10,shift=0.5"), nidiff.schedules.vp(50, beta_max=10).shifted(0.5)
    )
    assert repr(nidiff.schedules.from_betas([0.1, 0.2]).shifted(1.0)) == "from_betas(betas=<2 numbers>, shift=1.0)"
    assert as_schedule(kept := nidiff.schedules.ve(5)) is kept


def test_a_schedule_registered_at_run_time_is_written_saved_and_read(monkeypatch):
    @remembered
    def steps(num_levels: int = 4, top: float = 3.0) -> Schedule:
        return Schedule(torch.linspace(top, -top, num_levels, dtype=torch.float64))

    with pytest.raises(nidiff.InputError, match="schedule='steps'"):
        as_schedule("steps:num_levels=6")
    monkeypatch.setitem(SCHEDULES, "steps", steps)
    schedule = as_schedule("steps:num_levels=6,top=2")
    assert schedule.to_config() == {"schedule": "steps", "num_levels": 6, "top": 2}
    assert same(as_schedule(schedule.to_config()), schedule)


DIFFUSERS = {
    "linear": {},
    "stable diffusion": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "cosine": {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 500},
    "betas": {"trained_betas": [0.1, 0.2, 0.3, 0.5]},
}


@pytest.mark.parametrize("config", DIFFUSERS.values(), ids=DIFFUSERS.keys())
def test_the_schedule_of_a_diffusers_scheduler_is_its_table(config):
    from diffusers import DDPMScheduler

    peer = DDPMScheduler(**config)
    for schedule in (from_diffusers(peer), from_diffusers(peer.config)):
        assert torch.allclose(schedule.signal.square().float(), peer.alphas_cumprod, rtol=1e-3, atol=1e-7)
    exact = nidiff.schedules.from_alphas_cumprod(peer.alphas_cumprod.double())
    assert torch.allclose(exact.signal.square(), peer.alphas_cumprod.double(), rtol=1e-12)


BAD = [
    ("num_levels", lambda: nidiff.schedules.ddpm_linear(0)),
    ("beta_min", lambda: nidiff.schedules.ddpm_linear(10, 0.1, 1.5)),
    ("sigma_min", lambda: nidiff.schedules.smld_geometric(10, 0.01, 50.0)),
    ("offset", lambda: nidiff.schedules.ddpm_cosine(10, offset=-1.0)),
    ("time_min", lambda: nidiff.schedules.vp(10, time_min=1.0)),
    ("logsnr", lambda: Schedule(torch.tensor([0.0, 1.0]))),
    ("logsnr", lambda: Schedule([1.0, -4000.0])),
    ("time", lambda: Schedule([1.0, 0.0], time=[0.5, 0.1])),
    ("keeps", lambda: Schedule(torch.tensor([0.0]), "energy")),
    ("label", lambda: nidiff.schedules.ddpm_linear(10).level(10)),
    ("logsnr", lambda: nidiff.schedules.ddpm_linear(10).level_at(2000.0)),
    ("amount", lambda: nidiff.schedules.ddpm_linear(10).shifted(float("nan"))),
    ("shift", lambda: as_schedule("ve:shift=much")),
    ("schedule", lambda: as_schedule("linear")),
    ("schedule", lambda: as_schedule("ve:gamma=2")),
    ("schedule", lambda: as_schedule(1000)),
    ("betas", lambda: nidiff.schedules.from_betas([0.1, 1.0])),
    ("beta_schedule", lambda: from_diffusers({"beta_schedule": "sigmoid"})),
]


def test_bad_input_is_named():
    for argument, call in BAD:
        with refused(argument):
            call()
