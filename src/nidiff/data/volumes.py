"""Medical volumes: NIfTI by nibabel, and series of DICOM slices by pydicom, with their spacing in millimetres."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nidiff.data.arrays import as_layout
from nidiff.data.dataset import natural_order
from nidiff.data.grid import Grid
from nidiff.data.match import TOLERANCE
from nidiff.data.parts import Part, stored_type
from nidiff.data.sources import watched
from nidiff.data.spec import DataSpec
from nidiff.errors import FileError, InputError
from nidiff.extras import require
from nidiff.files import blaming
from nidiff.memory import require_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNCOMPRESSED = "decompress it: gdcmconv --raw in.dcm out.dcm, or dcmdjpeg in.dcm out.dcm"


def nifti_parts(files: Sequence[Path], spec: DataSpec) -> list[Part]:
    """Each file as one volume x, y, z, to the right, to the front and upwards; a fourth axis needs a layout: XYZN if it
    is of items, XYZC if it is of channels."""
    return [_nifti(file, spec.layout) for file in files]


def _nifti(file: Path, text: str | None) -> Part:
    nibabel, name = require("nibabel"), str(file)
    with blaming(name, "repair it, or write it again with nibabel.save", "cannot be read as NIfTI", "data"):
        image = nibabel.load(file)
        stored = image.header.get_data_dtype()
        turned = nibabel.orientations.io_orientation(image.affine)
        sizes, spacing = [*image.shape], [float(step) for step in image.header.get_zooms()[:3]]
        for axis, (to, _) in enumerate(turned[:3].astype(int)):
            sizes[to], spacing[to] = image.shape[axis], float(image.header.get_zooms()[axis])
        while len(sizes) > 3 and sizes[-1] == 1:
            sizes.pop()
        slope, shift = (
            np.nan_to_num(number, nan=fallback) for number, fallback in zip(_scaling(image), (1, 0), strict=True)
        )
    require_memory("data", name, 8.0 * prod(sizes), "give smaller volumes")
    if text is None and len(sizes) != 3:
        problem = f"does not say what the axes of {name!r} are, whose shape is {tuple(sizes)}"
        raise InputError("layout", text, problem, "give XYZN if the fourth axis is of items, XYZC if it is of channels")
    layout = as_layout(text or "XYZ", name, sizes)
    dtype = stored_type(name, stored if (slope, shift) == (1, 0) else np.result_type(np.float32, stored))
    several = "N" in layout.letters

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        upright = nibabel.as_closest_canonical(nibabel.load(file, mmap=False))
        values = np.asarray(upright.dataobj).reshape(sizes)
        return layout.arrange(values)[rows]

    example = layout.arrange(np.broadcast_to(np.uint8(0), sizes))
    steps = dict(zip(("x", "y", "z"), spacing, strict=True))
    coordinates = {axis: tuple(steps[axis] * place for place in range(size)) for axis, size in
                   zip(layout.axes, example.shape[2:], strict=True) if axis in steps}  # fmt: skip
    unit = image.header.get_xyzt_units()[0]
    units = {axis: {"mm": "mm", "meter": "m", "micron": "um"}.get(unit, "mm") for axis in coordinates}
    grid = Grid(layout.axes, coordinates=coordinates, axis_units=units)
    along = ("file", np.full(example.shape[0], name))
    return Part(name, example.shape, dtype, watched(file, read), grid, along, not several)


def _scaling(image: Any) -> tuple[float, float]:
    slope, shift = image.header.get_slope_inter() if hasattr(image.header, "get_slope_inter") else (None, None)
    return (1.0 if slope is None else slope), (0.0 if shift is None else shift)


def dicom_parts(files: Sequence[Path], spec: DataSpec) -> list[Part]:
    """Each series in each folder as one volume of slices, rows and columns; with the layout HW, each file as an
    image."""
    pydicom = require("pydicom")
    spec.refuse(*([] if spec.layout in (None, "DHW", "NDHW", "HW", "NHW") else ["layout"]))
    is_flat = spec.layout in ("HW", "NHW")
    series: dict[tuple[Path, str], list[tuple[Path, Any]]] = {}
    for file in files:
        with blaming(str(file), "repair or remove it", "cannot be read as DICOM", "data"):
            header = pydicom.dcmread(file, stop_before_pixels=True)
        if "Rows" not in header:
            raise FileError("data", str(file), "has no image", "leave it out, as by a pattern")
        if header.get("SamplesPerPixel", 1) != 1:
            raise FileError("data", str(file), "is in colour", "convert it to PNG: dcmj2pnm +on in.dcm out.png")
        key = str(file) if is_flat else str(header.get("SeriesInstanceUID", ""))
        series.setdefault((file.parent, key), []).append((file, header))
    return [_dicom(slices, is_flat) for slices in series.values()]


def _dicom(slices: "list[tuple[Path, Any]]", is_flat: bool) -> Part:
    """One series."""
    pydicom = require("pydicom")
    slices, heights = _ordered(slices)
    files = [file for file, _ in slices]
    first, name = slices[0][1], str(files[0] if len(files) == 1 else files[0].parent)
    for file, header in slices:
        if (header.Rows, header.Columns) != (first.Rows, first.Columns):
            problem = (
                f"has {header.Rows} × {header.Columns} pixels, but {str(files[0])!r} has {first.Rows} × {first.Columns}"
            )
            raise FileError("data", str(file), problem, "give slices of one series")
    depth = int(first.get("NumberOfFrames", 1)) if len(slices) == 1 else len(slices)
    require_memory("data", name, 8.0 * depth * first.Rows * first.Columns, "give smaller volumes")
    scales = {tuple(float(header.get(key, usual)) for key, usual in (("RescaleSlope", 1), ("RescaleIntercept", 0)))
              for _, header in slices}  # fmt: skip
    bits = f"{'i' if first.get('PixelRepresentation', 0) else 'u'}{max(1, int(first.get('BitsAllocated', 16)) // 8)}"
    dtype = stored_type(name, bits if scales == {(1.0, 0.0)} else np.float32)

    def plane(file: Path) -> "NDArray[Any]":
        with blaming(str(file), UNCOMPRESSED, "cannot be read as DICOM", "data"):
            header = pydicom.dcmread(file)
            scale, shift = float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))
            pixels = header.pixel_array
            return pixels if (scale, shift) == (1, 0) else (pixels * np.float64(scale) + shift).astype(np.float32)

    readers = [watched(file, plane) for file in files]

    def read(rows: "NDArray[Any]") -> "NDArray[Any]":
        planes = [reader(file) for reader, file in zip(readers, files, strict=True)]
        volume = planes[0] if len(planes) == 1 else np.stack(planes)
        return volume.reshape(1, 1, *shape).repeat(len(rows), 0)

    shape = (first.Rows, first.Columns) if is_flat else (depth, first.Rows, first.Columns)
    spacing = [float(step) for step in first.get("PixelSpacing", [])]
    coordinates = dict(zip(("height", "width"), map(_steps, spacing, shape[-2:]), strict=False))
    if len(heights) > 1 and not is_flat:
        coordinates["depth"] = tuple(float(height - heights[0]) for height in heights)
    units = (str(first.get("RescaleType", "HU")),) if first.get("Modality") == "CT" else ()
    axes = ("height", "width") if is_flat else ("depth", "height", "width")
    grid = Grid(axes, (), units, coordinates, dict.fromkeys(coordinates, "mm"))
    return Part(name, (1, 1, *shape), dtype, read, grid, ("file", np.array([name])))


def _steps(step: float, count: int) -> tuple[float, ...]:
    return tuple(step * place for place in range(count))


def _ordered(slices: "list[tuple[Path, Any]]") -> "tuple[list[tuple[Path, Any]], list[float]]":
    """Slices in the order of their positions along the normal of their planes, and these, which have equal distances;
    else in the order of their numbers."""
    if len(slices) > 1 and all("ImagePositionPatient" in header for _, header in slices):
        turn = np.array(slices[0][1].get("ImageOrientationPatient", [1, 0, 0, 0, 1, 0]), float)
        normal = np.cross(turn[:3], turn[3:])
        heights = [float(normal @ np.array(header.ImagePositionPatient, float)) for _, header in slices]
        ranks = sorted(range(len(slices)), key=heights.__getitem__)
        slices, heights = [slices[rank] for rank in ranks], [heights[rank] for rank in ranks]
        steps = np.diff(heights)
        usual = float(np.median(steps))
        for (before, _), (after, _), step in zip(slices, slices[1:], steps, strict=False):
            if abs(step - usual) > max(TOLERANCE * usual, 1e-3):
                problem = f"is {step:.4g} mm after {str(before)!r}, and other slices are {usual:.4g} mm apart"
                raise FileError(
                    "data", str(after), problem, "add the slices that are missing, or leave out what is double"
                )
        return slices, heights
    numbers = [header.get("InstanceNumber") for _, header in slices]
    if len(slices) > 1 and (None in numbers or len({*numbers}) < len(numbers)):
        problem = "has slices without a position or a number of their own"
        raise FileError("data", str(slices[0][0].parent), problem, "give each an InstanceNumber")
    order = sorted(slices, key=lambda each: (int(each[1].get("InstanceNumber") or 0), natural_order(each[0].name)))
    return order, []
