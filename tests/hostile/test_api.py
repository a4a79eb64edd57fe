"""Every public function of the core, with bad arguments: it is right, or says in a sentence what is wrong.

Right means that what comes back has no NaN where nothing that went in had one. Any exception but `InputError` fails,
and so does a call that does not end.
"""

import contextlib
import inspect
import math
import random
import signal
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CASES
from torch import Tensor

import nidiff
from nidiff.calibration import distance
from nidiff.covariance.config import as_covariance
from nidiff.covariance.fields import FAMILIES, FIELDS
from nidiff.covariance.summary import summary
from nidiff.data.dataset import Dataset, quantise
from nidiff.data.encoded import Reading
from nidiff.data.images import open_images
from nidiff.diffusion.gaussian import Kappa
from nidiff.diffusion.objective import WEIGHTINGS
from nidiff.diffusion.schedule import SCHEDULES, as_schedule, from_diffusers
from nidiff.diffusion.target import TARGETS
from nidiff.evaluation.likelihood import measure_likelihood
from nidiff.randomness import generators_from_seeds
from nidiff.sampling.annealing import langevin_epsilon, variance_ratio
from nidiff.sampling.sampler import SAMPLERS, as_sampler, rehearse
from nidiff.sampling.spacing import SPACINGS, spaced_rows
from nidiff.testing.problems import normal, random_matrix

HANG = 60  # seconds after which a call counts as one that does not end
ROOMS = ("calibration", "covariance", "data", "diffusion", "inverse", "sampling", "testing")

SHAPE = (4, 6)
COV = nidiff.gaussian_free_field(SHAPE)
VP, VE = nidiff.ddpm_linear(20, beta_max=0.3), nidiff.smld_geometric(20, 5.0, 0.1)
PROCESS = nidiff.Process(VP, COV)
X = normal(3, 2, *SHAPE).float()


def net(x: Tensor, label: Tensor) -> Tensor:
    return torch.tanh(x)


DENOISER = nidiff.Denoiser(net, PROCESS, "v")
TOLD = nidiff.Denoiser(
    lambda x, label, class_labels: x, PROCESS, "v", conditions={"class_labels": nidiff.Condition(3, (), -1, 0.1)}
)
GAUSSIAN = nidiff.fit_gaussian(normal(9, 2, *SHAPE), basis=COV)
HALF = torch.full((2, 2, *SHAPE), 0.5)
KAPPA = Kappa(torch.tensor([0.0, 19.0], dtype=torch.float64), HALF, HALF)
FITTED = nidiff.GaussianModel(torch.zeros(SHAPE), nidiff.matern(SHAPE, 1.5))


def bad_values() -> list[Any]:
    """What people, programs and enemies put where a number, a tensor, a name or a path is meant."""
    numbers = [
        0,
        1,
        2,
        7,
        -1,
        10**6,
        10**12,
        10**18,
        -(10**30),
        10**400,
        0.5,
        1.0,
        1.0000001,
        -0.5,
        1e-8,
        1e-300,
        5e-324,
        1e30,
        1e150,
        1e300,
        1.7e308,
        math.nan,
        math.inf,
        -math.inf,
        1j,
        True,
        False,
    ]
    words = [
        "",
        "no",
        "true",
        "eps",
        "gff",
        "vp:beta_max=1000",
        "a" * 5000,
        "x\0y",
        "\udcff",
        "../..",
        "hf:",
        "é",
        b"x",
    ]
    tensors = [
        torch.zeros(0),
        torch.zeros(3, 0, *SHAPE),
        torch.zeros(0, 2, *SHAPE),
        torch.zeros(SHAPE),
        torch.ones(3, 2),
        torch.ones(3, 2, *SHAPE, dtype=torch.int64),
        torch.ones(3, 2, *SHAPE, dtype=torch.complex64),
        torch.ones(3, 2, *SHAPE, dtype=torch.bool),
        torch.ones(3, 2, *SHAPE, dtype=torch.float16),
        torch.full((3, 2, *SHAPE), math.nan),
        torch.full((3, 2, *SHAPE), 1e38),
        torch.tensor(0.5),
        torch.tensor(3),
        torch.eye(3),
        -torch.eye(3),
        torch.arange(5.0).flip(0),
        normal(3, 2, *SHAPE),
    ]
    arrays = [
        np.zeros(SHAPE),
        np.ones((3, 2, *SHAPE), np.float32),
        np.array(["a"]),
        np.array([None]),
        np.float32(0.5),
        np.float64(0.25),
        np.int64(3),
        np.bool_(True),
        np.array(2),
    ]
    others = [
        None,
        [],
        (),
        {},
        [1, 2],
        (4, 6),
        (4, -6),
        (4, 0),
        (4.0, 6.0),
        (True, 6),
        (10**6, 10**6),
        (1,) * 100,
        [[1.0], [1.0, 2.0]],
        {"a": 1},
        {"schedule": "vp"},
        {"covariance": "Identity"},
        object(),
        net,
        print,
        max,
        iter([]),
        range(3),
        {1, 2},
        Path("/nonexistent"),
        Path("/dev/null"),
        torch.float32,
        torch.int32,
        "float32",
        torch.device("cpu"),
        torch.Generator(),
        [torch.Generator()],
        COV,
        VP,
        VE,
        DENOISER,
        PROCESS,
        VP.level(3),
        GAUSSIAN,
        KAPPA,
        KAPPA._replace(rows=[0, 1]),
        KAPPA._replace(values=-KAPPA.values),
    ]
    return [*numbers, *words, *tensors, *arrays, *others]


