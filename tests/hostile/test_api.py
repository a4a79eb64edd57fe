"""Text of the command line and files of strangers at the doors of the core: refused in a sentence, or the result is
right, without NaN; and operators and seeds at random. Any exception but `InputError` fails, and so does a call that
does not end."""

import inspect
import itertools
import math
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CASES
from problems import COVARIANCES, refused
from torch import Tensor

import nidiff
from nidiff.covariance import FAMILIES, FIELDS
from nidiff.covariance.config import as_covariance
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedules import SCHEDULES, as_schedule
from nidiff.diffusion.spacing import SPACINGS
from nidiff.diffusion.target import TARGETS
from nidiff.inverse.posterior import METHODS
from nidiff.randomness import generators_from_seeds
from nidiff.sampling.sampler import SAMPLERS, rehearse
from nidiff.testing.problems import normal, random_matrix

HANG = 60  # seconds after which a call counts as one that does not end

SHAPE = (4, 6)
COV = nidiff.gaussian_free_field(SHAPE)
VP, VE = nidiff.schedules.ddpm_linear(20, beta_max=0.3), nidiff.schedules.smld_geometric(20, 5.0, 0.1)
PROCESS = nidiff.Process(VP, COV)
X = normal(3, 2, *SHAPE).float()


def net(x: Tensor, label: Tensor) -> Tensor:
    return torch.tanh(x)


DENOISER = nidiff.Denoiser(net, PROCESS, "v")


