"""Folders of WAV files as signals [N, C, L], with numbers in [-1, 1]."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.grid import Grid
from nidiff.data.sources import Limits, WatchedFile, load_or_stream
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError, first_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

SUFFIXES = (".wav", ".wave")
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
BITS = {PCM: (8, 16, 24, 32), FLOAT: (32, 64)}
MOST_CHANNELS = 64


class Header(NamedTuple):
    """What a WAV file says of itself."""

    format: int
    bits: int
    channels: int
    rate: int
    start: int
    """Where the numbers begin, in bytes."""
    length: int
    """Of each channel."""


def open_sounds(files: Sequence[Path], spec: DataSpec, limits: Limits) -> Dataset:
    """The WAV files of a folder, all of one rate, length and number of channels; with a size, the middle ``size``
    numbers of each. Whole numbers of b bits are divided by 2^(b−1)."""
    spec.refuse("channels", "skip_corrupt", *([] if spec.layout in ("NCL", "NLC") else ["layout"]))
    headers = [_read_header(file) for file in files]
    first, length = headers[0], headers[0].length if spec.size is None else spec.size
    if isinstance(length, tuple):
        raise InputError("size", spec.size, "has two numbers, and sounds have one axis", "give one number")
    for file, header in zip(files, headers, strict=True):
        is_like = (header.channels, header.rate) == (first.channels, first.rate) and header.length >= length
        if not is_like or (spec.size is None and header.length != length):
            mine, other = (f"{h.channels} channels of {h.length} samples at {h.rate}" for h in (header, first))
            problem = f"has {mine} per second, but {length} samples like {str(files[0])!r} with {other} are needed"
            raise FileError("data", str(file), problem, "make all sounds alike, or give a smaller `size`")
    values = load_or_stream(Sounds(files, headers, length), spec.source, limits)
    names = np.array([str(file.relative_to(spec.source)) for file in files])
    return Dataset(values, grid=Grid(("time",), rate=first.rate), along=("file", names))


class Sounds:
    """A source of WAV files."""

    dtype = torch.float32

    def __init__(self, files: Sequence[Path], headers: Sequence[Header], length: int) -> None:
        self.shape = (len(files), headers[0].channels, length)
        self._files, self._headers = [WatchedFile.now(file) for file in files], headers

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        values = torch.empty(len(index), *self.shape[1:])
        for row, out in zip(index.tolist(), values.numpy(), strict=True):
            with self._files[row].reading():
                out[:] = _numbers(self._files[row].path, self._headers[row], self.shape[2])
        return values


def _numbers(file: Path, header: Header, length: int) -> "NDArray[Any]":
    """The middle ``length`` samples [C, L] of a file."""
    width, count = header.bits // 8, length * header.channels
    before = (header.length - length) // 2 * header.channels * width
    with file.open("rb") as stream:
        stream.seek(header.start + before)
        raw = stream.read(count * width)
    if len(raw) != count * width:
        raise ValueError("it ends too early")
    if header.format == FLOAT:
        numbers = np.frombuffer(raw, f"<f{width}")
    elif width == 1:
        numbers = (np.frombuffer(raw, np.uint8) - 128.0) / 128.0
    elif width == 3:  # the upper three of four bytes
        padded = np.zeros((count, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(count, 3)
        numbers = padded.view("<i4")[:, 0] / 2.0**31
    else:
        numbers = np.frombuffer(raw, f"<i{width}") / 2.0 ** (header.bits - 1)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32).reshape(length, header.channels).T


def _read_header(file: Path) -> Header:
    try:
        return _header(file)
    except (OSError, ValueError, struct.error) as error:
        problem = f"cannot be read as a WAV file ({first_line(error)})"
        raise FileError("data", str(file), problem, "repair or remove it, or convert it to PCM or floats") from error


def _header(file: Path) -> Header:
    """Go through the parts of a RIFF file: ``fmt `` says what the numbers are, ``data`` holds them."""
    size, form = file.stat().st_size, b""
    with file.open("rb") as stream:
        if stream.read(4) != b"RIFF" or stream.read(8)[4:] != b"WAVE":
            raise ValueError("it does not begin as one")
        while len(head := stream.read(8)) == 8 and head[:4] != b"data":
            length = int.from_bytes(head[4:], "little")
            if head[:4] == b"fmt ":
                form = stream.read(length if length <= 4096 else 0)
                stream.seek(length % 2, 1)
            else:
                stream.seek(length + length % 2, 1)
        start = stream.tell()
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == EXTENSIBLE:
        (kind,) = struct.unpack("<H", form[24:26])
    if bits not in BITS.get(kind, ()) or not 1 <= channels <= MOST_CHANNELS or rate == 0:
        raise ValueError(f"it has {channels} channels of {bits} bits in the format {kind} at {rate} samples per second")
    frame, claimed = channels * bits // 8, int.from_bytes(head[4:], "little")
    if len(head) < 8 or claimed > size - start or claimed < frame:
        raise ValueError(f"it promises {claimed} bytes of sound and has {size - start}")
    return Header(kind, bits, channels, rate, start, claimed // frame)