def field_calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    good = {"shape": SHAPE, "exponent": 1.0, "length_scale": 2.0, "rho": 0.5, "times": (0.0, 1.0, 3.0), "scale": 2.0}
    family = {
        "shape": SHAPE,
        "spectrum": torch.ones(SHAPE),
        "variances": torch.ones(SHAPE),
        "matrix": random_matrix(24),
        "spatial": nidiff.Identity((2,)),
        "boundary": ("reflecting", "periodic"),
        "matrices": torch.eye(3).expand(2, 3, 3),
        "a": nidiff.ar1(2, 0.5),
        "b": COV,
    }
    calls = {}
    for known, given in ((FIELDS, good), (FAMILIES, family)):
        for name, function in known.items():
            parameters = inspect.signature(function).parameters
            calls[name] = (function, {k: given.get(k, p.default) for k, p in parameters.items()})
    calls["Channels"][1]["matrix"] = random_matrix(3)
    calls["ar1"][1]["shape"] = 5
    laplacian = torch.tensor([[1.0, -1, 0], [-1, 2, -1], [0, -1, 1]])
    calls["graph"] = (nidiff.graph, {"laplacian": laplacian, "gamma": 1.0, "zero_mode": "one", "normalize": True})
    pair = {"covariances": [COV, COV], "correlation": [[1.0, 0.5], [0.5, 1.0]], "normalize": True}
    calls["correlated"] = (nidiff.correlated, pair)
    calls["gaussian_free_field reflecting"] = (nidiff.gaussian_free_field, {"shape": SHAPE, "boundary": "reflecting"})
    calls["matern aliased"] = (nidiff.matern, {"shape": SHAPE, "length_scale": 2.0, "smoothness": 0.5, "aliased": True})
    return calls


def schedule_calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    given = {
        "num_levels": 20,
        "sigma_max": 5.0,
        "sigma_min": 0.1,
        "betas": [0.1, 0.2],
        "alphas_cumprod": [0.9, 0.5],
        "logsnr": [3.0, 0.0],
        "shape": SHAPE,
        "ratio": (COV.eigenvalues / 3).tolist(),
    }
    calls = {}
    for name, function in SCHEDULES.items():
        parameters = inspect.signature(function).parameters
        calls[name] = (function, {k: given.get(k, p.default) for k, p in parameters.items()})
    return calls


