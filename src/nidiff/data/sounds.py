"""Folders of WAV files as signals [N, C, L], with numbers in [-1, 1]."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nidiff.data.dataset import Dataset
from nidiff.data.encoded import Reading
from nidiff.data.grid import Grid
from nidiff.data.sources import Watched, settled
from nidiff.errors import InputError, first_line

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


def open_sounds(path: Path, files: Sequence[Path], reading: Reading) -> Dataset:
    """The WAV files of a folder, all of one rate, length and number of channels; with a size, the middle ``size``
    numbers of each. Whole numbers of b bits are divided by 2^(b−1)."""
    if reading.layout not in (None, "NCL", "NLC") or reading.channels is not None or isinstance(reading.size, tuple):
        raise InputError(
            f"layout, channels and two sizes have no meaning with the sounds of {str(path)!r}: leave them out."
        )
    if reading.skip_corrupt:
        raise InputError(
            "skip_corrupt=True has no meaning with sounds: leave it out, and remove those that are corrupt."
        )
    headers = [_header_of(file) for file in files]
    first, length = headers[0], headers[0].length if reading.size is None else reading.size
    for file, header in zip(files, headers, strict=True):
        for what, mine, its in (
            ("channels", header.channels, first.channels),
            ("samples per second", header.rate, first.rate),
        ):
            if mine != its:
                raise InputError(
                    f"{str(file)!r} has {mine} {what}, but {str(files[0])!r} has {its}: make all sounds alike."
                )
        if header.length < length or (reading.size is None and header.length != length):
            wanted = f"{str(files[0])!r} has" if reading.size is None else "size asks for"
            problem = f"{str(file)!r} has {header.length} samples, but {wanted} {length}"
            raise InputError(f"{problem}: make all sounds alike, or give a smaller size=.")
    sounds = Sounds(files, headers, length)
    values = settled(sounds, f"path={str(path)!r}", reading.memory_limit, progress=reading.progress)
    names = np.array([str(file.relative_to(path)) for file in files])
    return Dataset(values, grid=Grid(("time",), rate=first.rate), along=("file", names))


class Sounds:
    """WAV files that are read when they are asked for."""

    dtype = torch.float32

    def __init__(self, files: Sequence[Path], headers: Sequence[Header], length: int) -> None:
        self.shape = (len(files), headers[0].channels, length)
        self._files, self._headers = [Watched.now(file) for file in files], headers

    def __len__(self) -> int:
        return self.shape[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        values = torch.empty(len(index), *self.shape[1:])
        for row, out in zip(index.tolist(), values.numpy(), strict=True):
            if not 0 <= row < len(self):
                raise IndexError(f"index has rows out of 0 to {len(self) - 1}")
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


def _header_of(file: Path) -> Header:
    try:
        return _header(file)
    except InputError:
        raise
    except (OSError, ValueError, struct.error) as error:
        raise InputError(
            f"{str(file)!r} cannot be read as a WAV file ({first_line(error)}): repair or remove it."
        ) from error


def _header(file: Path) -> Header:
    """Go through the parts of a RIFF file: ``fmt `` says what the numbers are, ``data`` holds them."""
    size, form = file.stat().st_size, None
    with file.open("rb") as stream:
        if stream.read(4) != b"RIFF" or stream.read(8)[4:] != b"WAVE":
            raise ValueError("it does not begin as one")
        while len(head := stream.read(8)) == 8:
            name, length = head[:4], int.from_bytes(head[4:], "little")
            if name == b"fmt ":
                form = stream.read(length if length <= 4096 else 0)
                stream.seek(length % 2, 1)
            elif name == b"data":
                return _checked(file, form, stream.tell(), min(length, size - stream.tell()), length)
            else:
                stream.seek(length + length % 2, 1)
    raise ValueError("it has no sound")


def _checked(file: Path, form: bytes | None, start: int, held: int, claimed: int) -> Header:
    if form is None:
        raise ValueError("it does not say what its numbers are")
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == EXTENSIBLE:
        (kind,) = struct.unpack("<H", form[24:26])
    if bits not in BITS.get(kind, ()):
        given = f"{str(file)!r} has numbers of {bits} bits in the format {kind}"
        raise InputError(f"{given}: convert it to PCM of 8, 16, 24 or 32 bits, or to floats.")
    frame = channels * bits // 8
    if not 1 <= channels <= MOST_CHANNELS or rate == 0:
        raise ValueError(f"it has {channels} channels and {rate} samples per second")
    if held != claimed or held < frame:
        raise ValueError(f"it promises {claimed} bytes of sound and has {held}")
    return Header(kind, bits, channels, rate, start, held // frame)
