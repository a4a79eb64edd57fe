"""A model is an object: what save_model writes, load_model gives back to the bit, whatever the network and the data."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from problems import refused
from safetensors.torch import load_file, save_file
from torch import Tensor

import nidiff
from nidiff.covariance.config import BASES
from nidiff.diffusion.scaling import PIXELS
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.diffusion.target import TARGETS
from nidiff.errors import FileError
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.folder import same_covariance, save_process
from nidiff.model.network import NETWORKS, unet2d

# What a user writes in a module of their own: a network with shared weights, a family of Σ, a target and a schedule.
MINE = """
import torch, nidiff
from nidiff.covariance.basis import Basis
from nidiff.diffusion.target import Target
from nidiff.recipe import remembered


class Mine(torch.nn.Module):
    def __init__(self, size=6, channels=1):
        super().__init__()
        self.first = torch.nn.Linear(size, size)
        self.second = torch.nn.Linear(size, size)
        self.second.weight = self.first.weight
        self.register_buffer("counted", torch.tensor(3))

    def forward(self, x, label):
        return self.second(torch.tanh(self.first(x) + 0.01 * label.reshape(-1, *[1] * (x.ndim - 1))))


class HaarBasis(Basis):
    def __init__(self, shape):
        self.event_shape = tuple(shape)

    def analyse(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a + b, a - b], -1).flatten(-2) / 2**0.5

    synthesise = analyse

    def arguments(self):
        return {"shape": self.event_shape}


def Haar(shape, weights):
    return nidiff.Covariance(weights, HaarBasis(shape), normalize=True)


def half(x0, eps, level, covariance):
    return 2 * x0


def from_half(signal, sigma):
    return 0.0 * signal, 0.5 + 0.0 * signal


@remembered
def steep(num_levels):
    return nidiff.Schedule(torch.linspace(4, -5, num_levels, dtype=torch.float64))


TARGET = Target(half, from_half, 0.0)
"""
REGISTER = """
from nidiff.covariance.config import BASES
from nidiff.diffusion.schedules import SCHEDULES
from nidiff.diffusion.target import TARGETS

BASES["HaarBasis"], SCHEDULES["steep"], TARGETS["half"] = HaarBasis, steep, TARGET
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The module as an object, not registered yet."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    import mine

    yield mine
    del sys.modules["mine"]


@pytest.fixture
def registered(mine, monkeypatch):
    monkeypatch.setitem(BASES, "HaarBasis", mine.HaarBasis)
    monkeypatch.setitem(SCHEDULES, "steep", mine.steep)
    monkeypatch.setitem(TARGETS, "half", mine.TARGET)
    return mine


def seeded(kind, *args, **options):
    torch.manual_seed(0)
    return kind(*args, **options).eval()


def signals(length=64):
    """diffusers' U-Net of signals, whose time embedding is extra channels."""
    return seeded(diffusers.UNet1DModel, length, None, 1, 1, extra_in_channels=64)


def images():
    return seeded(unet2d, (1, 8, 8), widths=(8,), layers=1, attention=())


def denoiser(net, shape=(8, 8), target="eps", **options):
    return nidiff.Denoiser(
        net, nidiff.Process(nidiff.schedules.ddpm_linear(50), nidiff.gaussian_free_field(shape)), target, **options
    )


def drawn(model: nidiff.Denoiser) -> Tensor:
    return nidiff.sample(model, (2, 1, *model.process.covariance.event_shape), num_steps=5, generator=[3, 4])


def assert_same(a: nidiff.Denoiser, b: nidiff.Denoiser) -> None:
    assert same_covariance(a.process.covariance, b.process.covariance)
    assert torch.equal(a.process.schedule.logsnr, b.process.schedule.logsnr)
    assert a.process.schedule.to_config() == b.process.schedule.to_config()
    assert (a.target_name, a.clip, a.scaling) == (b.target_name, b.clip, b.scaling)
    assert torch.equal(drawn(a), drawn(b))


# There and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["eps", "noise", "x0", "v", "score"])
def test_a_model_of_images_is_the_same_after_saving(target, tmp_path):
    first = denoiser(images(), target=target, clip=0.7, scaling=PIXELS)
    nidiff.save_model(first, tmp_path / "m")
    second = nidiff.load_model(tmp_path / "m")
    assert_same(first, second)
    assert not second.net.training
    assert not torch.equal(drawn(second.clipped(None)), drawn(first))  # the clipping was the model's


