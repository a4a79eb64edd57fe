"""One dataclass that says everything about a training run, and the presets.

Nothing heavy is imported here, so that the command line can show its flags at once.
"""

import dataclasses
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from tyro.conf import arg

from nidiff.data.spec import DataSpec, changed_flags
from nidiff.errors import FileError, InputError, expect, one_of, shown
from nidiff.files import as_path, read_object
from nidiff.recipe import fits

if TYPE_CHECKING:
    from nidiff.diffusion.schedule import Schedule

FORMAT = 2  # format 1 is that of version 0.1
EXPERIMENT, BEGUN = "experiment.json", ".begun-run"  # in a run directory; the latter while a run begins in it
FREE = {"free": True}  # may change when a run is resumed, since it does not change the mathematics of a step


@dataclass(frozen=True)
class Experiment:
    """What is trained, on what, and how. Every field is a flag of ``nidiff train``."""

    data: Annotated[DataSpec, arg(name="")] = field(default_factory=DataSpec)
    """The data; a text is the source of them."""
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
    weights: str = "none"
    """How much the points of an item count in the loss: latitude, by the area that each stands for; none: all alike."""
    gaussian: str = "modes:shrinkage=0.02"
    """The data's Gaussian, fitted in Σ's basis: modes or radial, with keys shrinkage, channels, …; or none. Samplers
    angle and angle_2m and target residual need it."""
    mixture: str = field(default="auto", metadata=FREE)
    """The data's mixture of Gaussians with whole covariances, fitted when training ends, for start=mixture of a
    sampler: classes, with one Gaussian or so many components per class, or clusters, with keys components, rank,
    shrinkage, …; or none. auto: classes if the data have labels, with a component for 200 items as far as each can have
    50 directions, else one Gaussian; its file has at most 8 MB."""
    sees: str = "auto"
    """What the network is given: x, z (x scaled to variance 1 in every mode) or both; auto: z if it predicts the
    residual, else x."""

    network: str = "auto"
    """The network as NAME:key=value,…: unet, for one to three axes, with keys such as patch=2 (faster steps) or
    factorised=true (video), or unet2d, diffusers' UNet2DModel; auto: unet2d for images of whole numbers, else unet."""
    boundary: str | None = None
    """What the data do at their edges: periodic, reflecting or fixed, one word or one per axis (reflecting/periodic).
    Σ, the data's Gaussian and the padding of the network follow it, unless they say otherwise. Crops are reflecting
    unless it is given."""
    widths: tuple[int, ...] = (32, 64)
    """Channels of the U-Net, one per resolution."""
    layers: int = 1
    """Blocks per resolution."""
    attention: tuple[int, ...] = (1,)
    """Resolutions with self-attention, 0 the full one."""
    dropout: float = 0.0
    """Dropout in the blocks."""
    initial: str | None = None
    """Begin with the weights of this model instead of random ones: a run, a checkpoint, a model folder, or the name of
    a model that ships. Its network must be like this one."""

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
    """Steps at the end over which it falls to 0. If it is not 0, --steps cannot change when a run is resumed, but
    --finish can end it earlier."""
    weight_decay: float = 0.0
    """AdamW's."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient."""
    ema_decay: float = 0.995
    """Decay of the moving average of the weights; the average is what is saved as the model."""
    precision: str = "auto"
    """fp32, bf16 or fp16 (autocast); auto: bf16 if the processor computes with it, else fp32. Where bf16 would be
    emulated, many times slower, it is fp32 too."""
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
    """The sampler of the grids as NAME:key=value,…, and of nidiff sample and evaluate where none is named there."""
    num_steps: int | None = field(default=None, metadata=FREE)
    """Its sampling steps, if not the sampler's own number."""
    num_samples: int = field(default=36, metadata=FREE)
    """Images in a grid."""

    def __post_init__(self) -> None:
        if isinstance(self.data, str):
            object.__setattr__(self, "data", DataSpec(self.data))
        remedy = "save them, as by numpy.save or to_netcdf, and give the path, from which the run can be repeated"
        expect("data", self.data, DataSpec, remedy)
        for (low, high), names in RANGES.items():
            for name, value in ((name, getattr(self, name)) for name in names):
                if value is not None and not low <= value < high:
                    limit = "" if high >= LARGEST else f" and below {high}"
                    raise InputError(name, value, "is out of range", f"give at least {low:g}{limit}")
        one_of("precision", self.precision, PRECISIONS)
        one_of("sees", self.sees, ("auto", "x", "z", "both"))

    @property
    def edges(self) -> str | None:
        """What items do at their edges: what is said of the data, else what is known of them."""
        return self.boundary or self.data.edges

    def sampling(self, schedule: "Schedule") -> dict[str, Any]:
        """The arguments of `nidiff.sample` that draw the grids."""
        steps = None if self.num_steps is None else min(self.num_steps, len(schedule))
        return {"sampler": self.sampler, "num_steps": steps}

    def resolved(self) -> "Experiment":
        """The same with ``precision`` "auto" replaced by what it means on this machine."""
        from nidiff.precision import has_bf16

        if self.precision != "auto":
            return self
        return dataclasses.replace(self, precision="bf16" if has_bf16() else "fp32")

    @property
    def about(self) -> dict[str, str]:
        """What the model card says of the training. A path is private: only its last part is named."""
        source = self.data.source
        paths = [source] if source.startswith("hf:") else [Path(path).name for path in source.split(",")]
        name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        crops = f", crops of {'×'.join(map(str, self.data.crop))}" if self.data.crop else ""
        before = f", from the weights of {Path(self.initial).name}" if self.initial else ""
        return {
            "data": f"{name}{crops}{', mirrored at random' if self.flip else ''}",
            "training": f"{self.steps} steps of {self.batch_size} images, seed {self.seed}{before}",
        }

    def command(self) -> str:
        """The command line that trains it: the preset that is nearest, and the flags in which it differs from that.

        Where the data are on this machine (``data_dir``) is left out.
        """
        mine = self.settings() | {"data_dir": None}
        flags = {name: changed_flags(mine, preset.settings()) for name, preset in PRESETS.items()}
        nearest = min(flags, key=lambda name: len(flags[name]))
        return shlex.join(["nidiff", "train", "--preset", nearest, *chain(*flags[nearest])])

    def ended(self, step: int, cooldown: int) -> "Experiment":
        """The experiment that begins to cool down after ``step``, for so many steps, and then ends.

        It has had the same learning rates up to there, so that a run which goes on with it becomes the one that began
        with it. After a cool-down has begun, that is only so if the experiment ends as it was planned.
        """
        begins = self.steps - self.cooldown
        if step <= begins:
            return dataclasses.replace(self, steps=step + cooldown, cooldown=cooldown)
        if cooldown != self.cooldown:
            problem = f"came after step {step}, and the cool-down of {self.cooldown} steps began after {max(begins, 0)}"
            raise InputError("cooldown", cooldown, problem, f"leave it out: the run ends at step {self.steps}")
        return self

    def settings(self) -> dict[str, Any]:
        """All settings by the names of their flags, those of the data first."""
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "data"}
        return {**self.data.settings(), **rest}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "Experiment":
        """The inverse of `settings`; those that are left out have their defaults."""
        values = {
            name: CONVERTED[name](value) if value is not None and name in CONVERTED else value
            for name, value in settings.items()
        }
        data = {"source" if name == "data" else name: values.pop(name) for name in DATA_KINDS if name in values}
        return cls(DataSpec(**data), **values)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **self.settings()}

    def fixed(self) -> dict[str, Any]:
        """The settings that matter to the mathematics: those that must not change when a run is resumed."""
        free = {field.name for field in fields(self) if field.metadata.get("free")} | {"data_dir"}
        free -= {"steps"} if self.cooldown else set()
        return {
            name: float(value) if KINDS[name] is float else value  # 1 and 1.0 are the same setting
            for name, value in self.settings().items()
            if name not in free
        }

    def differences(self, other: "Experiment") -> list[str]:
        """The fixed settings that differ, as "`name`: mine → theirs"."""
        theirs = other.settings()
        return [f"`{name}`: {mine!r} → {theirs[name]!r}" for name, mine in self.fixed().items() if mine != theirs[name]]


