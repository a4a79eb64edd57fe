"""Hostile text, numbers and files at the doors of the core: they are refused in a sentence, or the result is right.

Right means that what comes back has no NaN where nothing that went in had one. Any exception but `InputError` fails,
and so does a call that does not end.
"""

import inspect
import math
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CASES
from problems import refused
from torch import Tensor

import nidiff
from nidiff.covariance.config import as_covariance
from nidiff.covariance.fields import FAMILIES, FIELDS
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedules import SCHEDULES, as_schedule
from nidiff.diffusion.spacing import SPACINGS
from nidiff.diffusion.target import TARGETS
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


def has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and not bool(value.isfinite().all())


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
    return f"NaN: {result}"[:300] if has_nan(result) else None


def report(failures: list[str]) -> str:
    return f"{len(failures)} failed:\n" + "\n\n".join(failures[:12])


VALUES = (
    "|0|1|-1|1e308|-1e9|1e-300|nan|inf|-inf|1.0000001|1000000000|no|true|yes|periodic|reflecting|zero|é|\0|1j|[1]|a=b"
)
VALUES = [*VALUES.split("|"), "0x10", "1_000", "٣", "1" * 400]


def test_arguments_in_text_are_refused_in_a_sentence(tally):
    rng, failures, tried = random.Random(5), [], 600 * CASES
    doors: list[tuple[Callable[..., Any], Any]] = [
        (
            lambda text: as_covariance(text, SHAPE).sample((2, *SHAPE)),
            {**FIELDS, **FAMILIES},
        ),
        (lambda text: as_schedule(text), SCHEDULES),
        (
            lambda text: nidiff.sample(DENOISER, (2, *SHAPE), sampler=text, num_steps=3),
            {k: v.step for k, v in SAMPLERS.items()},
        ),
    ]
    for _ in range(tried):
        door, known = rng.choice(doors)
        name = rng.choice([*known])
        keys = [*inspect.signature(known[name]).parameters, "nothing", "shift", "spacing"]
        parts = [
            f"{rng.choice(keys)}{rng.choice(['=', '=', '=', '', ' = '])}{rng.choice(VALUES)}"
            for _ in range(rng.randrange(4))
        ]
        text = f"{rng.choice([name] * 9 + [name[:-1]])}:{','.join(parts)}"
        if (problem := attempt(door, text)) is not None:
            failures.append(f"{text!r}\n{problem}")
    tally("API: arguments in text", tried, len(failures))
    assert not failures, report(failures)


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


@pytest.mark.parametrize("call", KNOWN.values(), ids=KNOWN.keys())
def test_known_mistakes_are_refused(call):
    with pytest.raises(nidiff.InputError) as refusal:
        call()
    assert "\n" not in str(refusal.value)


# Schedules that cannot be sampled ----------------------------------------------------------------------------------

TOO_FAR = ["vp:beta_max=1000", "ddpm_linear:beta_max=0.5", "ddpm_linear:shift=-300", "vp:shift=-200"]


@pytest.mark.parametrize("target", ["eps", "noise", "score"])
@pytest.mark.parametrize("schedule", TOO_FAR)
def test_a_schedule_that_ends_in_nan_is_refused_before_the_first_step(schedule, target):
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), target)
    for act in (
        lambda: rehearse(denoiser, SHAPE),
        lambda: nidiff.sample(denoiser, (1, *SHAPE)),
        lambda: nidiff.denoising_loss(denoiser, X),
        lambda: nidiff.log_likelihood(denoiser, X),
    ):
        with refused("schedule"):
            act()


@pytest.mark.parametrize("target", ["x0", "v"])
@pytest.mark.parametrize("schedule", TOO_FAR)
def test_what_works_with_little_signal_is_not_refused(schedule, target):
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), target)
    rehearse(denoiser, SHAPE)
    assert bool(nidiff.sample(denoiser, (1, *SHAPE), generator=[3]).isfinite().all())
    assert bool(nidiff.denoising_loss(denoiser, X, weighting="target").isfinite().all())


def test_what_float64_can_do_is_not_refused():
    denoiser = nidiff.Denoiser(net, nidiff.Process("vp:beta_max=200", COV), "eps", clip=1.0)
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


# Operators against their matrices ------------------------------------------------------------------------------------


