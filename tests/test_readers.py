"""Each format gives the numbers that were written to it, with what it says of them, or names what is missing."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from problems import load, refuse
from scipy.io import savemat

from nidiff.data.formats import CONVERSIONS, KIND_OF, conversion

VALUES = np.random.default_rng(0).normal(size=(5, 4, 6)).astype("f4")


def written(values, data):
    assert np.array_equal(data.values.numpy(), values), (data.shape, values.shape)


# Arrays


def matlab(path):
    savemat(path, {"x": VALUES, "name": "words", "cells": np.array([1, "a"], object)})


def matlab_hdf5(path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w", userblock_size=512) as file:
        file["x"] = VALUES.T  # as MATLAB does
        file["name"] = np.array([[97]], "u2")
        file["name"].attrs["MATLAB_class"] = np.bytes_("char")


def safetensors(path):
    from safetensors.torch import save_file

    save_file({"x": torch.from_numpy(VALUES)}, path)


WRITE = {
    "a.mat": matlab,
    "b.mat": matlab_hdf5,
    "a.pt": lambda path: torch.save(torch.from_numpy(VALUES), path),
    "b.pth": lambda path: torch.save({"x": torch.from_numpy(VALUES)}, path),
    "a.safetensors": safetensors,
}


@pytest.mark.parametrize("name", WRITE)
def test_arrays_of_matlab_and_pytorch(tmp_path, name):
    WRITE[name](tmp_path / name)
    written(VALUES[:, None], load(tmp_path / name))
    written(VALUES.transpose(2, 0, 1), load(tmp_path / name, layout="CLN"))
    if name != "a.pt":
        written(VALUES[:, None], load(tmp_path / name, variables=("x",)))
        refuse(tmp_path / name, "data", "['x']", variables=("y",))
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    refuse(tmp_path / name, "data", name)


def test_a_tensor_file_of_other_things_is_not_unpickled(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    torch.save({"x": torch.ones(3, 3), "y": Evil()}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "data", "other things than tensors")
    assert not (tmp_path / "made").exists()
    torch.save({"x": torch.ones(3, 3), "y": torch.ones(3)}, tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", "data", "['x', 'y']")


# Volumes


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_nifti_is_upright_scaled_and_in_millimetres(tmp_path, suffix):
    nibabel = pytest.importorskip("nibabel")
    whole = (100 * VALUES).astype("i2")
    for name, values, affine in (
        ("1", whole, np.diag([2.0, 2, 3, 1])),
        ("2", whole[::-1], np.diag([-2.0, 2, 3, 1])),  # the same, with the first axis from right to left
        ("10", whole.transpose(2, 1, 0), np.array([[0, 0, 2, 0], [0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 1.0]])),
    ):
        image = nibabel.Nifti1Image(values, affine)
        image.header.set_xyzt_units("mm")
        nibabel.save(image, tmp_path / f"{name}{suffix}")
    for limit in (None, 0):
        data = load(tmp_path, memory_limit=limit)
        assert torch.equal(data.stored(torch.arange(3)), torch.from_numpy(whole.astype("f4")).expand(3, 1, -1, -1, -1))
    assert (data.grid.axes, data.grid.axis_units["z"]) == (("x", "y", "z"), "mm")
    assert data.grid.coordinates["z"] == (0, 3, 6, 9, 12, 15)
    scaled = nibabel.Nifti1Image(VALUES, np.diag([2.0, 2, 3, 1]))
    scaled.header.set_data_dtype("i2")  # with a slope
    nibabel.save(scaled, tmp_path / f"scaled{suffix}")
    assert np.abs(load(tmp_path / f"scaled{suffix}").values[0, 0].numpy() - VALUES).max() < 1e-3
    nibabel.save(nibabel.Nifti1Image(whole, np.diag([2.0, 2, 4, 1])), tmp_path / f"3{suffix}")
    refuse(f"{tmp_path}/[13]{suffix}", "data", f"1{suffix}", f"3{suffix}", "steps of 4")


def test_a_fourth_axis_of_nifti_is_asked_for(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(nibabel.Nifti1Image(np.stack([VALUES, 2 * VALUES], -1), np.eye(4)), tmp_path / "a.nii")
    refuse(tmp_path / "a.nii", "layout", "XYZN", "XYZC")
    written(np.stack([VALUES, 2 * VALUES])[:, None], load(tmp_path / "a.nii", layout="XYZN"))
    written(np.stack([VALUES, 2 * VALUES])[None], load(tmp_path / "a.nii", layout="XYZC"))


def slice_file(path, pixels, number, position=None, series="1.2.3", **extra):
    """One slice of a CT: stored whole numbers s are 2 s - 1000 HU."""
    pydicom = pytest.importorskip("pydicom")
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = pydicom.uid.CTImageStorage, f"{series}.{number}"
    file = pydicom.dataset.FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    about = {
        "SOPClassUID": pydicom.uid.CTImageStorage,
        "SOPInstanceUID": f"{series}.{number}",
        "Modality": "CT",
        "SeriesInstanceUID": series,
        "InstanceNumber": number,
        "Rows": pixels.shape[0],
        "Columns": pixels.shape[1],
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": 16,
        "BitsStored": 16,
        "HighBit": 15,
        "PixelRepresentation": 1,
        "RescaleSlope": 2,
        "RescaleIntercept": -1000,
        "PixelSpacing": [0.5, 0.75],
        "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
        "PixelData": pixels.astype("<i2").tobytes(),
        **({} if position is None else {"ImagePositionPatient": [0, 0, position]}),
    }
    for key, value in (about | extra).items():
        setattr(file, key, value)
    file.save_as(path, enforce_file_format=True)


@pytest.mark.parametrize("by", ["position", "number"])
def test_dicom_slices_are_volumes_in_the_order_of_their_positions_else_of_their_numbers(tmp_path, by):
    pixels = np.arange(2 * 12 * 4 * 5).reshape(2, 12, 4, 5)
    for patient in range(2):
        for place, file in enumerate(np.random.default_rng(0).permutation(12)):
            position, number = (2.5 * place - 7, 12 - place) if by == "position" else (None, place)
            slice_file(tmp_path / f"p{patient}" / f"IM{file}", pixels[patient, place], number, position)
    for limit in (None, 0):
        data = load(tmp_path, memory_limit=limit)
        assert torch.equal(data.stored(torch.arange(2)), torch.from_numpy(2.0 * pixels[:, None] - 1000).float())
    assert (data.grid.units, data.grid.axes) == (("HU",), ("depth", "height", "width"))
    assert data.grid.coordinates["width"] == (0, 0.75, 1.5, 2.25, 3)
    if by == "position":
        assert data.grid.coordinates["depth"][:3] == (0, 2.5, 5)
        flat = load(tmp_path / "p0", layout="HW")
        assert flat.values.shape == (12, 1, 4, 5)
        (tmp_path / "p0" / "IM5").unlink()
        (tmp_path / "p1" / "IM5").unlink()
        refuse(tmp_path, "data", "5 mm after", "2.5 mm")


def test_series_of_one_folder_are_not_mixed(tmp_path):
    pixels = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for place in range(3):
        for series in range(2):
            name = tmp_path / f"{place}{series}.dcm"
            slice_file(
                name, pixels[series, place], place, 2.0 * place, f"1.2.{series}", RescaleSlope=1, RescaleIntercept=0
            )
    data = load(tmp_path)
    assert sorted(data.values[:, 0, 0, 0, 0].tolist()) == [0, 60]
    written(pixels[:, None].astype("f4"), data)
    slice_file(tmp_path / "31.dcm", np.zeros((4, 6)), 4, 6.0, "1.2.1")
    refuse(tmp_path, "data", "31.dcm", "4 × 6")
    slice_file(tmp_path / "31.dcm", np.zeros((4, 5)), 4, 6.0, "1.2.1", SamplesPerPixel=3)
    refuse(tmp_path, "data", "31.dcm", "in colour")
    slice_file(tmp_path / "31.dcm", np.zeros((4, 5)), 4, None, "1.2.1")
    slice_file(tmp_path / "41.dcm", np.zeros((4, 5)), 4, None, "1.2.1")
    refuse(tmp_path, "data", "InstanceNumber")


def test_the_frames_of_one_dicom_file_are_slices(tmp_path):
    pixels = np.arange(60).reshape(3, 4, 5)
    slice_file(tmp_path / "a.dcm", pixels.reshape(12, 5), 0, Rows=4, Columns=5, NumberOfFrames=3)
    written(2.0 * pixels[None, None].astype("f4") - 1000, load(tmp_path))


@pytest.mark.parametrize("streamed", [True, False])
def test_floats_in_tiff_stacks_are_volumes(tmp_path, streamed):
    for number, volume in enumerate((VALUES, 2 * VALUES)):
        first, *rest = map(Image.fromarray, volume)
        first.save(tmp_path / f"{number}.tif", save_all=True, append_images=rest)
    options = {"memory_limit": 0} if streamed else {}
    wanted = torch.from_numpy(np.stack([VALUES, 2 * VALUES])[:, None])
    assert torch.equal(load(tmp_path, layout="DHW", **options).stored(torch.arange(2)), wanted)
    assert torch.equal(load(tmp_path / "1.tif", layout="DHW", **options).stored(torch.arange(1)), wanted[1:])


# Videos and GRIB, where their readers are installed


def video(path, shades):
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), shade, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)


def test_videos_have_their_frames_in_order(tmp_path):
    shades = np.array([[20, 60, 100, 140, 180], [200, 160, 120, 80, 40]])
    for name, each in zip(("1.mp4", "2.avi"), shades, strict=True):
        video(tmp_path / name, each)
    for limit in (None, 0):
        data = load(tmp_path, memory_limit=limit)
        assert (len(data), data.shape, data.grid.dtype) == (2, (3, 5, 16, 32), "uint8")
        assert np.abs(data.stored(torch.arange(2)).float().mean((1, 3, 4)).numpy() - shades).max() < 4
    assert data.grid.coordinates["time"] == pytest.approx((0, 0.04, 0.08, 0.12, 0.16))
    assert load(tmp_path, size=8, channels=1).shape == (1, 5, 8, 8)
    video(tmp_path / "3.mp4", [1, 2])
    refuse(tmp_path, "data", "1.mp4", "3.mp4")
    (tmp_path / "3.mp4").write_bytes(b"no video")
    refuse(tmp_path / "3.mp4", "data", "3.mp4", "ffmpeg")


def test_grib_is_read_and_no_index_is_left(tmp_path):
    pytest.importorskip("cfgrib")
    import eccodes

    places = {"latitudeOfFirstGridPoint": 60, "latitudeOfLastGridPoint": -60, "longitudeOfFirstGridPoint": 0}
    places |= {"longitudeOfLastGridPoint": 300, "iDirectionIncrement": 60, "jDirectionIncrement": 30}
    values = np.random.default_rng(0).normal(280, 10, (3, 5, 6))
    with (tmp_path / "a.grib").open("wb") as file:
        for hour, field in zip((0, 600, 1200), values, strict=True):
            message = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
            about = {f"{name}InDegrees": value for name, value in places.items()}
            about = {"Ni": 6, "Nj": 5, **about, "dataDate": 20200101, "dataTime": hour, "shortName": "2t"}
            for key, value in about.items():
                eccodes.codes_set(message, key, value)
            eccodes.codes_set_values(message, field.ravel())
            eccodes.codes_write(message, file)
    data = load(tmp_path / "a.grib")
    assert np.abs(data.values[:, 0].numpy() - values).max() < 0.01
    assert (data.grid.units, data.grid.coordinates["latitude"]) == (("K",), (60, 30, 0, -30, -60))
    assert data.along[1][-1] == np.datetime64("2020-01-01T12:00")
    assert [path.name for path in tmp_path.iterdir()] == ["a.grib"]
    whole = (tmp_path / "a.grib").read_bytes()
    (tmp_path / "a.grib").write_bytes(whole[:-10])  # the last time is cut short, and not left out
    refuse(tmp_path / "a.grib", "data", "a.grib")


# What is missing


@pytest.mark.parametrize(
    "name, module, extra",
    [
        ("a.nii.gz", "nibabel", "medical"),
        ("a.dcm", "pydicom", "medical"),
        ("a.mp4", "av", "video"),
        ("a.wav", "soundfile", "sound"),
        ("a.grib", "cfgrib", "climate"),
        ("a.mat", "scipy.io", "science"),
    ],
)
def test_a_reader_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch, name, module, extra):
    (tmp_path / name).write_bytes(b"x" * 1000)
    monkeypatch.setitem(sys.modules, module, None)
    refuse(tmp_path / name, None, module.partition(".")[0], f"nidiff[{extra}]")


def test_no_format_is_both_read_and_refused():
    assert not KIND_OF.keys() & CONVERSIONS.keys()
    for suffix in CONVERSIONS:
        assert "{" not in conversion([suffix]), suffix
