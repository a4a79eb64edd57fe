"""Videos (MP4, AVI, MOV, …) as [C, frames, H, W], decoded by PyAV."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from nidiff.data.encoded import MOST_PIXELS, fit
from nidiff.data.grid import Grid
from nidiff.data.parts import Part
from nidiff.data.sources import watched
from nidiff.data.spec import DataSpec
from nidiff.extras import require
from nidiff.files import blaming

if TYPE_CHECKING:
    from numpy.typing import NDArray


def video_parts(files: Sequence[Path], spec: DataSpec) -> list[Part]:
    """Each file as a video of uint8 in colour, or in grey if ``channels`` is 1."""
    spec.refuse(
        "skip_corrupt", *([] if spec.layout in ("NTHWC", "NCTHW", "NTHW", "THWC", "CTHW", "THW") else ["layout"])
    )
    return [_part(file, spec) for file in files]


def _part(file: Path, spec: DataSpec) -> Part:
    count, (height, width), rate = _header(file)
    shape = (1, spec.channels or 3, count, *(spec.image_size or (height, width)))

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        frames = [fit(Image.fromarray(frame), spec) for frame in _frames(file)]
        video = np.stack(frames, 1)[None]
        if video.shape != shape:
            raise ValueError(f"it has frames {video.shape}, and {shape} were announced")
        return video.repeat(len(rows), 0)

    times = {} if rate is None else {"time": tuple(float(number / rate) for number in range(count))}
    grid = Grid(("time", "height", "width"), coordinates=times, axis_units={"time": "s"} if times else {})
    return Part(str(file), shape, np.dtype(np.uint8), watched(file, read), grid, ("file", np.array([str(file)])))


def _header(file: Path) -> tuple[int, tuple[int, int], Fraction | None]:
    """How many frames a video has, which are counted without decoding, their size, and how many a second."""
    with _stream(file) as (container, stream):
        if not 0 < stream.width * stream.height <= MOST_PIXELS:
            raise ValueError(f"it has frames of {stream.width} × {stream.height} pixels")
        turned = getattr(next(container.decode(stream)), "rotation", 0)
        if turned:
            raise ValueError(f"it is to be shown turned by {turned}°: ffmpeg -i in.mp4 out.mp4 does that")
        container.seek(0)
        count = sum(packet.size > 0 and not packet.is_corrupt for packet in container.demux(stream))
        return count, (stream.height, stream.width), stream.average_rate


def _frames(file: Path) -> "Iterator[NDArray[Any]]":
    with _stream(file) as (container, stream):
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            yield frame.to_ndarray(format="rgb24")


@contextmanager
def _stream(file: Path) -> Iterator[tuple[Any, Any]]:
    av = require("av")
    remedy = "convert it: ffmpeg -i in.mp4 -c:v libx264 out.mp4"
    blamed = blaming(str(file), remedy, "cannot be read as a video", "data")
    # A stream has no name, and so cannot lead to other files, as a playlist would.
    with blamed, file.open("rb") as content, av.open(content) as container:
        if not container.streams.video:
            raise ValueError("it has no pictures")
        yield container, container.streams.video[0]