def attempt(function: Callable[..., Any], *arguments: Any) -> str | None:
    """None if the call is right or refused in a sentence; else what is wrong with it."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*arguments)
    except nidiff.InputError as error:
        long = len(str(error)) > 2000 or "\n" in str(error).strip()
        return f"not a sentence: {str(error)[:200]}" if long else None
    except BaseException:
        return traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return f"NaN: {result}"[:300] if isinstance(result, Tensor) and not result.isfinite().all() else None


WORDS = "|0|1|-1|1e308|-1e9|1e-300|nan|inf|-inf|1.0000001|1000000000|no|true|periodic|zero|é|\0|1j|[1]|a=b"
VALUES = WORDS.split("|")


def test_arguments_in_text_are_refused_in_a_sentence(tally):
    rng, failures, tried = random.Random(5), [], 600 * CASES
    samplers = {name: sampler.step for name, sampler in SAMPLERS.items()}
    doors: list[tuple[Callable[..., Any], Any]] = [
        (lambda text: as_covariance(text, SHAPE).sample((2, *SHAPE)), {**FIELDS, **FAMILIES}),
        (as_schedule, SCHEDULES),
        (lambda text: nidiff.sample(DENOISER, (2, *SHAPE), sampler=text, num_steps=3), samplers),
        (
            lambda text: nidiff.posterior(DENOISER, nidiff.Observation(X[:1], nidiff.operators.blur(0.5), 0.1), text),
            METHODS,
        ),
    ]
    for _ in range(tried):
        door, known = rng.choice(doors)
        name = rng.choice([*known])
        keys = [*inspect.signature(known[name]).parameters, "nothing", "shift", "spacing"]
        signs = ["=", "=", "=", "", " = "]
        parts = [f"{rng.choice(keys)}{rng.choice(signs)}{rng.choice(VALUES)}" for _ in range(rng.randrange(4))]
        text = f"{rng.choice([name] * 9 + [name[:-1]])}:{','.join(parts)}"
        if (problem := attempt(door, text)) is not None:
            failures.append(f"{text!r}\n{problem}")
    tally("API: arguments in text", tried, len(failures))
    assert not failures, "\n\n".join(failures[:12])


# Values out of range, which would hang, exhaust the memory or be silently wrong.
KNOWN: dict[str, Callable[[], Any]] = {
    "pyramid that never ends": lambda: nidiff.pyramid((32, 32), ratio=1.0000001, num_levels=10**9),
    "normalize is a word in text": lambda: as_covariance("gff:normalize=no", SHAPE),
    "a trillion pixels": lambda: nidiff.Identity((10**6, 10**6)),
    "a billion levels": lambda: nidiff.schedules.ddpm_linear(10**9),
    "shift infinite": lambda: as_schedule("vp:shift=inf"),
    "shift too far": lambda: VP.shifted(5000.0),
    "tile": lambda: nidiff.sample(DENOISER, (2, *SHAPE), tile=0),
    "one item of data": lambda: nidiff.from_data(torch.ones(1, 1, 4, 4)),
    "data with NaN": lambda: nidiff.from_data(torch.full((3, 1, 4, 4), math.nan)),
    "steps that never end": lambda: nidiff.sample(
        nidiff.Denoiser(net, nidiff.Process(VE, COV)), (1, *SHAPE), sampler="als", steps_per_level=10**12
    ),
    "an empty batch": lambda: nidiff.denoising_loss(DENOISER, X[:0]),
}


def test_known_mistakes_are_refused():
    for call in KNOWN.values():
        with pytest.raises(nidiff.InputError) as refusal:
            call()
        assert "\n" not in str(refusal.value)


# Schedules that cannot be sampled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["vp:beta_max=1000", "ddpm_linear:shift=-300"])
def test_a_schedule_that_ends_in_nan_is_refused_before_the_first_step_and_one_that_works_is_not(schedule):
    process = nidiff.Process(schedule, COV)
    for target in ("eps", "noise", "score"):
        denoiser = nidiff.Denoiser(net, process, target)
        for act in (
            partial(rehearse, denoiser, SHAPE),
            partial(nidiff.sample, denoiser, (1, *SHAPE)),
            partial(nidiff.denoising_loss, denoiser, X),
            partial(nidiff.log_likelihood, denoiser, X),
        ):
            with refused("schedule"):
                act()
    for target in ("x0", "v"):
        denoiser = nidiff.Denoiser(net, process, target)
        rehearse(denoiser, SHAPE)
        assert bool(nidiff.sample(denoiser, (1, *SHAPE), generator=[3]).isfinite().all())
        assert bool(nidiff.denoising_loss(denoiser, X, weighting="target").isfinite().all())
    denoiser = nidiff.Denoiser(net, nidiff.Process("vp:beta_max=200", COV), "eps", clip=1.0)  # float64 can do that
    assert bool(nidiff.sample(denoiser, (1, *SHAPE), dtype=torch.float64).isfinite().all())


@pytest.mark.parametrize("schedule", ["ve:sigma_max=1e37", "smld_geometric:num_levels=9,sigma_max=1e20,sigma_min=0.1"])
def test_noise_beyond_float32_is_refused(schedule):
    for target in TARGETS:
        gaussian = nidiff.GaussianModel(torch.zeros(SHAPE), COV)
        denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), target, gaussian=gaussian)
        if "1e37" in schedule or target == "score":
            with refused("schedule"):
                rehearse(denoiser, SHAPE)
        else:
            rehearse(denoiser, SHAPE)


# The same seed, the same bits --------------------------------------------------------------------------------


def test_noise_has_the_same_bits_in_any_batch(tally):
    rng, failures, tried = random.Random(8), [], 0
    for make in [*COVARIANCES.values()] * CASES:
        cov, dtype = make(), rng.choice([torch.float32, torch.float64])
        seeds = rng.sample(range(1000), 7)
        alone = {s: cov.sample((1, *cov.event_shape), generators_from_seeds([s]), dtype=dtype)[0] for s in seeds}
        for size in range(1, 8):
            chosen = rng.sample(seeds, size)
            batch = cov.sample((size, *cov.event_shape), generators_from_seeds(chosen), dtype=dtype)
            white = cov.inv_sqrt(batch)
            for seed, image, back in zip(chosen, batch, white, strict=True):
                same = torch.equal(image, alone[seed]) and torch.equal(back, cov.inv_sqrt(image[None])[0])
                tried, failures = tried + 1, failures + ([] if same else [f"{cov!r}: seed {seed} in a batch of {size}"])
    tally("seeds: bits of noise in batches of 1 to 7", tried, len(failures))
    assert not failures, "\n\n".join(failures[:12])


def convolutions() -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 3, 3, padding=1)
    layers = torch.nn.Sequential(first, torch.nn.SiLU(), torch.nn.GroupNorm(4, 16), last)
    return lambda x, label: layers(x) * torch.cos(label.float()).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_has_the_same_bits_in_any_batch_with_a_tile(sampler, tally):
    rng, failures, tried = random.Random(sampler), [], 0
    schedule = VE if sampler in ("als", "cas") else VP
    for cov in (nidiff.pyramid((7, 9)), nidiff.Channels(random_matrix(3), nidiff.gaussian_free_field((7, 5)))):
        image = (3, *cov.event_shape[-2:])
        process, gaussian = nidiff.Process(schedule, cov), nidiff.GaussianModel(torch.zeros(image), 0.3 * cov)
        denoiser = nidiff.Denoiser(convolutions(), process, "v", clip=2.0, gaussian=gaussian)
        for tile in (1, 4):
            draw = partial(nidiff.sample, denoiser, sampler=sampler, num_steps=4, tile=tile)
            alone = [draw((1, *image), generator=[seed])[0] for seed in range(5)]
            for size in (2, 4, 5):
                seeds = rng.sample(range(5), size)
                for seed, one in zip(seeds, draw((size, *image), generator=seeds), strict=True):
                    tried += 1
                    failures += [] if torch.equal(one, alone[seed]) else [f"{cov!r}, tile {tile}: {seed} in {size}"]
    tally("seeds: bits of samples in batches", tried, len(failures))
    assert not failures, "\n\n".join(failures[:12])


# Files of strangers ---------------------------------------------------------------------------------------------------


PIECES = [b"9", b"-", b'"', b"[", b"{", b"1e999", b"null", b"\xff", b"9" * 400]


def test_damaged_covariances_are_read_or_refused(tmp_path, tally):
    rng, failures, tried = random.Random(10), [], 300 * CASES
    for case in range(tried):
        folder = tmp_path / str(case)
        rng.choice([*COVARIANCES.values()])().save(folder)
        file = rng.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(content))
            content[place : place + 1] = rng.choice(PIECES)
        file.write_bytes(content)

        def draw(folder: Path = folder) -> None:
            cov = nidiff.Covariance.load(folder)
            if cov.size < 10**6:
                cov.sample((2, *cov.event_shape))

        problem = attempt(draw)
        failures += [] if problem is None else [f"{file.name}: {bytes(content)[:300]!r}\n{problem}"]
    tally("data: damaged files of a covariance", tried, len(failures))
    assert not failures, "\n\n".join(failures[:12])


def test_every_spacing_and_weighting_is_finite():
    for schedule in ("ddpm_cosine", "vp", "ve:num_levels=30", VE, VP, "vp:beta_max=1000"):
        process = nidiff.Process(schedule, COV)
        clean, denoiser = nidiff.Denoiser(net, process, "x0"), nidiff.Denoiser(net, process, "v")
        results = {name: nidiff.denoising_loss(denoiser, X, weighting=name) for name in WEIGHTINGS}
        for spacing, count in itertools.product(SPACINGS, (1, 2, 7, min(30, len(process.schedule)))):
            results[spacing, count] = nidiff.sample(clean, (1, *SHAPE), spacing=spacing, num_steps=count)
        assert [name for name, result in results.items() if not result.isfinite().all()] == [], schedule


def a_posterior(rng: random.Random) -> Tensor:
    """Samples given a random observation: operators after one another, noise from none to much, methods with options of
    any size, networks and schedules of every kind."""
    event = (1, *SHAPE)
    shares = torch.rand(SHAPE, generator=torch.Generator().manual_seed(rng.randrange(9))) < rng.choice([0.02, 0.5, 1.0])
    rays = normal(math.prod(SHAPE), 40, seed=rng.randrange(9)).float() * rng.choice([1e-3, 1.0, 30.0])
    operators: list[Callable[[], Any]] = [
        lambda: nidiff.operators.mask(shares),
        lambda: nidiff.operators.subsample(rng.choice([1, 2, 9])),
        lambda: nidiff.operators.pool(rng.choice([1, 2, 3])),
        lambda: nidiff.operators.blur(rng.choice([0.0, 0.7, 50.0])),
        lambda: nidiff.operators.waves(rng.choice([0.0, 1.5, 99.0])),
        lambda: nidiff.operators.linear(lambda x: x.flatten(1) @ rays[: x[0].numel()].to(x)),
        lambda: nidiff.operators.function(lambda x: (3 * x).exp()),
    ]
    operator = rng.choice(operators)()
    if rng.random() < 0.3:
        operator = operator @ rng.choice(operators[:4])()
    x0 = normal(2, *event, seed=rng.randrange(99)).float() * rng.choice([0.0, 1.0, 100.0])
    noise: Any = rng.choice([0.0, 1e-6, 0.1, 10.0])
    method = rng.choice(
        [
            "gaussian",
            "mmps",
            "tmpd",
            "pigdm",
            "gradient",
            "gradient:r=0",
            "dps",
            "dps:scale=30",
            "diffpir",
            "replacement",
        ]
    )
    gaussian = nidiff.GaussianModel(torch.zeros(event), nidiff.matern(SHAPE, rng.choice([0.5, 3.0])))
    schedule = rng.choice([VP, VE, "flow:num_levels=20", nidiff.schedules.soft_conditioning(SHAPE, num_levels=20)])
    process = nidiff.Process(schedule, rng.choice([COV, nidiff.Identity(SHAPE)]))
    known = gaussian if rng.random() < 0.7 else None
    denoiser = nidiff.Denoiser(net, process, rng.choice(["v", "x0"]), gaussian=known, clip=rng.choice([None, 1.0]))
    y = operator(x0)
    given = nidiff.posterior(denoiser, nidiff.Observation(y, operator, noise), method)
    sampler = rng.choice(["ancestral", "dpmpp_2m", "heun", "repaint:repeats=2"])
    return nidiff.sample(given, tuple(x0.shape), sampler=sampler, num_steps=rng.choice([1, 3, 20]), generator=[1, 2])


def test_posteriors_are_finite_or_refused_in_a_sentence(tally):
    tried = 120 * CASES
    failures = [
        f"seed {seed}\n{problem}" for seed in range(tried) if (problem := attempt(a_posterior, random.Random(seed)))
    ]
    tally("API: posteriors", tried, len(failures))
    assert not failures, "\n\n".join(failures[:12])
