"""Images come in as float32 [N, C, H, W] in [-1, 1], or the file at fault is named."""

import numpy as np
import pytest
import torch
from PIL import Image

import nidiff
from nidiff.data.images import load_images


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)


def as_float(pixels):
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def refuse(path, *words):
    with pytest.raises(nidiff.InputError) as error:
        load_images(path)
    for word in words:
        assert word in str(error.value)


def test_a_folder_is_read_with_its_subfolders_in_order_of_name(tmp_path, pixels):
    (tmp_path / "b").mkdir()
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    Image.fromarray(pixels[1]).save(tmp_path / "b" / "x.bmp")
    Image.fromarray(pixels[2]).save(tmp_path / "c.PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    images = load_images(tmp_path)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, as_float(pixels))


def test_the_range_is_the_whole_of_minus_one_to_one(tmp_path):
    Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).save(tmp_path / "a.png")
    assert load_images(str(tmp_path)).tolist() == [[[[-1.0, 1.0]]]]


@pytest.mark.parametrize("mode, channels", [("1", 1), ("L", 1), ("P", 3), ("RGB", 3), ("RGBA", 4)])
def test_each_kind_of_8_bit_image_has_its_channels(tmp_path, pixels, mode, channels):
    Image.fromarray(pixels[0]).convert(mode).save(tmp_path / "a.png")
    assert load_images(tmp_path).shape == (1, channels, 5, 4)


@pytest.mark.parametrize("store", [np.save, np.savez, lambda f, a: np.savez(f, images=a)], ids=["npy", "npz", "named"])
def test_arrays_are_the_images_they_hold(tmp_path, pixels, store):
    file = tmp_path / ("a.npy" if store is np.save else "a.npz")
    store(file, pixels)
    torch.testing.assert_close(load_images(file), as_float(pixels))


def test_floats_are_taken_as_they_are(tmp_path):
    grey = np.random.default_rng(0).uniform(-1, 1, (2, 5, 4))
    np.save(tmp_path / "a.npy", grey)
    torch.testing.assert_close(load_images(tmp_path / "a.npy"), torch.from_numpy(grey).float()[:, None])


def test_among_several_arrays_arr_0_has_the_images(tmp_path, pixels):
    np.savez(tmp_path / "a.npz", pixels, labels=np.arange(3))
    assert load_images(tmp_path / "a.npz").shape == (3, 3, 5, 4)
    np.savez(tmp_path / "b.npz", images=pixels, labels=np.arange(3))
    refuse(tmp_path / "b.npz", "'images', 'labels'", "arr_0")


def test_unlike_images_are_refused_by_name(tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    Image.fromarray(pixels[1, :4]).save(tmp_path / "smaller.png")
    refuse(tmp_path, "smaller.png", "alike")
    Image.fromarray(pixels[1]).convert("L").save(tmp_path / "smaller.png")
    refuse(tmp_path, "smaller.png", "(5, 4, 1)")


def test_broken_images_are_refused_by_name(tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "broken.png").write_bytes(whole[: len(whole) // 2])
    refuse(tmp_path, "broken.png", "cannot be read")
    (tmp_path / "broken.png").write_bytes(b"nothing")
    refuse(tmp_path, "broken.png", "cannot be read")
    Image.fromarray(np.zeros((5, 4), dtype=np.uint16)).save(tmp_path / "broken.png")
    refuse(tmp_path, "broken.png", "8 bits")


@pytest.mark.parametrize(
    "array, word",
    [
        (np.full((2, 3, 3), np.nan), "NaN"),
        (np.full((2, 3, 3), 2.0), "outside [-1, 1]"),
        (np.zeros((2, 3, 3), dtype=np.int64), "int64"),
        (np.zeros((2, 3), dtype=np.uint8), "(2, 3)"),
        (np.zeros((2, 3, 8, 8), dtype=np.uint8), "channels, last"),  # channels first
        (np.zeros((0, 8, 8), dtype=np.uint8), "(0, 8, 8, 1)"),
    ],
)
def test_arrays_that_are_not_images_are_refused(tmp_path, array, word):
    np.save(tmp_path / "a.npy", array)
    refuse(tmp_path / "a.npy", "a.npy", word)


def test_nothing_is_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{"run": "me"}], dtype=object), allow_pickle=True)
    refuse(tmp_path / "a.npy", "cannot be read")


def test_paths_without_images_are_refused(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere", "does not exist")
    refuse(tmp_path, "no images")
    for name in ("a.txt", "a.npz", "a.npy"):
        (tmp_path / name).write_text("text")
        refuse(tmp_path / name, name)
