"""Folders of sounds (WAV, FLAC, OGG, MP3) as signals [N, C, L], with numbers in [-1, 1]."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, Source, numbered_classes
from nidiff.data.grid import Grid
from nidiff.data.sources import Limits, load_or_stream, watched, with_bar
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, shown
from nidiff.extras import require
from nidiff.files import blaming

if TYPE_CHECKING:
    from numpy.typing import NDArray

CUT_SHORT = re.compile(r"^data : \d+ \(should be", re.MULTILINE)  # in what the library says of a WAV file


class Header(NamedTuple):
    """What a file says of itself."""

    channels: int
    rate: int
    length: int  # of each channel


def open_sounds(root: Path, files: Sequence[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """Sounds of one rate and number of channels; subfolders of ``root`` are classes.

    Shorter ones than the size, by default the longest, are continued with silence, and of longer ones the middle is
    taken; ``lengths`` says how many samples of each are sound.
    """
    spec.refuse("channels", "skip_corrupt", *([] if spec.layout in ("NCL", "NLC") else ["layout"]))
    spec.refuse(*(["size"] if isinstance(spec.size, tuple) else []))  # sounds have one axis
    headers = [_header(file) for file in with_bar(files, "opening files", limits.progress)]
    first = headers[0]
    for file, header in zip(files, headers, strict=True):
        if header.channels != first.channels:
            problem = f"has {header.channels} channels, but {str(files[0])!r} has {first.channels}"
            raise FileError("data", str(file), problem, f"convert it: ffmpeg -i in.wav -ac {first.channels} out.wav")
        if header.rate != first.rate:
            problem = f"has {header.rate} samples per second, but {str(files[0])!r} has {first.rate}"
            raise FileError("data", str(file), problem, f"convert it: ffmpeg -i in.wav -ar {first.rate} out.wav")
    length = spec.size if isinstance(spec.size, int) else max(header.length for header in headers)
    lengths = torch.tensor([min(header.length, length) for header in headers])
    if shorter := int((lengths < length).sum()):
        problem = f"{shorter} of {len(files)} sounds are shorter than {length} samples"
        warnings.warn(f"{shown(spec.source)}: {problem}, and continued with silence.", stacklevel=2)
    readers = [watched(file, _samples) for file in files]

    def read(rows: Tensor) -> Tensor:
        sounds = np.zeros((len(rows), first.channels, length), np.float32)
        for sound, row in zip(sounds, rows.tolist(), strict=True):
            samples = readers[row](files[row], headers[row], length)
            sound[:, : samples.shape[1]] = samples
        return torch.from_numpy(sounds)

    source = Source((len(files), first.channels, length), torch.float32, read)
    names = [file.relative_to(root) for file in files]
    along, folders = ("file", np.array(list(map(str, names)))), [name.parts[:-1] for name in names]
    values = load_or_stream(source, spec.source, limits)
    data = Dataset(values, grid=Grid(("time",), rate=first.rate), along=along, lengths=lengths)
    if not all(folders):
        return data
    classes, labels = numbered_classes([folder[0] for folder in folders])
    return Dataset(values, labels, grid=data.grid, along=along, lengths=lengths, class_names=classes)


def _samples(file: Path, header: Header, length: int) -> "NDArray[Any]":
    """The middle ``length`` samples [C, L] of a file, or all; whole numbers of b bits are divided by 2^(b−1)."""
    count = min(length, header.length)
    with require("soundfile").SoundFile(file) as sound:
        sound.seek((header.length - count) // 2)
        samples: NDArray[Any] = sound.read(count, dtype="float32", always_2d=True)
    if samples.shape != (count, header.channels):
        raise ValueError(f"it has {len(samples)} of {count} samples")
    return samples.T


def _header(file: Path) -> Header:
    soundfile = require("soundfile")
    remedy = "repair or remove it, or convert it: ffmpeg -i in.wav -c:a pcm_s16le out.wav"
    with blaming(str(file), remedy, "cannot be read as a sound", "data"), soundfile.SoundFile(file) as sound:
        if CUT_SHORT.search(sound.extra_info):
            raise ValueError("it is cut short")
        return Header(sound.channels, sound.samplerate, sound.frames)
