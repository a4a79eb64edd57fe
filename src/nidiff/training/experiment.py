"""One dataclass that says everything about a training run, and the presets.

Nothing heavy is imported here, so that the command line can show its flags at once.
"""

import dataclasses
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from nidiff.errors import InputError, one_of, shown
from nidiff.files import as_path, read_object
from nidiff.recipe import fits, is_number

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from nidiff.covariance.operator import Covariance
    from nidiff.data.dataset import Dataset
    from nidiff.diffusion.condition import Condition
    from nidiff.diffusion.gaussian import GaussianModel
    from nidiff.diffusion.schedule import Schedule

FORMAT = 2  # format 1, of version 0.1, called num_steps sample_steps
EXPERIMENT, BEGUN = "experiment.json", ".begun-run"  # in a run directory; the latter while a run begins in it
FREE = {"free": True}  # may change when a run is resumed, since it does not change the mathematics of a step


@dataclass(frozen=True)
class Experiment:
    """What is trained, on what, and how. Every field is a flag of ``nidiff train``."""

    data: str = "digits"
    """digits, fashion-mnist, cifar10, turbulence, hf:NAME; a folder of images, of videos or of WAV files; .npy, .npz,
    NetCDF or HDF5 (.nc, .h5), Zarr (.zarr)."""
    data_dir: Path | None = field(default=None, metadata=FREE)
    """Where the official files of a named data set are, if they are not to be found or downloaded."""
    size: int | None = None
    """Crop and resize images to size × size; of sounds, the number of samples, from the middle."""
    channels: int | None = None
    """1 (grey) or 3 (colour), if not as the images are."""
    skip_corrupt: bool = False
    """Leave out images of a folder that cannot be read, and list them."""
    layout: str | None = None
    """What the axes of an array are, in its order, such as NCHW: N for the items, C for the channels, and L, T, D, H,
    W, X, Y or Z. For a folder, NTHWC: each subfolder has the frames of one video."""
    variables: tuple[str, ...] = ()
    """Of NetCDF, HDF5 and Zarr: the variables that become channels, if not all; of .npz: its array."""
    sample_axis: str | None = None
    """Of NetCDF, HDF5 and Zarr: the axis of the items, if not the first one."""
    scaling: tuple[str, ...] = ("auto",)
    """From the units of the data to those of the model, one for all channels or one for each: standard (mean 0 and
    standard deviation 1), range (to [-1, 1]), log (standard of the logarithm), linear:scale=…,shift=…, or none; auto:
    standard for floats, and the range of the type for 8 and 16 bits."""
    missing: str = "refuse"
    """NaN and infinite values: refuse them, fill in the mean of their channel, or a number in the data's units."""
    held_out: str | None = None
    """What is not trained on but kept to test with: a fraction such as 0.1, or a range of the sample axis's coordinate,
    such as time=2010-01-01: or item=0:99."""
    labels: str | None = None
    """Train with classes: data (those of the data set, or the subfolders of a folder), an .npy or .npz file of whole
    numbers or words, one per item, or a variable of the NetCDF, HDF5 or Zarr file."""
    condition: str | None = None
    """Train with numbers or fields that are known of each item: an .npy or .npz file [N, P], or [N, C, *event] on the
    grid of the data or a coarser one; or variables of the NetCDF, HDF5 or Zarr file, as a,b."""
    condition_dropout: float = 0.1
    """The share of images whose label and condition are left out, so that samples can be guided; 0: of none."""
    flip: bool = False
    """Mirror half of the images at random."""

    covariance: str = "gaussian_free_field:gamma=1.0"
    """Σ as NAME:key=value,… (white, gff, matern, power_law, offset, pyramid, from_data), or the folder of a saved Σ."""
    schedule: str = "ddpm_cosine:num_levels=1000"
    """Noise levels as NAME:key=value,…: ddpm_linear, ddpm_cosine, scaled_linear, smld_geometric, vp, ve, flow,
    equal_snr; a level for every mode: heat, blurring, soft_conditioning, blue, offset_ramp, designed:per_mode=true.
    shift, a key of each, is added to log-SNR."""
    target: str = "eps"
    """What the network predicts: eps, noise, x0, v, velocity (flow matching), score, or residual, what the data's
    Gaussian does not know (with --weighting target)."""
    weighting: str = "eps"
    """The weight of the loss: the error of eps (the paper's), score, noise, v, or target, what the network predicts."""
    gaussian: str = "modes:shrinkage=0.02"
    """The data's Gaussian, fitted in Σ's basis: modes or radial, with keys shrinkage, channels, …; or none. Samplers
    angle and angle_2m and target residual need it."""
    sees: str = "auto"
    """What the network is given: x, z (x scaled to variance 1 in every mode) or both; auto: z if it predicts the
    residual, else x."""

    network: str = "auto"
    """The network as NAME:key=value,…: unet, for one to three axes, with keys such as patch=2 (faster steps) or
    factorised=true (video), or unet2d, diffusers' UNet2DModel; auto: unet2d for images of whole numbers, else unet."""
    boundary: str | None = None
    """What the data do at their edges: periodic, reflecting or fixed, one word or one per axis (reflecting/periodic).
    Σ, the data's Gaussian and the padding of the network follow it, unless they say otherwise."""
    widths: tuple[int, ...] = (32, 64)
    """Channels of the U-Net, one per resolution."""
    layers: int = 1
    """Blocks per resolution."""
    attention: tuple[int, ...] = (1,)
    """Resolutions with self-attention, 0 the full one."""
    dropout: float = 0.0
    """Dropout in the blocks."""

    steps: int = field(default=800, metadata=FREE)
    """Optimiser steps in total."""
    batch_size: int = 128
    """Images per step, over all processes."""
    accumulation: int = 1
    """Forward and backward passes per step on each process: less memory, the same gradient."""
    learning_rate: float = 2e-3
    """AdamW's, after the warm-up."""
    warmup: int = 100
    """Steps over which the learning rate rises from 0."""
    cooldown: int = 400
    """Steps at the end over which it falls to 0. If it is not 0, --steps cannot change when a run is resumed."""
    weight_decay: float = 0.0
    """AdamW's."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    ema_decay: float = 0.995
    """Decay of the moving average of the weights; the average is what is saved as the model."""
    precision: str = "auto"
    """fp32, bf16 or fp16 (autocast); auto: bf16 if the processor supports it, else fp32."""
    compile: bool = field(default=False, metadata=FREE)
    """torch.compile the network: a slow start, then often faster on a GPU."""
    seed: int = 0
    """Decides, with the number of the step alone, the weights, the data order, the levels and the noise."""

    log_every: int = field(default=20, metadata=FREE)
    """Steps between lines of log.jsonl."""
    sample_every: int = field(default=0, metadata=FREE)
    """Steps between grids of samples; 0: only at the end."""
    checkpoint_every: int = field(default=500, metadata=FREE)
    """Steps between checkpoints."""
    keep: int = field(default=2, metadata=FREE)
    """Checkpoints kept; 0: all."""
    sampler: str = field(default="dpmpp_2m", metadata=FREE)
    """The sampler of the grids as NAME:key=value,…, the same as in nidiff sample."""
    num_steps: int | None = field(default=None, metadata=FREE)
    """Its sampling steps, if not the sampler's own number."""
    num_samples: int = field(default=36, metadata=FREE)
    """Images in a grid."""

    def __post_init__(self) -> None:
        for low, high, names in RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not (fits(value, float) and low <= value < high):
                    limit = "finite" if high == math.inf else "below 2**63" if high == LARGEST else f"below {high}"
                    raise InputError(f"{name}={shown(value)} must be at least {low} and {limit}.")
        if not (is_number(self.learning_rate) and self.learning_rate > 0 and self.gradient_clip > 0):
            raise InputError("learning_rate and gradient_clip must be positive, and learning_rate finite.")
        for name in ("data", "covariance", "schedule", "gaussian", "sampler", "labels", "condition"):
            if getattr(self, name) is not None and not getattr(self, name):
                raise InputError(f"{name} is empty: give one, or leave it out.")
        if len(self.widths) > MOST_WIDTHS:
            raise InputError(f"widths has {len(self.widths)} numbers: give at most {MOST_WIDTHS}.")
        if self.batch_size % self.accumulation:
            raise InputError(f"batch_size={self.batch_size} must be a multiple of accumulation={self.accumulation}.")
        one_of("precision", self.precision, PRECISIONS)
        one_of("sees", self.sees, ("auto", "x", "z", "both"))

    def load_data(self, **options: Any) -> "Dataset":
        """The data, with ``options`` for the other arguments of `load_dataset`, such as split, or labels and condition,
        which only training needs."""
        from nidiff.data.load import load_dataset

        return load_dataset(self.data, **{**{name: getattr(self, name) for name in READING}, **options})

    def build_covariance(self, images: "Dataset") -> "Covariance":
        """Σ over the axes of an item; ``from_data`` is fitted to (at most 10,000 of) the items."""
        from nidiff.covariance.config import as_covariance

        return as_covariance(
            self.covariance, tuple(images.shape[1:]), lambda: images.batch(_spread(images)), boundary=self.boundary
        )

    def build_gaussian(self, images: "Dataset", covariance: "Covariance") -> "GaussianModel | None":
        """The data's Gaussian in the basis of Σ, fitted to (at most 10,000 of) the images, a few at a time."""
        from nidiff.diffusion.gaussian import fit_gaussian
        from nidiff.notation import call, parse_call

        name, arguments = parse_call("gaussian", self.gaussian)
        if name == "none":
            return None
        known = {average: partial(fit_gaussian, average=average) for average in ("modes", "radial")}
        one_of("gaussian", name, [*known, "none"])
        batches = self._fitted(images)
        gaussian: GaussianModel = call("gaussian", name, {"basis": self.basis(covariance), **arguments}, known, batches)
        gaussian.noise(covariance)  # which refuses another basis
        return gaussian

    def basis(self, covariance: "Covariance") -> "Covariance | str | tuple[str, ...]":
        """In which C is to be diagonal: the basis of Σ. White noise has any; then it is that of the schedule."""
        from inspect import signature

        from nidiff.diffusion.schedule import SCHEDULES
        from nidiff.notation import parse_call

        if not covariance.is_constant:
            return getattr(covariance, "spatial", covariance)  # of one that is over channels too
        name, written = parse_call("schedule", self.schedule)
        usual = signature(SCHEDULES[one_of("schedule", name, SCHEDULES)]).parameters.get("boundary")
        own = None if usual is None else usual.default
        boundary = written.get("boundary", self.boundary or own)
        return boundary if isinstance(boundary, str | tuple) else "periodic"

    def _fitted(self, images: "Dataset") -> "Iterator[Tensor]":
        """Batches of the images that the Gaussian is fitted to; mirrored too, where training mirrors them."""
        for index in _spread(images).split(FITTED_AT_ONCE):
            batch = images.batch(index)
            yield batch
            if self.flip:
                yield batch.flip(-1)

    @property
    def needs_gaussian(self) -> bool:
        """Whether the run cannot do without the data's Gaussian."""
        from nidiff.notation import parse_call
        from nidiff.sampling.sampler import as_sampler
        from nidiff.sampling.spacing import FROM_DATA

        if self.target == "residual" or self.sees in ("z", "both"):
            return True
        sampler, _ = as_sampler(self.sampler)
        by_sampler = sampler.finishes or sampler.start == "gaussian" or sampler.spacing in FROM_DATA
        return by_sampler or parse_call("schedule", self.schedule)[0] == "designed"

    def build_network(
        self, shape: Sequence[int], dtype: str = "uint8", told: "Mapping[str, Condition] | None" = None
    ) -> "Module":
        """The network for items of ``shape`` [C, *event] whose numbers are of that type in files, and for the
        conditions that it is ``told``."""
        from nidiff.diffusion.condition import CLASSES, FIELDS, PARAMETERS
        from nidiff.model.network import build_network

        told = told or {}
        is_picture = len(shape) == 3 and dtype != "float32" and {*told} <= {CLASSES}
        auto = "unet2d" if is_picture else "unet"
        sizes = {name: getattr(self, name) for name in ("widths", "layers", "attention", "dropout")}
        if CLASSES in told:
            sizes["num_classes"] = told[CLASSES].classes
        for name, key in {PARAMETERS: "num_parameters", FIELDS: "condition_channels"}.items():
            if name in told:
                sizes[key] = told[name].shape[0]
        boundary = None if self.boundary is None else self.boundary.split("/")
        return build_network(self.network, shape, auto=auto, boundary=boundary, both=self.sees == "both", **sizes)

    def sampling(self, schedule: "Schedule") -> dict[str, Any]:
        """The arguments of `nidiff.sample` that draw the grids."""
        steps = None if self.num_steps is None else min(self.num_steps, len(schedule))
        return {"sampler": self.sampler, "num_steps": steps}

    def resolved(self) -> "Experiment":
        """The same with ``precision`` "auto" replaced by what it means on this machine."""
        import torch

        if self.precision != "auto":
            return self
        if torch.cuda.is_available():
            has_bf16 = torch.cuda.is_bf16_supported()
        else:
            has_bf16 = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return dataclasses.replace(self, precision="bf16" if has_bf16 else "fp32")

    @property
    def about(self) -> dict[str, str]:
        """What the model card says of the training. A path is private: only its last part is named."""
        data = self.data if self.data.startswith("hf:") else Path(self.data).name
        return {
            "data": f"{data}{', mirrored at random' if self.flip else ''}",
            "training": f"{self.steps} steps of {self.batch_size} images, seed {self.seed}",
        }

    def command(self) -> str:
        """The command line that trains it: the preset that is nearest, and the flags in which it differs from that.

        Where the data are on this machine (``data_dir``) is left out.
        """
        flags = {name: self._flags(preset) for name, preset in PRESETS.items()}
        nearest = min(flags, key=lambda name: len(flags[name]))
        return shlex.join(["nidiff", "train", "--preset", nearest, *chain(*flags[nearest])])

    def _flags(self, preset: "Experiment") -> list[list[str]]:
        """The flags that turn ``preset`` into this, each with its values."""
        found = []
        for one in fields(self):
            flag, value = one.name.replace("_", "-"), getattr(self, one.name)
            if value == getattr(preset, one.name) or one.name == "data_dir":
                continue
            if isinstance(value, bool):
                found.append([f"--{flag}" if value else f"--no-{flag}"])
            else:
                found.append([f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])])
        return found

    def to_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["data_dir"] = None if self.data_dir is None else str(self.data_dir)
        return {"format": FORMAT, **values}

    def fixed(self) -> dict[str, Any]:
        """The settings that matter to the mathematics: those that must not change when a run is resumed."""
        kinds = get_type_hints(Experiment)
        return {
            f.name: float(value) if kinds[f.name] is float else value  # 1 and 1.0 are the same setting
            for f in fields(self)
            for value in [getattr(self, f.name)]
            if not f.metadata.get("free") or (f.name == "steps" and self.cooldown)
        }

    def differences(self, other: "Experiment") -> list[str]:
        """The fixed settings that differ, as ``name: mine → theirs``."""
        return [
            f"{name}: {value!r} → {getattr(other, name)!r}"
            for name, value in self.fixed().items()
            if value != getattr(other, name)
        ]