def test_a_model_of_signals_opens(tmp_path):
    """A 1-D model of diffusers; its sample_size is a number, and by default one that says nothing."""
    for length in (64, 65536):
        first = denoiser(signals(length), (64,), "v", clip=3.0, scaling=nidiff.Scaling((2.0,), (-1.0,)))
        nidiff.save_model(first, tmp_path / str(length))
        assert_same(first, nidiff.load_model(tmp_path / str(length)))


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_any_network_on_any_number_of_axes(shape, mine, tmp_path):
    first = denoiser(seeded(mine.Mine), shape, "x0", scaling=nidiff.Scaling(2.0))
    nidiff.save_model(first, tmp_path / "m", {"data": "volumes of rock"})
    own = mine.Mine()
    second = nidiff.load_model(tmp_path / "m", net=own)
    assert second.net is own
    assert own.first.weight is own.second.weight
    assert_same(first, second)
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| data | volumes of rock |" in card
    assert "net=" in card
    assert len(load_file(tmp_path / "m" / "network" / "weights.safetensors")) == 4  # the shared weight once


def test_schedules_without_a_name_and_arrays_of_sigma_are_kept(mine, tmp_path):
    schedule = nidiff.Schedule([3.0, 1.0, -0.5, -2.0, -4.0], "signal").shifted(0.3)
    cov = 0.5 * nidiff.Identity((6,)) + nidiff.Fourier((6,), torch.tensor([3.0, 2.0, 1.0, 0.5, 1.0, 2.0]))
    first = nidiff.Denoiser(seeded(mine.Mine), nidiff.Process(schedule, cov), clip=1.0)
    nidiff.save_model(first, tmp_path / "m")
    assert_same(first, nidiff.load_model(tmp_path / "m", mine.Mine()))


def test_a_new_process_gets_the_same_samples(registered, tmp_path):
    """A network, a family of Σ, a target and a schedule of one's own."""
    process = nidiff.Process(registered.steep(30), registered.Haar((2, 6), torch.linspace(0.2, 3, 12)))
    first = nidiff.Denoiser(seeded(registered.Mine), process, "half", clip=2.0, scaling=nidiff.Scaling(5.0, 1.0))
    nidiff.save_model(first, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "scheduler" / "scheduler_config.json").read_text())
    assert config["prediction_type"] == "half"
    code = f"""
from mine import *
{{register}}
from safetensors.torch import save_file
model = nidiff.load_model({str(tmp_path / "m")!r}, net=Mine())
assert (model.target_name, model.clip, model.scaling) == ("half", 2.0, nidiff.Scaling(5.0, 1.0))
save_file({{{{"x": nidiff.sample(model, (2, 1, 2, 6), num_steps=5, generator=[3, 4])}}}}, {str(tmp_path / "x")!r})
"""
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    answer = subprocess.run([sys.executable, "-c", code.format(register=REGISTER)], **run)
    assert answer.returncode == 0, answer.stderr
    assert torch.equal(load_file(tmp_path / "x")["x"], drawn(first))
    answer = subprocess.run([sys.executable, "-c", code.format(register="")], **run)  # whoever did not register them
    assert "InputError" in answer.stderr
    assert "'half' is unknown" in answer.stderr


def test_the_scheduler_and_the_pipeline_know_a_target_of_ones_own(registered, tmp_path):
    process = nidiff.Process(nidiff.schedules.ddpm_linear(30), nidiff.gaussian_free_field((8, 8)))
    first = nidiff.Denoiser(images(), process, "half", clip=1.0, scaling=PIXELS)
    nidiff.save_model(first, tmp_path / "m")
    pipeline = NonIsotropicPipeline.from_pretrained(tmp_path / "m")
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(2, num_inference_steps=5, seeds=[3, 4], output_type="pt").images
    assert torch.equal(made, (drawn(first) / 2 + 0.5).clamp(0, 1))
    by_object = NonIsotropicScheduler(process.covariance, process.schedule, registered.TARGET)
    assert by_object.config.prediction_type == "half"