def read_experiment(path: Path) -> Experiment:
    """The experiment that `Experiment.to_json` wrote to a file, or to the run directory ``path``."""
    path = as_path("config", path)
    file = experiment_file(path) if path.is_dir() else path
    values = read_object(file, "give an experiment.json")
    if (version := values.pop("format", None)) != FORMAT:
        problem = f"has format {version!r}, and this version reads {FORMAT}"
        raise FileError("config", str(file), problem, "open it with nidiff 0.2 or the one that wrote it")
    values = {key: value for key, value in values.items() if key not in ("resolved", "identity")}  # no settings
    for key, value in values.items():
        if not fits(value, KINDS[one_of(f"the key of {file}", key, KINDS)]):
            raise FileError("config", str(file), f"has {key}={shown(value)}, which has the wrong type", "correct it")
    return Experiment.from_settings(values)


def experiment_file(run: Path) -> Path:
    """experiment.json of a run directory; of a run that was killed while it began, where it is until it is resumed."""
    begun = run / BEGUN / EXPERIMENT
    return begun if os.path.isfile(begun) else run / EXPERIMENT  # which never raises, however long the name


CONVERTED = {
    "data_dir": Path,
    **dict.fromkeys(("widths", "attention", "variables", "scaling", "crop"), tuple),
}  # of JSON
DATA_KINDS = {"data" if name == "source" else name: kind for name, kind in get_type_hints(DataSpec).items()}
KINDS = DATA_KINDS | {name: kind for name, kind in get_type_hints(Experiment).items() if name != "data"}
LARGEST = 2**63  # what every library and file format that we use can hold
COUNTS = ("steps", "batch_size", "accumulation", "log_every", "checkpoint_every", "num_steps", "num_samples")
RANGES = {  # the least value, and what it must be below
    (1, LARGEST): COUNTS,
    (0, LARGEST): ("warmup", "cooldown", "seed", "sample_every", "keep"),
    (0, 1): ("ema_decay", "dropout", "condition_dropout"),
    (0, math.inf): ("weight_decay",),
    (1e-30, math.inf): ("learning_rate", "gradient_clip"),
}
PRECISIONS = {"auto": "", "fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # ours: accelerate's

_CIFAR10 = Experiment(
    data=DataSpec("cifar10"),
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
        data=DataSpec("fashion-mnist"),
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
    "fashion-mnist-cpu": dataclasses.replace(_CPU, data=DataSpec("fashion-mnist"), flip=True),
    "cifar10-cpu": dataclasses.replace(_CPU, data=DataSpec("cifar10"), flip=True),
    "turbulence-cpu": dataclasses.replace(
        _CPU,
        data=DataSpec("turbulence"),
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