def random_covariance(rng: random.Random) -> nidiff.Covariance:
    shape = tuple(rng.randrange(1, 7) for _ in range(rng.randrange(1, 4)))
    seed, size = rng.randrange(10**6), math.prod(shape)
    boundary = rng.choice(["periodic", "reflecting", "fixed"])
    if rng.random() < 0.5:
        boundary = tuple(rng.choice(["periodic", "reflecting", "fixed"]) for _ in shape)
    spectrum = normal(*shape, seed=seed).square() + 0.1
    return rng.choice(
        [
            lambda: nidiff.Identity(shape),
            lambda: nidiff.Diagonal(spectrum),
            lambda: nidiff.Dense(random_matrix(size, seed), shape),
            lambda: nidiff.Cosine(shape, spectrum, normalize=False),
            lambda: nidiff.gaussian_free_field(shape, gamma=rng.uniform(-1, 2), boundary=boundary),
            lambda: nidiff.power_law(shape, rng.uniform(-2, 3), boundary=boundary),
            lambda: nidiff.matern(
                shape, rng.uniform(0.5, 3), rng.uniform(0.3, 3), boundary, aliased=rng.random() < 0.5
            ),
            lambda: nidiff.offset(shape, rng.uniform(0, 2)),
            lambda: nidiff.pyramid(shape, rng.uniform(0.1, 1.5), rng.randrange(1, 6), rng.uniform(1.2, 4)),
            lambda: nidiff.Channels(
                random_matrix(rng.randrange(1, 6), seed), nidiff.matern(shape, 1.0, boundary=boundary)
            ),
            lambda: rng.uniform(0.1, 3) * nidiff.matern(shape, 1.5) + nidiff.Identity(shape),
            lambda: nidiff.from_data(normal(9, 1, *shape, seed=seed), len(shape), boundary=boundary),
            lambda: nidiff.Kronecker(
                nidiff.ar1(rng.randrange(1, 5), rng.uniform(-0.9, 0.9)), nidiff.matern(shape, 1.0, boundary=boundary)
            ),
            lambda: nidiff.Kronecker(
                nidiff.matern(shape[:1], 1.0, boundary=boundary if isinstance(boundary, str) else boundary[:1]),
                nidiff.Channels(random_matrix(2, seed), nidiff.gaussian_free_field(shape[:2])),
            ),
            lambda: nidiff.correlated(
                [nidiff.power_law(shape, rng.uniform(-1, 3), boundary=boundary) for _ in range(2)],
                [[1.0, 0.4], [0.4, 1.0]],
            ),
            lambda: nidiff.matern(shape, 1.5, boundary=boundary).at([rng.randrange(1, 7) for _ in shape]),
            lambda: nidiff.ou(sorted(rng.sample(range(100), rng.randrange(1, 9))), rng.uniform(0.5, 20)),
            lambda: nidiff.brownian_bridge(sorted(rng.sample(range(100), rng.randrange(1, 9)))),
        ]
    )()


def test_operators_are_their_dense_matrices(tally):
    rng, failures, tried = random.Random(7), [], 60 * CASES
    for _ in range(tried):
        cov = random_covariance(rng)
        findings = nidiff.testing.check_covariance(cov, 1e-8)
        if not findings.passed:
            failures.append(str(findings))
    tally("API: an operator against its dense matrix (13 statements each)", tried, len(failures))
    assert not failures, report(failures)


# The same seed, the same bits --------------------------------------------------------------------------------


def test_noise_has_the_same_bits_in_any_batch(tally):
    rng, failures, tried = random.Random(8), [], 0
    for _ in range(40 * CASES):
        cov, dtype = random_covariance(rng), rng.choice([torch.float32, torch.float64])
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
    assert not failures, report(failures)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 3, padding=1),
                torch.nn.SiLU(),
                torch.nn.GroupNorm(4, 16),
                torch.nn.Conv2d(16, 3, 3, padding=1),
            )

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.layers(x) * torch.cos(label.float()).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_an_image_has_the_same_bits_in_any_batch_with_a_tile(sampler, tally):
    rng, failures, tried = random.Random(sampler), [], 0
    schedule = VE if sampler in ("als", "cas") else VP
    for cov in (
        nidiff.pyramid((7, 9)),
        nidiff.gaussian_free_field((8, 8), boundary="reflecting"),
        nidiff.Channels(random_matrix(3), nidiff.gaussian_free_field((7, 5))),
    )[: None if CASES > 1 else 2]:
        image = (3, *cov.event_shape[-2:])
        process, gaussian = nidiff.Process(schedule, cov), nidiff.GaussianModel(torch.zeros(image), 0.3 * cov)
        denoiser = nidiff.Denoiser(Convolutions(), process, "v", clip=2.0, gaussian=gaussian)
        for tile in (1, 4):
            how = {"sampler": sampler, "num_steps": 4, "tile": tile}
            alone = {s: nidiff.sample(denoiser, (1, *image), generator=[s], **how)[0] for s in range(5)}
            for size in range(1, 8):
                seeds = rng.sample(range(7), size)
                for seed, one in zip(
                    seeds, nidiff.sample(denoiser, (size, *image), generator=seeds, **how), strict=True
                ):
                    if seed in alone:
                        tried += 1
                        failures += [] if torch.equal(one, alone[seed]) else [f"{cov!r}, tile {tile}: {seed} in {size}"]
    tally("seeds: bits of samples in batches of 1 to 7", tried, len(failures))
    assert not failures, report(failures)