def test_a_network_can_be_given_for_a_model_of_diffusers_too(tmp_path):
    first = denoiser(images(), clip=1.0)
    nidiff.save_model(first, tmp_path / "m")
    torch.manual_seed(1)
    other = unet2d((1, 8, 8), widths=(8,), layers=1, attention=())
    assert_same(first, nidiff.load_model(tmp_path / "m", net=other))


def test_a_class_of_ones_own_with_a_configuration_is_rebuilt_once_it_is_registered(tmp_path, monkeypatch):
    class Ours(diffusers.UNet2DModel):
        pass

    first = denoiser(Ours.from_config(images().config).eval(), clip=1.0)
    nidiff.save_model(first, tmp_path / "m")
    assert not (tmp_path / "m" / "model_index.json").exists()  # diffusers would import what it names
    with pytest.raises(nidiff.InputError, match="NETWORKS"):
        nidiff.load_model(tmp_path / "m")
    monkeypatch.setitem(NETWORKS, "Ours", Ours)
    second = nidiff.load_model(tmp_path / "m")
    assert type(second.net) is Ours
    assert_same(first, second)


def test_the_former_names_of_attention_are_known(tmp_path):
    """Models that diffusers saved before 2023, such as google/ddpm-cifar10-32."""
    first = denoiser(seeded(unet2d, (1, 8, 8), widths=(8,), layers=1, attention=(0,)), clip=1.0)
    nidiff.save_model(first, tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    file, former = tmp_path / "m" / "unet" / "diffusion_pytorch_model.safetensors", {}
    for name, tensor in load_file(file).items():
        for new, old in {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}.items():
            name = name.replace(f".{new}.", f".{old}.")
        former[name] = tensor
    assert any(".proj_attn." in name for name in former)
    save_file(former, file)
    assert_same(first, nidiff.load_model(tmp_path / "m"))


def test_what_torch_compile_wrapped_is_saved_bare(mine, tmp_path):
    first = denoiser(seeded(mine.Mine), (6,))
    nidiff.save_model(first.with_net(torch.compile(first.net)), tmp_path / "m")
    assert_same(first, nidiff.load_model(tmp_path / "m", mine.Mine()))


def test_a_run_directory_opens_and_sigma_is_there_before_the_network(tmp_path):
    first = denoiser(images(), clip=1.0, scaling=PIXELS)
    run = tmp_path / "run"
    save_process(first, run / "model")
    (run / "experiment.json").write_text("{}")
    assert same_covariance(nidiff.Covariance.load(run), first.process.covariance)
    with pytest.raises(nidiff.InputError, match="--resume"):
        nidiff.load_model(run)
    with pytest.raises(OSError, match="--resume"):
        NonIsotropicPipeline.from_pretrained(run)
    identity = {"settings": "0" * 64}
    (run / "experiment.json").write_text(json.dumps({"identity": identity}))
    nidiff.save_model(first, run / "model", run=identity)
    assert_same(first, nidiff.load_model(run))


# Version 0.1 -----------------------------------------------------------------------------------------------------


def test_a_folder_of_version_0_1_is_refused_by_the_version_that_opens_it(tmp_path):
    """It says nothing of the data's scaling, for it knew only 8-bit images, and its runs have no identity."""
    folder = tmp_path / "m"
    nidiff.save_model(denoiser(images()), folder)
    (folder / "manifest.json").unlink()
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "scaling"}))
    with pytest.raises(FileError, match="version 0.2"):
        nidiff.load_model(folder)
    nidiff.save_model(denoiser(images()), tmp_path / "run" / "model")
    (tmp_path / "run" / "experiment.json").write_text("{}")
    with pytest.raises(FileError, match="version 0.2"):
        nidiff.load_model(tmp_path / "run")


