"""The turbulence that is computed: its law, and the file that keeps it."""

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.data import turbulence
from nidiff.data.turbulence import turbulent_vorticity


def power(fields: torch.Tensor) -> torch.Tensor:
    """The mean power at wavenumber 0, 1, 2, … along both axes."""
    squared = torch.fft.fft2(fields, norm="ortho").abs().square().mean(tuple(range(fields.ndim - 2)))
    half = fields.shape[-1] // 2
    return (squared[0, :half] + squared[:half, 0]) / 2


@pytest.fixture(scope="module")
def fields() -> torch.Tensor:
    return turbulent_vorticity(8, 3, 0, size=32, copies=2, spin_up=6.0)


def test_the_spectrum_is_steep_beyond_the_forcing(fields):
    found = power(fields)
    assert found[2:5].min() > 10 * found[8] > 100 * found[15]
    assert found[0] < 1e-2 * found[1]  # vorticity on a periodic square has no mean, but for the instrument's noise
    noise = torch.randn(fields.shape, generator=torch.Generator().manual_seed(0))
    assert not power(noise)[2:5].min() > 10 * power(noise)[8]


def test_it_is_not_gaussian(fields):
    """Increments over one grid point have fat tails; those of a Gaussian field of the same spectrum have none."""

    def kurtosis(x: torch.Tensor) -> float:
        steps = (x - x.roll(1, -1)).flatten().double()
        return ((steps**4).mean() / steps.square().mean() ** 2).item()

    modes = torch.fft.rfft2(fields)
    other = torch.fft.rfft2(torch.randn(fields.shape, generator=torch.Generator().manual_seed(1)))
    gaussian = torch.fft.irfft2(other * modes.abs().square().mean((0, 1)).sqrt())
    assert kurtosis(fields) > 3.6
    assert kurtosis(gaussian) < 3.3


def test_copies_are_symmetric_images_of_one_field(fields):
    """Turning, mirroring and shifting keep the power on each ring of wavenumbers; other snapshots have another."""

    def rings(field: torch.Tensor) -> torch.Tensor:
        squared = torch.fft.fft2(field, norm="ortho").abs().square()
        k = torch.fft.fftfreq(32, 1 / 32)
        ring = (k[:, None] ** 2 + k[None, :] ** 2).sqrt().round().long()
        return torch.zeros(24).index_add(0, ring.flatten(), squared.flatten())[1:6]

    one, other, later = (rings(fields[0, index]) for index in (0, 1, 2))
    assert not torch.equal(fields[0, 0], fields[0, 1])
    assert torch.allclose(one, other, rtol=0.02)
    assert not torch.allclose(one, later, rtol=0.02)


def test_a_seed_decides(fields):
    again = {seed: turbulent_vorticity(1, 1, seed, size=16, spin_up=0.2) for seed in (0, 1)}
    assert torch.equal(again[0], turbulent_vorticity(1, 1, 0, size=16, spin_up=0.2))
    assert not torch.allclose(again[0], again[1], rtol=0.1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIZE": 16, "SNAPSHOTS": 2, "COPIES": 2, "SPIN_UP": 0.1, "EVERY": 0.05}.items():
        monkeypatch.setattr(turbulence, name, value)
    monkeypatch.setattr(turbulence, "MEMBERS", {"train": 3, "test": 2})


@pytest.mark.usefixtures("small")
def test_it_is_a_named_data_set_of_two_parts(tmp_path):
    train, test = (nidiff.load_dataset("turbulence", data_dir=tmp_path, split=split) for split in ("train", "test"))
    assert (len(train), train.shape, train.grid.dtype) == (12, (1, 16, 16), "float32")
    assert len(test) == 8
    assert test.scaling == train.scaling  # that of the training part
    assert train.all().std() == pytest.approx(1.0, abs=0.02)
    files = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert nidiff.load_dataset("turbulence", data_dir=tmp_path).all().equal(train.all())
    assert files == {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}  # computed once


@pytest.mark.usefixtures("small")
def test_bad_input_is_named(tmp_path, monkeypatch):
    with refused("size"):
        nidiff.load_dataset("turbulence", data_dir=tmp_path, size=8)
    with refused("split"):
        nidiff.load_dataset("turbulence", data_dir=tmp_path, split="all")
    (tmp_path / "file").touch()
    monkeypatch.setattr(turbulence, "turbulent_vorticity", None)  # below, nothing is computed
    with refused("data_dir", None):
        nidiff.load_dataset("turbulence", data_dir=tmp_path / "file")
    file = tmp_path / "turbulence-train.npz"
    np.savez(file, vorticity=np.zeros((2, 16, 16), np.float32))
    with refused("data_dir"):
        nidiff.load_dataset("turbulence", data_dir=tmp_path)
    file.write_bytes(b"nothing")
    with refused("file"):
        nidiff.load_dataset("turbulence", data_dir=tmp_path)
