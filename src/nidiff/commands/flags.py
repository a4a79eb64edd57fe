"""The flags that several commands share."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from nidiff.notation import parse_numbers

MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Loading:
    """How the data are read: arguments of `load_dataset`, the same as in nidiff train."""

    data_dir: Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="(default: found or downloaded)")] = None
    """Where the official files of a named data set are."""
    size: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: as they are)")] = None
    """Crop and resize images to size × size; of sounds, the number of samples, from the middle."""
    layout: Annotated[str | None, arg(metavar="LETTERS", help_behavior_hint="(default: NL, NHW or NHWC)")] = None
    """What the axes of an array are, such as NCHW; for a folder, NTHWC: each subfolder has the frames of one video."""
    variables: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: all that fit)")] = ()
    """Of NetCDF, HDF5 and Zarr: the variables that become channels; of .npz: its array."""
    sample_axis: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first one)")] = None
    """Of NetCDF, HDF5 and Zarr: the axis of the items."""
    scaling: tuple[str, ...] = ("auto",)
    """To the units of the model, for all channels or for each: standard, range, log, none, linear:scale=…,shift=…."""
    missing: str = "refuse"
    """NaN and infinite values: refuse, mean, or a number to fill in."""
    held_out: Annotated[str | None, arg(metavar="PART", help_behavior_hint="(default: nothing)")] = None
    """What is left out, for testing: a fraction such as 0.1, or a range such as time=2010-01-01:."""

    @property
    def given(self) -> dict[str, Any]:
        """What is not as by default."""
        return {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}

    def words(self) -> list[str]:
        """The flags that say the same."""
        found: list[str] = []
        for name, value in self.given.items():
            found += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else [value])]
        return found


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
class Telling:
    """What the network of a conditional model is told, seed by seed: arguments of `plan_job`."""

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
    """Of a model that was trained with a condition: an .npy or .npz file [N, ...] of it. Seed s is told row s modulo
    N."""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `plan_job`."""
        return vars(self) | {"classes": None if self.classes is None else parse_classes(self.classes)}


@dataclass(frozen=True)
class Measuring:
    """How samples are compared with real data: arguments of `open_bench`."""

    split: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: see below)")] = None
    """train or test, the held-out part. Default: train for 8-bit images, as is usual for FID, and test for all other
    data, if a part of them is held out."""
    num_real: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: all)")] = None
    """Real items to compare with, spread over the data."""
    features: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: see below)")] = None
    """Of 8-bit images: inception (only its distances are FID and KID), efficientnet-lite0 (default), pixels, or a file
    of your own: .safetensors with weights of EfficientNet-lite0, or .pt or .pt2, a program that needs --trust-features.
    Of other data: none (default), pixels, or a program for floats in the units of the model."""
    features_file: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="(default: downloaded)")] = None
    """Where the weights of inception are."""
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
    """Flags of every command that compares samples with real data: the arguments of `open_bench`."""

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


def parse_classes(words: str) -> list[int]:
    """8,0-3 as [8, 0, 1, 2, 3], in the order given; "none" as no classes."""
    return [] if words.strip() == "none" else parse_numbers(words, "classes", "0-9 or 0,2,5, or none", MOST_CLASSES)
