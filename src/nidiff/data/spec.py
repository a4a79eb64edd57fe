"""`DataSpec`: what a command or a run says about data. Nothing heavy is imported here, so that flags show at once."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from nidiff.errors import InputError

if TYPE_CHECKING:
    from nidiff.data.dataset import Dataset
    from nidiff.data.grid import Grid
    from nidiff.diffusion.scaling import Scaling

MEMORY_LIMIT = 4 * 2**30  # bytes; data that need more are read batch by batch
CHANNELS = {1: "L", 3: "RGB"}  # Pillow's names
ARRAYS = (".npy", ".npz")
FROM_DATA_SET = "data"  # labels=data: those that the data set has


def joined_paths(words: Sequence[str]) -> str:
    """Several paths, as a shell makes them of a pattern, as the source of one data set."""
    if len(words) > 1 and (unclear := [word for word in words if "," in word]):
        raise InputError("data", unclear[0], "has a comma, which joins several paths", "rename it, or give the folder")
    return ",".join(words)


Paths = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="DATA",
        instance_from_str=joined_paths,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]


@dataclass(frozen=True)
class DataSpec:
    """Which data, and how they are read. Every field is a flag of ``nidiff train``."""

    source: Annotated[Paths, arg(name="data")] = "digits"
    """digits, fashion-mnist, cifar10, turbulence, hf:NAME; a file, a folder of files, several, or a pattern in quotes
    such as 'months/*.nc': images, videos, sounds, arrays (.npy, .npz, .mat, .pt), NetCDF, HDF5, Zarr, GRIB, NIfTI or
    DICOM."""
    data_dir: Path | None = None
    """Where the official files of a named data set are, if they are not to be found or downloaded."""
    size: int | tuple[int, int] | None = None
    """Crop and resize images to size × size; of sounds, the number of samples: the middle of longer ones, and silence
    after shorter ones."""
    crop: tuple[int, ...] = ()
    """Train on parts of items of so many points, one number for all axes or one for each, cut at random places."""
    channels: int | None = None
    """1 (grey) or 3 (colour), if not as the images are."""
    skip_corrupt: bool = False
    """Leave out images of a folder that cannot be read, and list them."""
    layout: str | None = None
    """What the axes of an array are, in its order, such as NCHW: N for the items, C for the channels, and L, T, D, H,
    W, X, Y or Z; without N, each file is one item. For images, NTHWC or NDHWC: each file with several frames, or each
    subfolder, is a video or volume."""
    variables: tuple[str, ...] = ()
    """Of NetCDF, HDF5, Zarr and GRIB: the variables that become channels, if not all; of .npz, .mat, .pt: its array."""
    sample_axis: str | None = None
    """Of NetCDF, HDF5, Zarr and GRIB: the axis of the items, if not the first one or the only one that is no place."""
    scaling: tuple[str, ...] = ("auto",)
    """From the units of the data to those of the model, one for all channels or one for each: standard (mean 0 and
    standard deviation 1), range (to [-1, 1]), log (standard of the logarithm), linear:scale=…,shift=…, or none; auto:
    standard for floats, and for 8 and 16 bits the range of the type, or the part that they use if it is small.
    standard:per=pixel and log:per=pixel: a mean and a standard deviation for every point."""
    remove: str | None = None
    """climatology: take away the mean of the month at every point, so that the model sees anomalies, and put it back
    where times are known; climatology:by=day: that of the day of the year. Needs times along the axis of the items."""
    missing: str = "refuse"
    """NaN and infinite values: refuse them, fill in the mean of their channel, or a number in the data's units; domain:
    they are missing at the same points in all items, which lie outside of the domain, and are so in samples too."""
    held_out: str | None = None
    """What is not trained on but kept to test with: a fraction such as 0.1, or a range of the sample axis's coordinate,
    such as time=2010-01-01: or item=0:99."""
    labels: str | None = None
    """Train with classes: data (those of the data set, or the subfolders of a folder of images or sounds), an .npy or
    .npz file of whole numbers or words, one per item, or a variable of the NetCDF, HDF5 or Zarr file."""
    condition: str | None = None
    """Train with numbers or fields that are known of each item: an .npy or .npz file [N, P], or [N, C, *event] on the
    grid of the data or a coarser one, or variables of the NetCDF, HDF5 or Zarr file, joined by commas; one without the
    sample axis is the same for all items. latitude, longitude, month and dayofyear are the data's own coordinates."""

    def __post_init__(self) -> None:
        if isinstance(self.size, list):  # as JSON has it
            object.__setattr__(self, "size", tuple(self.size))
        object.__setattr__(self, "crop", (self.crop,) if isinstance(self.crop, int) else tuple(self.crop))
        if not all(type(side) is int and side > 0 for side in self.crop):
            raise InputError("crop", self.crop, "is not a size", "give positive numbers, one for all axes or one each")
        sides = self.image_size
        if sides is not None and not (len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)):
            raise InputError("size", self.size, "is not a size", "give one positive number, or height and width")
        if self.channels not in (None, *CHANNELS):
            raise InputError("channels", self.channels, "is not supported", "give 1 (grey) or 3 (RGB)")

    def load(
        self,
        split: str = "train",
        *,
        annotations: Sequence[str] = ("labels", "condition"),
        scaling: "Scaling | None" = None,
        like: "Grid | None" = None,
        memory_limit: int | None = MEMORY_LIMIT,
        progress: bool = True,
    ) -> "Dataset":
        """The part ``split`` of the data; see `nidiff.load_dataset`. ``annotations`` says which of labels and condition
        are read. A ``scaling`` that is known is not fitted again. With ``like``, the grid of a model, files are matched
        with it: converted and reordered, or refused."""
        from nidiff.data.load import load
        from nidiff.data.sources import Limits

        limits = Limits(memory_limit, progress)
        return load(self, split, limits, annotations=annotations, scaling=scaling, like=like)

    @property
    def edges(self) -> str | None:
        """What items do at their edges, as far as that is known: crops end anywhere, and do not continue at their other
        end."""
        return "reflecting" if self.crop else None

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width), or None where images keep theirs."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def annotation_variables(self) -> tuple[str, ...]:
        """The variables of a NetCDF, HDF5 or Zarr file that are labels or conditions, and so no channels."""
        names = [] if self.labels in (None, FROM_DATA_SET) else [str(self.labels)]
        names += self.condition.split(",") if self.condition else []
        return tuple(name for name in names if not name.lower().endswith(ARRAYS))

    def refuse(self, *options: str) -> None:
        """Refuse options that have no meaning for this source."""
        for name in options:
            if (value := getattr(self, name)) != getattr(DataSpec, name):
                place = f"with {self.source!r}" if self.source else "without `data`"
                raise InputError(name, value, f"has no meaning {place}", "leave it out")

    def settings(self) -> dict[str, Any]:
        """The fields by the names of their flags, as JSON can hold them."""
        values = asdict(self) | {"data_dir": None if self.data_dir is None else str(self.data_dir)}
        return {"data": values.pop("source"), **values}

    def flags(self) -> list[str]:
        """The words of a command line that read the same source in the same way, without the source."""
        changed = changed_flags(self.settings(), DataSpec(self.source).settings())
        return [word for words in changed for word in words]


def changed_flags(settings: Mapping[str, Any], usual: Mapping[str, Any]) -> list[list[str]]:
    """The flags, each with its values, that turn the settings ``usual`` into ``settings``."""
    flags = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if value == usual[name]:
            continue
        if isinstance(value, bool):
            flags.append([f"--{flag}" if value else f"--no-{flag}"])
        else:
            flags.append([f"--{flag}", *map(str, value if isinstance(value, tuple | list) else [value])])
    return flags