def read_experiment(path: Path) -> Experiment:
    """The experiment that `Experiment.to_json` wrote to a file, or to the run directory ``path``."""
    path = as_path("config", path)
    file = experiment_file(path) if path.is_dir() else path
    values = read_object(file, "give an experiment.json")
    version = values.pop("format", None)
    if version not in (1, FORMAT):
        raise InputError(f"{file} has format {shown(version)}, but this version reads 1 and {FORMAT}: train it again.")
    is_run = version == 1 or any(key in values for key in DERIVED)
    for key in DERIVED:
        values.pop(key, None)
    if version == 1 and "sample_steps" in values:
        values["num_steps"] = values.pop("sample_steps")
    if is_run:  # of an earlier version, which knew fewer settings
        values = {**BEFORE, **values}
    kinds = get_type_hints(Experiment)
    for key, value in values.items():
        if not fits(value, kinds[one_of(f"the key of {file}", key, kinds)]):
            raise InputError(f"{file} has {key}={shown(value)}, which has the wrong type: correct it.")
        if value is not None and key in CONVERTED:
            values[key] = CONVERTED[key](value)
    return Experiment(**values)


def experiment_file(run: Path) -> Path:
    """experiment.json of a run directory; of a run that was killed while it began, where it is until it is resumed."""
    begun = run / BEGUN / EXPERIMENT
    return begun if os.path.isfile(begun) else run / EXPERIMENT  # which never raises, however long the name


