"""Images of a path come in as float32 [N, C, H, W] in [-1, 1], or the file at fault is named."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused

import nidiff


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)


def as_float(pixels):
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def save(folder, pixels):
    folder.mkdir(exist_ok=True)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{i}.png")


def open_images(path, **options):
    return nidiff.load_dataset(path, scaling="none", progress=False, **options)


def load_images(path, **options):
    return nidiff.load_dataset(path, scaling="none", memory_limit=None, **options).all()


def refuse(path, *words, argument="data"):
    with pytest.raises(nidiff.InputError) as error:
        load_images(path)
    assert error.value.argument == argument
    for word in words:
        assert word in str(error.value)


def test_a_folder_is_read_with_its_subfolders_in_order_of_name(tmp_path, pixels):
    (tmp_path / "b").mkdir()
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    Image.fromarray(pixels[1]).save(tmp_path / "b" / "x.bmp")
    Image.fromarray(pixels[2]).save(tmp_path / "c.PNG")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "._a.png").write_text("what some systems leave beside a file")
    with pytest.warns(UserWarning, match=r"not read: 1 \.txt\."):
        images = load_images(tmp_path)
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, as_float(pixels))


def test_each_kind_of_8_bit_image_has_its_channels(tmp_path, pixels):
    for mode, channels in (("1", 1), ("L", 1), ("P", 3), ("RGB", 3), ("RGBA", 4)):
        Image.fromarray(pixels[0]).convert(mode).save(tmp_path / "a.png")
        assert load_images(tmp_path).shape == (1, channels, 5, 4)
    Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).save(tmp_path / "a.png")
    assert load_images(str(tmp_path)).tolist() == [[[[-1.0, 1.0]]]]


def test_unlike_images_are_refused_by_name(tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    Image.fromarray(pixels[1, :4]).save(tmp_path / "smaller.png")
    refuse(tmp_path, "smaller.png", "a.png", "give size")
    assert load_images(tmp_path, size=(4, 4)).shape == (2, 3, 4, 4)
    Image.fromarray(pixels[1]).convert("L").save(tmp_path / "smaller.png")
    refuse(tmp_path, "smaller.png", "5 × 4 with 1 channels", "channels")
    assert load_images(tmp_path, channels=1).shape == (2, 1, 5, 4)


def test_broken_images_are_refused_by_name(tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing"):
        (tmp_path / "broken.png").write_bytes(content)
        refuse(tmp_path, "broken.png", "cannot be read")
    (tmp_path / "broken.png").unlink()
    Image.fromarray(np.zeros((5, 4), dtype=np.int32)).save(tmp_path / "whole.tiff")  # of 32 bits
    refuse(tmp_path, "whole.tiff", "8 bits")


def test_what_holds_no_images_is_refused(tmp_path):
    file = tmp_path / "a.npy"
    refuse(tmp_path / "nowhere", "nowhere", "existing path")
    refuse(tmp_path, "no data")
    (tmp_path / "a.txt").write_text("text")
    refuse(tmp_path / "a.txt", "a.txt")
    for array in (np.full((2, 3, 3), np.nan), *(np.zeros((2, 3, 3), kind) for kind in ("M8[s]", "S3", complex))):
        np.save(file, array)
        refuse(file, "a.npy", "NaN" if array.dtype == float else str(array.dtype))
    np.save(file, np.zeros((0, 8, 8), np.uint8))
    refuse(file, "a.npy")
    for array in (np.zeros(3, np.uint8), np.zeros((2, 3, 8, 8), np.uint8)):
        np.save(file, array)
        refuse(file, str(array.shape), "NCHW", argument="layout")


def test_a_crop_keeps_the_centre_as_it_is(tmp_path, pixels):
    Image.fromarray(pixels[0]).save(tmp_path / "a.png")  # 5 high, 4 wide
    torch.testing.assert_close(load_images(tmp_path, size=4), as_float(pixels[:1, :4]))
    tall = np.zeros((1, 9, 3, 3), dtype=np.uint8)
    tall[:, 3:6] = pixels[0, :3, :3]
    np.save(tmp_path / "a.npy", tall)
    torch.testing.assert_close(load_images(tmp_path / "a.npy", size=(3, 3)), as_float(pixels[:1, :3, :3]))


def test_resizing_takes_the_mean_over_what_a_pixel_covers(tmp_path):
    checks = np.indices((64, 64)).sum(0) % 2 * 200
    Image.fromarray(checks.astype(np.uint8)).save(tmp_path / "a.png")
    small = load_images(tmp_path, size=8)
    torch.testing.assert_close(small, torch.full((1, 1, 8, 8), 100 / 127.5 - 1), atol=2 / 127.5, rtol=0)


def test_channels_are_made_alike_in_folders_and_arrays(tmp_path, pixels):
    save(tmp_path / "folder", pixels)
    np.save(tmp_path / "a.npy", pixels)
    grey = load_images(tmp_path / "folder", channels=1)
    assert grey.shape == (3, 1, 5, 4)
    assert torch.equal(grey, load_images(tmp_path / "a.npy", channels=1))
    stream = open_images(tmp_path / "a.npy", channels=1, memory_limit=0)
    assert not isinstance(stream.values, torch.Tensor)
    assert torch.equal(grey, stream.all())
    assert torch.equal(grey[1:2], load_images(tmp_path / "folder" / "1.png", channels=1))  # one picture
    np.save(tmp_path / "a.npy", pixels[..., 0])
    assert torch.equal(load_images(tmp_path / "a.npy", channels=3), as_float(pixels[..., :1].repeat(3, -1)))


def test_photographs_are_turned_upright(tmp_path):
    halves = np.repeat(np.uint8([[0, 255]]), 8, 0).repeat(8, 1)  # 8 high, 16 wide, the right half white
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter, clockwise
    Image.fromarray(halves).save(tmp_path / "a.jpg", exif=exif, quality=100)
    upright = load_images(tmp_path)
    assert upright.shape == (1, 1, 16, 8)
    assert (upright[..., :8, :] < 0).all()
    assert (upright[..., 8:, :] > 0).all()


@pytest.mark.parametrize("memory_limit", [None, 0], ids=["memory", "stream"])
def test_corrupt_images_are_left_out_and_listed(tmp_path, pixels, memory_limit):
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1b.png").write_bytes(whole[: len(whole) * 2 // 3])  # has a good beginning
    if memory_limit == 0:  # a stream meets it when it reads it
        with pytest.raises(nidiff.InputError, match=r"1b\.png.*skip_corrupt"):
            open_images(tmp_path, memory_limit=0).batch(torch.tensor([0, 2]))
    (tmp_path / "0.png").write_bytes(b"nothing")
    images = open_images(tmp_path, skip_corrupt=True, memory_limit=memory_limit)
    assert images.skipped == [str(tmp_path / "0.png"), str(tmp_path / "1b.png")]
    assert len(images) == 2
    torch.testing.assert_close(images.batch(torch.arange(2)), as_float(pixels[1:]))
    for name in ("1.png", "2.png"):
        (tmp_path / name).write_bytes((tmp_path / "1b.png").read_bytes())
    with pytest.raises(nidiff.InputError, match="all the other"):
        open_images(tmp_path, skip_corrupt=True, memory_limit=memory_limit)


def test_a_stream_gives_the_same_bits_as_memory(tmp_path):
    random = np.random.default_rng(1)
    for i, (height, width) in enumerate(random.integers(20, 40, (12, 2))):
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.convert(["RGB", "L", "P"][i % 3]).save(tmp_path / f"{i}.{['png', 'bmp', 'tiff', 'webp'][i % 4]}")
    memory = open_images(tmp_path, size=(16, 24), channels=3)
    stream = open_images(tmp_path, size=(16, 24), channels=3, memory_limit=12 * 3 * 16 * 24 - 1)
    assert not isinstance(stream.values, torch.Tensor)
    assert (len(stream), stream.shape, memory.shape) == (12, (3, 16, 24), (3, 16, 24))
    index = torch.tensor([7, 0, 11, 7])
    flip = torch.tensor([True, False, True, False])
    assert torch.equal(stream.batch(index), memory.batch(index))
    assert torch.equal(stream.batch(index, flip), memory.batch(index, flip))


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff", "bmp"])
@pytest.mark.filterwarnings("ignore")
def test_any_damage_to_a_file_is_an_image_or_an_input_error(tmp_path, suffix):
    random = np.random.default_rng(2)
    file = tmp_path / f"a.{suffix}"
    Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
    whole = file.read_bytes()
    for _ in range(20):
        damaged = bytearray(whole)
        for place in random.integers(0, min(len(whole), 200), 3):
            damaged[place] = random.integers(256)
        file.write_bytes(damaged)
        with suppress(nidiff.InputError):
            load_images(file.parent, size=8, channels=3)


def test_what_cannot_be_fitted_is_refused(tmp_path):
    for size in (0, -1, (3,), (3, 0), (3, 4, 5)):
        with refused("size"):
            load_images(tmp_path, size=size)
    with refused("channels"):
        load_images(tmp_path, channels=2)
    np.save(tmp_path / "a.npy", np.random.default_rng(0).uniform(-1, 1, (2, 6, 6)))
    assert load_images(tmp_path / "a.npy", size=6, channels=1).shape == (2, 1, 6, 6)
    with refused("size"):
        load_images(tmp_path / "a.npy", size=3)