# Refusals --------------------------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_is_refused_before_anything_is_written(mine, tmp_path):
    net, gff = seeded(mine.Mine), nidiff.gaussian_free_field((6,))
    haar = mine.Haar((6,), torch.linspace(1, 2, 6))
    plain, steep = nidiff.schedules.ddpm_linear(9), mine.steep(9)
    cases = {
        "TARGETS": nidiff.Denoiser(net, nidiff.Process(plain, gff), mine.TARGET),
        "BASES": nidiff.Denoiser(net, nidiff.Process(plain, haar)),
        "SCHEDULES": nidiff.Denoiser(net, nidiff.Process(steep, gff)),
        "torch.nn.Module": nidiff.Denoiser(lambda x, label: x, nidiff.Process(plain, gff)),
        r"images \(1, 8, 8\)": denoiser(images(), (6,)),
    }
    for words, model in cases.items():
        with pytest.raises(nidiff.InputError, match=words):
            nidiff.save_model(model, tmp_path / "m")
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


def rewritten(folder: Path, change) -> None:
    """As in a folder of version 0.1, which has no checksums."""
    (folder / "manifest.json").unlink()
    file = folder / "network" / "weights.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_the_weights_of_another_network_are_refused(mine, tmp_path):
    nidiff.save_model(denoiser(seeded(mine.Mine), (6,)), tmp_path / "m")
    with refused("folder"):
        nidiff.load_model(tmp_path / "m")
    with pytest.raises(nidiff.InputError, match=r"shape \(6,"):
        nidiff.load_model(tmp_path / "m", net=mine.Mine(5))
    with pytest.raises(nidiff.InputError, match="no weights for '0.weight'"):
        nidiff.load_model(tmp_path / "m", net=torch.nn.Sequential(torch.nn.Linear(6, 6)))
    for number, (change, words) in enumerate(
        [
            (lambda tensors: tensors.pop("first.bias"), "no weights for 'first.bias'"),
            (lambda tensors: tensors.update(third=torch.ones(2)), "'third'"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "m", folder)
        rewritten(folder, change)
        with pytest.raises(nidiff.InputError, match=words) as caught:
            nidiff.load_model(folder, net=mine.Mine())
        assert "\n" not in str(caught.value)
    (tmp_path / "m" / "manifest.json").unlink()
    (tmp_path / "m" / "network" / "weights.safetensors").write_bytes(b"torn")
    with pytest.raises(OSError, match="weights.safetensors"):
        nidiff.load_model(tmp_path / "m", net=mine.Mine())


def test_nothing_is_unpickled_and_no_class_is_imported_by_name(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    nidiff.save_model(denoiser(images()), tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()  # which would notice the file
    folder = tmp_path / "m" / "unet"
    (folder / "diffusion_pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    assert nidiff.load_model(tmp_path / "m")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    for options in ({}, {"net": images()}):
        with pytest.raises(nidiff.InputError, match="unet"):
            nidiff.load_model(tmp_path / "m", **options)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((folder / "diffusion_pytorch_model.bin").read_bytes())
    assert (tmp_path / "sprung").exists()  # the trap works


def test_a_strangers_classes_are_refused(tmp_path, monkeypatch):
    (tmp_path / "stranger.py").write_text("import pathlib; pathlib.Path(__file__).with_name('sprung').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    nidiff.save_model(denoiser(images()), tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()  # a stranger writes one that fits, or none
    config, index = tmp_path / "m" / "unet" / "config.json", tmp_path / "m" / "model_index.json"
    whole = index.read_text()
    for named in ({"unet": ["stranger", "Net"]}, {"scheduler": ["stranger", "Net"]}, {"unet": "stranger"}):
        index.write_text(json.dumps({**json.loads(whole), **named}))
        with pytest.raises(nidiff.InputError, match="stranger"):
            NonIsotropicPipeline.from_pretrained(tmp_path / "m")
        assert nidiff.load_model(tmp_path / "m")  # unet/config.json names a class that we know
    shutil.copy(tmp_path / "stranger.py", tmp_path / "m" / "unet")
    index.write_text(json.dumps({**json.loads(whole), "_class_name": ["unet/stranger", "Net"]}))
    with pytest.raises(nidiff.InputError, match="stranger"):
        NonIsotropicPipeline.from_pretrained(tmp_path / "m")
    index.write_text(whole)
    assert NonIsotropicPipeline.from_pretrained(tmp_path / "m")
    for name in ("Net", "stranger.Net", "UNetMotionModel", None, ["UNet2DModel"]):
        config.write_text(json.dumps({**json.loads(config.read_text()), "_class_name": name}))
        with pytest.raises(nidiff.InputError, match="NETWORKS"):
            nidiff.load_model(tmp_path / "m")
    assert not (tmp_path / "sprung").exists()


def test_a_model_is_saved_whatever_the_systems_encoding(mine, tmp_path):
    """The card has a Σ, which ASCII, or the encoding of a Windows machine, does not have."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(mine.__file__).parent)!r})
import locale, mine, nidiff
assert locale.getpreferredencoding(False).upper() in ("ANSI_X3.4-1968", "US-ASCII", "ASCII"), "no test"
process = nidiff.Process("ddpm_linear:num_levels=9", nidiff.Identity((4, 4)))
nidiff.save_model(nidiff.Denoiser(mine.Mine(), process), {str(tmp_path / "m")!r})
"""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=plain)
    assert "Σ" in (tmp_path / "m" / "README.md").read_text(encoding="utf-8")


def test_only_a_model_is_replaced(tmp_path):
    """The old model stays until the new one is whole; other people's files stay in any case."""
    first, folder = denoiser(images(), clip=1.0), tmp_path / "m"
    nidiff.save_model(first, folder)

    class Failing(torch.nn.Module):
        def state_dict(self, *args, **kwargs):
            raise OSError(28, "No space left on device")

    with pytest.raises(nidiff.InputError, match="No space left"):
        nidiff.save_model(denoiser(Failing()), folder)
    assert_same(first, nidiff.load_model(folder))
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    nidiff.save_model(first.clipped(2.0), folder)
    assert nidiff.load_model(folder).clip == 2.0
    (tmp_path / "link").symlink_to(folder)
    for clip in (3.0, 4.0):  # twice: the first must not leave anything in the way of the second
        nidiff.save_model(first.clipped(clip), tmp_path / "link")
        assert nidiff.load_model(folder).clip == clip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "m"]
    (folder / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("one")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("mine")
    for other in (folder, tmp_path / "file", tmp_path / "project"):
        with pytest.raises(nidiff.InputError, match="new folder"):
            nidiff.save_model(first, other)
    assert (folder / "thesis.tex").read_text() == "years"
    with pytest.raises(nidiff.InputError, match="cannot be written"):
        nidiff.save_model(first, tmp_path / "file" / "m")
    with pytest.raises(nidiff.InputError, match="is not a model or a run"):
        nidiff.load_model(tmp_path / "project")


# In a pipeline ---------------------------------------------------------------------------------------------------


def test_a_network_of_ones_own_and_other_data_are_no_pipeline(mine, tmp_path):
    """One sentence says what to use instead, and that opens the same folder."""
    scheduler = NonIsotropicScheduler(nidiff.gaussian_free_field((6, 6)), nidiff.schedules.ddpm_linear(30))
    nidiff.save_model(denoiser(seeded(mine.Mine), (6, 6)), tmp_path / "own")
    nidiff.save_model(denoiser(signals(), (64,)), tmp_path / "signals")
    nidiff.save_model(denoiser(images(), scaling=nidiff.Scaling(10.0, 20.0)), tmp_path / "degrees")
    for act in (
        lambda: NonIsotropicPipeline(seeded(mine.Mine), scheduler),
        lambda: NonIsotropicPipeline(lambda x, t: x, scheduler),
        *(partial(NonIsotropicPipeline.from_pretrained, tmp_path / name) for name in ("own", "signals", "degrees")),
    ):
        with pytest.raises(nidiff.InputError, match="nidiff.load_model"):
            act()
    assert nidiff.load_model(tmp_path / "own", net=mine.Mine())
    assert nidiff.load_model(tmp_path / "signals")
    assert nidiff.load_model(tmp_path / "degrees")


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_does_not_change_the_weights_that_are_loaded(default, tmp_path):
    net = unet2d((1, 8, 8), widths=(8,), layers=1, attention=())
    process = nidiff.Process(nidiff.schedules.ddpm_linear(10), nidiff.Identity((8, 8)))
    nidiff.save_model(nidiff.Denoiser(net, process), tmp_path / "model")
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        loaded = nidiff.load_model(tmp_path / "model").net.state_dict()
    finally:
        torch.set_default_dtype(before)
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