def _spread(images: "Dataset") -> "Tensor":
    """The rows of some images. They are spread over the data: the first ones are often of one class."""
    import torch

    count = min(len(images), 10_000, max(2, 2**28 // math.prod(images.shape)))
    return torch.linspace(0, len(images) - 1, count, dtype=torch.float64).long()


DERIVED = ("resolved", "identity")  # in experiment.json beside the settings
# What runs of earlier versions, which do not say, were trained with.
BEFORE = {
    "gaussian": "none",
    "sees": "auto",
    "network": "auto",
    "boundary": None,
    "layout": None,
    "variables": (),
    "sample_axis": None,
    "scaling": ("none",),  # floats were in [-1, 1]
    "missing": "refuse",
    "held_out": None,
    "labels": None,
    "condition": None,
    "condition_dropout": 0.1,
}
# The fields that are arguments of `load_dataset`.
READING = (
    *("data_dir", "size", "channels", "skip_corrupt", "layout", "variables", "sample_axis", "scaling", "missing"),
    "held_out",
)
FITTED_AT_ONCE = 256
LARGEST = 2**63  # what every library and file format that we use can hold
MOST_LAYERS, MOST_WIDTHS = 100, 20
CONVERTED = {
    "data_dir": Path,
    "widths": tuple,
    "attention": tuple,
    "variables": tuple,
    "scaling": tuple,
}  # what JSON cannot say
COUNTS = ("steps", "batch_size", "accumulation", "log_every", "checkpoint_every", "num_steps", "num_samples", "size")
SIZES = ("warmup", "cooldown", "seed", "sample_every", "keep")
RANGES = (
    (1, LARGEST, COUNTS),
    (0, LARGEST, SIZES),
    (1, MOST_LAYERS, ("layers",)),
    (0, math.inf, ("weight_decay",)),
    (0, 1, ("ema_decay", "dropout", "condition_dropout")),
)
PRECISIONS = {"auto": "", "fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # ours: accelerate's

_CIFAR10 = Experiment(
    data="cifar10",
    flip=True,
    schedule="ddpm_linear:num_levels=1000",
    widths=(128, 256, 256, 256),
    layers=2,
    dropout=0.1,
    steps=300_000,
    learning_rate=2e-4,
    warmup=5000,
    cooldown=0,
    ema_decay=0.9999,
    checkpoint_every=5000,
    sample_every=5000,
    log_every=100,
)
# For one to three hours on two processor cores. docs/results.md says what was tried, and benchmarks/screening.py tries
# it again: small networks on pixels, small batches and the error of v were best per minute.
_CPU = Experiment(
    covariance="gff:gamma=0.5",
    target="v",
    weighting="v",
    network="unet",
    widths=(32, 64, 64),
    attention=(2,),
    steps=40_000,
    batch_size=32,
    learning_rate=2e-3,
    warmup=200,
    cooldown=20_000,
    ema_decay=0.998,
    sampler="angle_2m",
)
PRESETS: dict[str, Experiment] = {
    "digits": Experiment(),
    "digits-ddpm": Experiment(covariance="white"),
    # Noise scales as `nidiff calibrate digits` finds them, with more levels than it asks for.
    "digits-smld": Experiment(schedule="smld_geometric:num_levels=100,sigma_max=10,sigma_min=0.01", sampler="cas"),
    # For --data of yours that are not images. Noise a little rougher than most fields are; without clipping, eps would
    # be a poor target, and in short runs residual learnt little beyond the spectrum.
    "fields": Experiment(
        covariance="gff:gamma=0.5",
        target="v",
        weighting="target",
        sampler="angle_2m",
        attention=(),
        steps=2000,
        batch_size=32,
        learning_rate=1e-3,
        cooldown=1000,
        num_samples=8,
    ),
    "fashion-mnist": Experiment(
        data="fashion-mnist",
        flip=True,
        widths=(32, 64, 64),
        layers=2,
        attention=(2,),
        steps=20_000,
        learning_rate=5e-4,
        cooldown=0,
        ema_decay=0.999,
        checkpoint_every=1000,
        sample_every=1000,
    ),
    "fashion-mnist-cpu": dataclasses.replace(_CPU, data="fashion-mnist", flip=True),
    "cifar10-cpu": dataclasses.replace(_CPU, data="cifar10", flip=True),
    "turbulence-cpu": dataclasses.replace(
        _CPU,
        data="turbulence",
        boundary="periodic",
        covariance="from_data:power=0.5",
        network="unet:patch=2",
        batch_size=16,
        learning_rate=1e-3,
        num_samples=16,
    ),
    "cifar10-small": dataclasses.replace(
        _CIFAR10, widths=(64, 128, 128), attention=(2,), steps=50_000, dropout=0.0, ema_decay=0.999
    ),
    # The paper's two runs: the same hyper-parameters, white noise and a Gaussian free field.
    "cifar10-ddpm": dataclasses.replace(_CIFAR10, covariance="white"),
    "cifar10-gff": _CIFAR10,
}