def field_metric_calls(images: Tensor) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """What is infinitely far is no error: fields without power, or real ones that are all the same."""

    def bands(**given: Any) -> Tensor:
        found = nidiff.compare_spectra(**given)
        return torch.cat([found.real, found.generated, found.difference, found.z]).nan_to_num(
            nan=math.nan, posinf=0, neginf=0
        )

    def values(**given: Any) -> list[float]:
        found = nidiff.compare_fields(**given).values()
        return [0.0 if math.isinf(one.value) else one.value for one in found]

    def distance_of(**given: Any) -> Tensor:
        return nidiff.wasserstein(**given).nan_to_num(nan=math.nan, posinf=0)

    pair, waves = {"real": images, "generated": X}, {"axes": (0, 1), "boundary": "periodic"}
    data = Dataset(X)
    few = {"num_images": 2, "batch": 2, "seed": 0, "rtol": 1e-2, "atol": 1e-2}
    return {
        "field_spectrum": (nidiff.field_spectrum, {"fields": X, **waves}),
        "compare_spectra": (bands, pair | waves),
        "compare_cross_spectra": (lambda **given: nidiff.compare_cross_spectra(**given).error, pair | waves),
        "compare_fields": (values, pair | {"grid": None, "boundary": ("fixed", "periodic"), "bootstrap": 2}),
        "wasserstein": (distance_of, pair),
        "structure_function": (nidiff.structure_function, {"fields": X, "order": 2, "axis": 0, "lags": (1, 2)}),
        "measure_likelihood": (measure_likelihood, {"denoiser": DENOISER, "data": data, **few}),
    }


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """By a title: a function and arguments with which it works."""
    level = VP.level(torch.tensor([1, 5, 9]))
    images = normal(6, 2, *SHAPE)
    return {
        **field_calls(),
        **schedule_calls(),
        "from_data": (
            nidiff.from_data,
            {
                "data": images,
                "event_axes": None,
                "average": "radial",
                "shrinkage": 0.01,
                "boundary": "periodic",
                "normalize": True,
            },
        ),
        "power": (COV.power, {"x": X, "exponent": 0.5}),
        "power of Dense": (nidiff.Dense(random_matrix(24), SHAPE).power, {"x": X, "exponent": -1.0}),
        "power of Cosine": (nidiff.Cosine(SHAPE, torch.ones(SHAPE)).power, {"x": X, "exponent": 2}),
        "power of Channels": (nidiff.Channels(random_matrix(2), COV).power, {"x": X, "exponent": -0.5}),
        "solve": (COV.solve, {"x": X}),
        "log_prob": (COV.log_prob, {"x": X}),
        "Covariance.sample": (
            COV.sample,
            {"shape": (3, 2, *SHAPE), "generator": None, "dtype": torch.float32, "device": None},
        ),
        "times": (lambda factor: COV * factor, {"factor": 2.0}),
        "plus": (lambda other: COV + other if isinstance(other, nidiff.Covariance) else COV, {"other": COV}),
        "Covariance.at": (COV.at, {"shape": (8, 12)}),
        "GaussianModel.on_grid": (GAUSSIAN.on_grid, {"shape": (8, 12)}),
        "Denoiser.at": (DENOISER.at, {"shape": (8, 12)}),
        "with_eigenvalues of Kronecker": (
            nidiff.Kronecker(nidiff.ar1(2, 0.5), COV).with_eigenvalues,
            {"eigenvalues": torch.ones(2, *SHAPE)},
        ),
        "with_eigenvalues": (COV.with_eigenvalues, {"eigenvalues": torch.ones(SHAPE)}),
        "distribution": (
            lambda channels, value: value if has_nan(value) else COV.distribution(channels).log_prob(value),
            {"channels": 2, "value": X},
        ),
        "Covariance.from_config": (nidiff.Covariance.from_config, {"config": COV.to_config(), "tensors": None}),
        "Covariance.load": (nidiff.Covariance.load, {"folder": "/nonexistent"}),
        "summary": (lambda factor: summary(COV * factor), {"factor": 3.0}),
        "Schedule": (
            nidiff.Schedule,
            {"logsnr": [2.0, 0.0, -2.0], "keeps": "variance", "time": None, "logsnr_of_time": None},
        ),
        "level": (VP.level, {"label": 3}),
        "level of tensor": (VE.level, {"label": torch.tensor([1.5])}),
        "level_at": (VP.level_at, {"logsnr": 0.0}),
        "level_with_noise": (VP.level_with_noise, {"deviation": 0.5}),
        "Condition": (
            lambda classes, shape, null, dropout: nidiff.Denoiser(
                net, PROCESS, conditions={"c": nidiff.Condition(classes, shape, null, dropout)}
            ),
            {"classes": 3, "shape": (), "null": -1, "dropout": 0.1},
        ),
        "given": (TOLD.given, {"class_labels": torch.tensor([0, 1])}),
        "guided": (TOLD.given(class_labels=1).guided, {"scale": 2.0, "null": None, "interval": (1, 3)}),
        "Observation": (
            nidiff.Observation,
            {"y": X, "operator": nidiff.operators.mask(torch.ones(SHAPE)), "noise": 0.1},
        ),
        "Observation.missing": (nidiff.Observation.missing, {"y": X, "noise": 0.1}),
        "mask": (nidiff.operators.mask, {"mask": torch.ones(SHAPE)}),
        "pool": (lambda factor: nidiff.operators.pool(factor)(X), {"factor": 2}),
        "subsample": (lambda step: nidiff.operators.subsample(step)(X), {"step": 2}),
        "blur": (
            lambda width, boundary: nidiff.operators.blur(width, boundary)(X),
            {"width": 1.0, "boundary": "periodic"},
        ),
        "waves": (
            lambda keep, boundary: nidiff.operators.waves(keep, boundary)(X),
            {"keep": 2, "boundary": "periodic"},
        ),
        "channels": (lambda indices: nidiff.operators.channels(indices)(X), {"indices": [0]}),
        "posterior": (
            nidiff.posterior,
            {
                "denoiser": DENOISER.with_gaussian(GAUSSIAN),
                "observation": nidiff.Observation.missing(X, 0.1),
                "method": "gaussian",
                "kappa": True,
                "tolerance": 1e-3,
                "iterations": 3,
            },
        ),
        "shifted": (VP.shifted, {"amount": 1.0}),
        "draw": (VP.draw, {"batch": 4, "generator": None}),
        "Schedule.from_config": (nidiff.Schedule.from_config, {"config": VP.to_config()}),
        "from_diffusers": (from_diffusers, {"config": {"beta_schedule": "linear", "num_train_timesteps": 10}}),
        "Process": (nidiff.Process, {"schedule": VP, "covariance": COV}),
        "perturb": (PROCESS.perturb, {"x0": X, "level": level, "eps": X}),
        "prior": (PROCESS.prior, {"shape": (3, 2, *SHAPE), "generator": None, "dtype": torch.float32, "device": "cpu"}),
        "prior_log_prob": (PROCESS.prior_log_prob, {"x": X}),
        "coefficients": (PROCESS.coefficients, {"time": 0.5}),
        "Denoiser of a residual": (
            nidiff.Denoiser,
            {"net": net, "process": PROCESS, "target": "residual", "gaussian": GAUSSIAN, "sees": "z", "kappa": KAPPA},
        ),
        "fit_gaussian": (
            nidiff.fit_gaussian,
            {"data": images, "basis": COV, "channels": "each", "average": "modes", "shrinkage": 0.02},
        ),
        "fit_gaussian of axes": (nidiff.fit_gaussian, {"data": images, "basis": "periodic", "event_axes": 2}),
        "GaussianModel": (nidiff.GaussianModel, {"mean": torch.zeros(2, *SHAPE), "covariance": COV}),
        "GaussianModel.from_config": (
            nidiff.GaussianModel.from_config,
            {"config": GAUSSIAN.to_config(), "tensors": None},
        ),
        "GaussianModel.sample": (
            GAUSSIAN.sample,
            {"shape": (3, 2, *SHAPE), "generator": None, "dtype": torch.float32, "device": None},
        ),
        "GaussianModel.bits_per_dim": (
            lambda x, bin_width: x if has_nan(x) else GAUSSIAN.bits_per_dim(x, bin_width=bin_width),
            {"x": X, "bin_width": 0.1},
        ),
        "GaussianModel.power": (GAUSSIAN.power, {"exponent": 0.5}),
        "measure_kappa": (
            nidiff.measure_kappa,
            {
                "denoiser": DENOISER.with_gaussian(GAUSSIAN),
                "data": images,
                "num_images": 4,
                "num_rows": 3,
                "seed": 0,
            },
        ),
        "Denoiser": (nidiff.Denoiser, {"net": net, "process": PROCESS, "target": "eps", "clip": None, "scaling": None}),
        "denoiser": (DENOISER, {"x": X, "level": level}),
        "score": (DENOISER.score, {"x": X, "level": level}),
        "unconditional": (nidiff.unconditional, {"net": net, "harmonic": None}),
        "Scaling": (nidiff.Scaling, {"scale": 2.0, "shift": 1.0}),
        "to_model": (nidiff.Scaling((2.0, 1.0), 1.0).to_model, {"data": X}),
        "denoising_loss": (
            nidiff.denoising_loss,
            {"denoiser": DENOISER, "x0": X, "generator": None, "weighting": "eps", "level": level, "eps": X},
        ),
        "sample": (
            nidiff.sample,
            {
                "denoiser": DENOISER,
                "shape": (2, 2, *SHAPE),
                "sampler": "ddim",
                "num_steps": 4,
                "seeds": [1, 2],
                "tile": 2,
                "spacing": "karras",
                "rows": None,
                "initial": X[:2],
                "denoise": True,
                "callback": None,
                "dtype": torch.float32,
                "device": None,
            },
        ),
        "sample of noisy data": (
            nidiff.sample,
            {"denoiser": DENOISER, "shape": (2, 2, *SHAPE), "start": X[:2], "level": 3, "num_steps": 2},
        ),
        **{
            f"sample {name}": (
                nidiff.sample,
                {
                    "denoiser": DENOISER.with_gaussian(GAUSSIAN)
                    if name not in ("als", "cas")
                    else nidiff.Denoiser(net, nidiff.Process(VE, COV)),
                    "shape": (2, 2, *SHAPE),
                    "sampler": name,
                    "num_steps": 5,
                    **{
                        p.name: p.default
                        for p in [*inspect.signature(one.step).parameters.values()][5:]
                        if p.kind is not p.VAR_KEYWORD
                    },
                },
            )
            for name, one in SAMPLERS.items()
        },
        "rehearse": (rehearse, {"denoiser": DENOISER, "shape": SHAPE, "sampler": "ddim"}),
        "as_sampler": (as_sampler, {"sampler": "ddim"}),
        "Sampler": (
            lambda step, spacing, num_steps: nidiff.sample(
                DENOISER, (1, *SHAPE), sampler=nidiff.Sampler(step, spacing, num_steps)
            ),
            {"step": SAMPLERS["ddim"].step, "spacing": "uniform", "num_steps": 3},
        ),
        "plan": (
            nidiff.plan,
            {
                "process": PROCESS,
                "gaussian": FITTED,
                "sampler": "ddim",
                "num_steps": 3,
                "start": "gaussian",
                "bound": 0.1,
                "kappa": None,
                "objective": "spectrum",
            },
        ),
        "predict": (
            nidiff.predict,
            {"process": PROCESS, "gaussian": FITTED, "sampler": "ddim", "rows": [19, 5], "start": "prior"},
        ),
        "gaussian_loss": (
            nidiff.gaussian_loss,
            {"process": PROCESS, "gaussian": FITTED, "row": 5, "kappa": None},
        ),
        "spaced_rows": (partial(spaced_rows, VP), {"num_steps": 4, "spacing": "logsnr"}),
        "log_likelihood": (
            nidiff.log_likelihood,
            {
                "denoiser": DENOISER,
                "x": X,
                "trace": "hutchinson",
                "num_probes": 1,
                "rtol": 1e-2,
                "atol": 1e-2,
                "method": "bosh3",
                "generator": None,
            },
        ),
        "bits_per_dim": (
            nidiff.bits_per_dim,
            {"denoiser": DENOISER, "x": X, "bin_width": 0.01, "rtol": 1e-2, "atol": 1e-2},
        ),
        "calibrate": (
            nidiff.calibrate,
            {
                "images": images,
                "covariance": COV,
                "sigma_min": 0.01,
                "distance": "max",
                "batch_size": 4,
                "quantile": 0.9,
                "ratio": "overlap",
                "steps_per_level": 5,
                "epsilon": None,
                "preconditioned": True,
                "generator": None,
            },
        ),
        "calibrate by batches": (
            nidiff.calibrate,
            {"images": images, "covariance": COV, "distance": "batch", "batch_size": 4},
        ),
        "calibrate by quantile": (
            nidiff.calibrate,
            {"images": images, "covariance": COV, "distance": "quantile", "quantile": 0.9},
        ),
        "sampled_distances": (distance.sampled_distances, {"images": images, "covariance": COV, "num_images": 4}),
        "langevin_epsilon": (langevin_epsilon, {"covariance": COV, "ratio": 1.5, "sigma_min": 0.01, "steps": 5}),
        "variance_ratio": (
            lambda **given: variance_ratio(**given).nan_to_num(posinf=0),
            {"covariance": COV, "ratio": 1.5, "epsilon": 1e-5, "sigma_min": 0.01, "steps": 5},
        ),
        **field_metric_calls(images),
        "generators_from_seeds": (generators_from_seeds, {"seeds": [1, 2]}),
        "load_dataset": (
            nidiff.load_dataset,
            {
                "name": "digits",
                "split": "test",
                "data_dir": None,
                "size": None,
                "channels": None,
                "skip_corrupt": False,
                "memory_limit": None,
                "progress": False,
            },
        ),
        "open_images": (lambda path: open_images(path, Reading()), {"path": "/nonexistent"}),
        "quantise": (quantise, {"images": X}),
        "check_covariance": (nidiff.testing.check_covariance, {"covariance": COV, "tolerance": 1e-9}),
        "check_schedule": (nidiff.testing.check_schedule, {"schedule": VP, "tolerance": 1e-9}),
        "check_target": (nidiff.testing.check_target, {"target": "v", "tolerance": 1e-9}),
    }


