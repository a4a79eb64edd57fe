"""Folders of WAV files as signals [N, C, L], with numbers in [-1, 1]."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset, Source
from nidiff.data.grid import Grid
from nidiff.data.sources import Limits, load_or_stream, watched
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError
from nidiff.files import blaming

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = (".wav", ".wave")
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# By the format and the number of bits.
STORED = {(PCM, 8): "u1", (PCM, 16): "<i2", (PCM, 24): "3u1", (PCM, 32): "<i4", (FLOAT, 32): "<f4", (FLOAT, 64): "<f8"}


class Header(NamedTuple):
    """What a WAV file says of itself."""

    dtype: "np.dtype[Any]"
    channels: int
    rate: int
    start: int  # where the numbers begin, in bytes
    length: int  # of each channel


def open_sounds(files: Sequence[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """The WAV files of a folder, all of one rate, length and number of channels; with a size, the middle of each."""
    spec.refuse("channels", "skip_corrupt", *([] if spec.layout in ("NCL", "NLC") else ["layout"]))
    spec.refuse(*(["size"] if isinstance(spec.size, tuple) else []))  # sounds have one axis
    headers = [_header(file) for file in files]
    first = headers[0]
    length = spec.size if isinstance(spec.size, int) else first.length
    for file, header in zip(files, headers, strict=True):
        is_like = (header.channels, header.rate) == (first.channels, first.rate) and header.length >= length
        if not is_like or (spec.size is None and header.length != length):
            mine, other = (f"{h.channels} channels of {h.length} samples at {h.rate}" for h in (header, first))
            problem = f"has {mine} per second, but {length} samples like {str(files[0])!r} with {other} are needed"
            raise FileError("data", str(file), problem, "make all sounds alike, or give a smaller `size`")
    readers = [watched(file, _samples) for file in files]

    def read(rows: Tensor) -> Tensor:
        sounds = [readers[row](files[row], headers[row], length) for row in rows.tolist()]
        return torch.from_numpy(np.stack(sounds))

    source = Source((len(files), first.channels, length), torch.float32, read)
    names = np.array([str(file.relative_to(spec.source)) for file in files])
    values = load_or_stream(source, spec.source, limits)
    return Dataset(values, grid=Grid(("time",), rate=first.rate), along=("file", names))


def _samples(file: Path, header: Header, length: int) -> "NDArray[Any]":
    """The middle ``length`` samples [C, L] of a file; whole numbers of b bits are divided by 2^(b−1)."""
    before = (header.length - length) // 2 * header.channels * header.dtype.itemsize
    numbers = np.fromfile(file, header.dtype, length * header.channels, offset=header.start + before)
    if numbers.ndim == 2:  # three bytes, as the upper ones of four
        numbers = np.pad(numbers, ((0, 0), (1, 0))).view("<i4")
    if numbers.dtype.kind == "u":
        numbers = numbers / 128.0 - 1
    elif numbers.dtype.kind == "i":
        numbers = numbers / 2.0 ** (8 * numbers.dtype.itemsize - 1)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).reshape(length, header.channels).T


def _header(file: Path) -> Header:
    """Go through the parts of a RIFF file: ``fmt `` says what the numbers are, ``data`` holds them."""
    remedy = "repair or remove it, or convert it to PCM or floats"
    with blaming(str(file), remedy, "cannot be read as a WAV file", "data"), file.open("rb") as stream:
        stream.seek(12)  # RIFF, the size of the file, WAVE
        parts: dict[bytes, bytes] = {}
        while b"data" not in parts:
            name, size = struct.unpack("<4sI", stream.read(8))
            parts[name] = b"" if name == b"data" else stream.read(size + size % 2)
        start, form = stream.tell(), parts[b"fmt "]
        kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
        if kind == EXTENSIBLE:
            (kind,) = struct.unpack("<H", form[24:26])
        if (kind, bits) not in STORED or size > file.stat().st_size - start:
            raise ValueError(f"it has {size} bytes of {bits} bits in the format {kind}")
        return Header(np.dtype(STORED[kind, bits]), channels, rate, start, size // (channels * bits // 8))