def test_another_seed_has_other_bits():
    denoiser = nidiff.Denoiser(Convolutions(), nidiff.Process(VP, nidiff.pyramid((8, 8))), "v")
    one, other = nidiff.sample(denoiser, (2, 3, 8, 8), generator=[1, 2], num_steps=3, tile=2)
    assert not torch.equal(one, other)


# Files of strangers ---------------------------------------------------------------------------------------------------


def damaged_arrays(rng: random.Random, folder: Path) -> Path:
    """An .npy or .npz file of which some bytes, the header or the end are wrong."""
    array = rng.choice(
        [
            np.zeros((3, 4, 5), np.uint8),
            np.zeros((3, 4, 5, 3), ">f4"),
            np.asfortranarray(np.ones((3, 4, 5), "f8")),
            np.ones((3, 4, 5), "f2"),
            np.zeros((0, 4, 5), np.uint8),
            np.zeros((3, 4, 5), "<i8"),
        ]
    )
    file = folder / f"x.{rng.choice(['npy', 'npz'])}"
    if file.suffix == ".npy":
        np.save(file, array)
    else:
        rng.choice([np.savez, np.savez_compressed])(file, array)
    content = bytearray(file.read_bytes())
    for _ in range(rng.randrange(4)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    if rng.random() < 0.3:
        content = content[: rng.randrange(len(content))]
    if rng.random() < 0.3:
        content = content.replace(
            b"(3, 4, 5", rng.choice([b"(9999999, 4, 5", b"(-3, 4, 5", b"(1" + b"0" * 12 + b", 4, 5", b"(3, 4"])
        )
    file.write_bytes(content)
    return file


def test_damaged_arrays_are_read_or_refused(tmp_path, tally):
    rng, failures, tried = random.Random(9), [], 300 * CASES
    for _ in range(tried):
        file = damaged_arrays(rng, tmp_path)
        problem = attempt(lambda path: nidiff.load_dataset(path, scaling="none").all(), file)
        failures += [] if problem is None else [problem]
    tally("data: damaged .npy and .npz files", tried, len(failures))
    assert not failures, report(failures)


def test_damaged_covariances_are_read_or_refused(tmp_path, tally):
    rng, failures, tried = random.Random(10), [], 300 * CASES
    makers = [
        lambda: COV,
        lambda: nidiff.Dense(random_matrix(6), (2, 3)),
        lambda: nidiff.Channels(random_matrix(2), COV),
        lambda: nidiff.matern(SHAPE, 2.0),
        lambda: COV + nidiff.Identity(SHAPE),
        lambda: nidiff.Kronecker(nidiff.ou((0.0, 1.0, 3.0), 2.0), COV) * 2.0,
        lambda: nidiff.correlated([COV, COV], [[1.0, 0.5], [0.5, 1.0]]),
        lambda: nidiff.matern(SHAPE, (1.0, 2.0), boundary=("fixed", "periodic")).at((2, 3)),
    ]
    for case in range(tried):
        folder = tmp_path / str(case)
        rng.choice(makers)().save(folder)
        file = rng.choice(sorted(folder.iterdir()))
        content = bytearray(file.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            place, new = (
                rng.randrange(len(content)),
                rng.choice([b"9", b"-", b'"', b"[", b"{", b"1e999", b"null", b"\xff", b"9" * 400]),
            )
            content[place : place + 1] = new
        file.write_bytes(content)

        def draw(folder: Path = folder) -> None:
            cov = nidiff.Covariance.load(folder)
            if cov.size < 10**6:
                cov.sample((2, *cov.event_shape))

        problem = attempt(draw)
        failures += [] if problem is None else [f"{file.name}: {bytes(content)[:300]!r}\n{problem}"]
    tally("data: damaged files of a covariance", tried, len(failures))
    assert not failures, report(failures)


def test_every_spacing_and_weighting_is_finite(tally):
    failures, tried = [], 0
    for schedule in ("ddpm_cosine", "vp", "ve:num_levels=30", VE, VP, "vp:beta_max=1000"):
        process = nidiff.Process(schedule, COV)
        for name in SPACINGS:
            for count in (1, 2, 7, min(30, len(process.schedule))):
                if count <= len(process.schedule):
                    tried += 1
                    x = nidiff.sample(nidiff.Denoiser(net, process, "x0"), (1, *SHAPE), spacing=name, num_steps=count)
                    failures += [] if bool(x.isfinite().all()) else [f"{schedule} {name} {count}"]
        for name in WEIGHTINGS:
            tried += 1
            loss = nidiff.denoising_loss(nidiff.Denoiser(net, process, "v"), X, weighting=name)
            failures += [] if bool(loss.isfinite().all()) else [f"{schedule} {name}"]
    tally("API: spacings and weightings", tried, len(failures))
    assert not failures, report(failures)