def bad_value(rng: random.Random, name: str) -> Any:
    """One of them; what a function of the caller does is not ours."""
    value = rng.choice(bad_values())
    functions = ("callback", "spacing", "step", "sampler", "predictor", "net", "logsnr_of_time", "trace")
    return bad_value(rng, name) if name in functions and callable(value) else value


def has_nan(value: Any) -> bool:
    if isinstance(value, Tensor):
        return (value.is_floating_point() or value.is_complex()) and not bool(value.isfinite().all())
    if isinstance(value, nidiff.Covariance):
        return has_nan(value.eigenvalues)
    if isinstance(value, nidiff.Schedule):
        return has_nan(value.logsnr) or has_nan(value.sigma)
    if isinstance(value, float | complex | np.ndarray | np.generic):
        with contextlib.suppress(TypeError):
            return not bool(np.isfinite(value).all())
    if isinstance(value, dict):
        return any(map(has_nan, value.values()))
    if isinstance(value, list | tuple) and len(value) < 1000:
        return any(map(has_nan, value))
    return False


def attempt(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """None if the call is right or refused in a sentence; else what is wrong with it."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**arguments)
    except nidiff.InputError as error:
        long = len(str(error)) > 2000 or "\n" in str(error).strip()
        return f"not a sentence: {str(error)[:200]}" if long else None
    except BaseException:
        return traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return f"NaN: {result}"[:300] if has_nan(result) and not has_nan(arguments) and not has_huge(arguments) else None


def has_huge(arguments: dict[str, Any]) -> bool:
    """Images of 1e38 may overflow."""
    real = [value for value in arguments.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return any(bool((value.abs() > 1e30).any()) for value in real)


def report(failures: list[str]) -> str:
    return f"{len(failures)} failed:\n" + "\n\n".join(failures[:12])


def test_the_good_arguments_are_good():
    for title, (function, arguments) in calls().items():
        if "/nonexistent" not in arguments.values():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(**arguments)
            assert attempt(function, arguments) is None, title


def test_every_public_function_of_these_rooms_is_tried():
    tried = {getattr(function, "__name__", "") for function, _ in calls().values()}
    for name in nidiff.__all__:
        one = getattr(nidiff, name)
        room = getattr(one, "__module__", "").split(".")[1:2]
        results = {
            "Calibration",
            "Covariance",
            "Level",
            "Target",
            "Sampler",
            "Prediction",
            "Channels",
            "Condition",
            "operators",
        }  # abstract, or tried by others
        if callable(one) and room and room[0] in ROOMS and name not in results:
            assert name in tried, f"{name} is public and not tried here"


@pytest.mark.parametrize("part", range(4))
def test_a_bad_argument_is_refused_in_a_sentence(part, tally):
    rng, known, failures = random.Random(part), calls(), []
    titles, tried = sorted(known)[part::4], 450 * CASES
    for case in range(tried):
        title = titles[case % len(titles)]
        function, arguments = known[title]
        names = rng.sample(sorted(arguments), k=min(len(arguments), rng.choice((1, 1, 1, 2))))
        given = {**arguments, **{name: bad_value(rng, name) for name in names}}
        if (problem := attempt(function, given)) is not None:
            failures.append(f"{title} with { ({name: repr(given[name])[:100] for name in names}) }\n{problem}")
    tally("API: arguments of the wrong kind or size", tried, len(failures))
    assert not failures, report(failures)


def test_arguments_in_text_are_refused_in_a_sentence(tally):
    rng, failures, tried = random.Random(5), [], 600 * CASES
    values = [
        "",
        "0",
        "1",
        "-1",
        "1e308",
        "-1e9",
        "1e-300",
        "nan",
        "inf",
        "-inf",
        "1.0000001",
        "1000000000",
        "1" * 400,
        "no",
        "true",
        "yes",
        "periodic",
        "reflecting",
        "zero",
        "é",
        "\0",
        "1j",
        "[1]",
        "a=b",
        "0x10",
        "1_000",
        "٣",
    ]
    doors: list[tuple[Callable[..., Any], Any]] = [
        (
            lambda text: as_covariance(text, SHAPE).sample((2, *SHAPE)),
            {**FIELDS, **FAMILIES, "gff": FIELDS["gaussian_free_field"]},
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
            f"{rng.choice(keys)}{rng.choice(['=', '=', '=', '', ' = '])}{rng.choice(values)}"
            for _ in range(rng.randrange(4))
        ]
        text = f"{rng.choice([name] * 9 + [name[:-1]])}:{','.join(parts)}"
        if (problem := attempt(door, {"text": text})) is not None:
            failures.append(f"{text!r}\n{problem}")
    tally("API: arguments in text", tried, len(failures))
    assert not failures, report(failures)


KNOWN: dict[str, Callable[[], Any]] = {
    "pyramid that never ends": lambda: nidiff.pyramid((32, 32), ratio=1.0000001, num_levels=10**9),
    "normalize is a word": lambda: nidiff.Fourier(SHAPE, torch.ones(SHAPE), normalize="no"),
    "normalize is a word in text": lambda: as_covariance("gff:normalize=no", SHAPE),
    "power NaN": lambda: COV.power(X, math.nan),
    "a trillion pixels": lambda: nidiff.Identity((10**6, 10**6)),
    "a hundred axes": lambda: nidiff.Identity((1,) * 100),
    "a billion levels": lambda: nidiff.ddpm_linear(10**9),
    "level_at NaN": lambda: VP.level_at(math.nan),
    "level infinite": lambda: VP.level(math.inf),
    "shift infinite": lambda: as_schedule("vp:shift=inf"),
    "shift too far": lambda: VP.shifted(5000.0),
    "likelihood of an array": lambda: nidiff.log_likelihood(DENOISER, X.numpy()),
    "initial is an array": lambda: nidiff.sample(DENOISER, (2, *SHAPE), initial=np.zeros((2, *SHAPE))),
    "spacing is a number": lambda: nidiff.sample(DENOISER, (2, *SHAPE), spacing=5),
    "shape is a number": lambda: nidiff.sample(DENOISER, 4),
    "num_steps is true": lambda: nidiff.sample(DENOISER, (2, *SHAPE), num_steps=True),
    "callback": lambda: nidiff.sample(DENOISER, (2, *SHAPE), callback=3),
    "dtype": lambda: nidiff.sample(DENOISER, (2, *SHAPE), dtype="float32"),
    "device": lambda: nidiff.sample(DENOISER, (2, *SHAPE), device="nonsense"),
    "seeds exhausted": lambda: nidiff.sample(DENOISER, (2, *SHAPE), seeds=iter([])),
    "tile": lambda: nidiff.sample(DENOISER, (2, *SHAPE), tile=0),
    "load None": lambda: nidiff.Covariance.load(None),
    "save under a zero byte": lambda: COV.save("x\0y"),
    "check_covariance of a name": lambda: nidiff.testing.check_covariance("gff"),
    "net": lambda: nidiff.Denoiser(3, PROCESS),
    "process": lambda: nidiff.Process(None, None),
    "scaling": lambda: nidiff.Scaling(math.nan, 0),
    "weighting": lambda: nidiff.denoising_loss(DENOISER, X, weighting=[1]),
    "one item of data": lambda: nidiff.from_data(torch.ones(1, 1, 4, 4)),
    "data with NaN": lambda: nidiff.from_data(torch.full((3, 1, 4, 4), math.nan)),
    "steps that never end": lambda: nidiff.sample(
        nidiff.Denoiser(net, nidiff.Process(VE, COV)), (1, *SHAPE), sampler="als", steps_per_level=10**12
    ),
    "calibrate in words": lambda: nidiff.calibrate(X, COV, preconditioned="no"),
    "an empty batch": lambda: nidiff.denoising_loss(DENOISER, X[:0]),
    "a tensor without numbers": lambda: COV.matmul(X.to("meta")),
    "a sparse tensor": lambda: COV.solve(X.to_sparse()),
    "calibrate an array": lambda: nidiff.calibrate(X.numpy(), COV),
}


@pytest.mark.parametrize("call", KNOWN.values(), ids=KNOWN.keys())
def test_known_mistakes_are_refused(call):
    with pytest.raises(nidiff.InputError) as refusal:
        call()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500


# Schedules that cannot be sampled ----------------------------------------------------------------------------------

TOO_FAR = ["vp:beta_max=1000", "ddpm_linear:beta_max=0.5", "ddpm_linear:shift=-300", "vp:shift=-200"]


@pytest.mark.parametrize("target", ["eps", "noise", "score"])
@pytest.mark.parametrize("schedule", TOO_FAR)
def test_a_schedule_that_ends_in_nan_is_refused_before_the_first_step(schedule, target):
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), target)
    for refused in (
        lambda: rehearse(denoiser, SHAPE),
        lambda: nidiff.sample(denoiser, (1, *SHAPE)),
        lambda: nidiff.denoising_loss(denoiser, X),
        lambda: nidiff.log_likelihood(denoiser, X),
    ):
        with pytest.raises(nidiff.InputError, match="schedule="):
            refused()


@pytest.mark.parametrize("target", ["x0", "v"])
@pytest.mark.parametrize("schedule", TOO_FAR)
def test_what_works_with_little_signal_is_not_refused(schedule, target):
    denoiser = nidiff.Denoiser(net, nidiff.Process(schedule, COV), target)
    rehearse(denoiser, SHAPE)
    assert bool(nidiff.sample(denoiser, (1, *SHAPE), seeds=[3]).isfinite().all())
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
            with pytest.raises(nidiff.InputError, match="schedule="):
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
            alone = {s: nidiff.sample(denoiser, (1, *image), seeds=[s], **how)[0] for s in range(5)}
            for size in range(1, 8):
                seeds = rng.sample(range(7), size)
                for seed, one in zip(seeds, nidiff.sample(denoiser, (size, *image), seeds=seeds, **how), strict=True):
                    if seed in alone:
                        tried += 1
                        failures += [] if torch.equal(one, alone[seed]) else [f"{cov!r}, tile {tile}: {seed} in {size}"]
    tally("seeds: bits of samples in batches of 1 to 7", tried, len(failures))
    assert not failures, report(failures)


def test_another_seed_has_other_bits():
    denoiser = nidiff.Denoiser(Convolutions(), nidiff.Process(VP, nidiff.pyramid((8, 8))), "v")
    one, other = nidiff.sample(denoiser, (2, 3, 8, 8), seeds=[1, 2], num_steps=3, tile=2)
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
        problem = attempt(lambda path: open_images(path, Reading()).all(), {"path": file})
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

        problem = attempt(draw, {})
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
