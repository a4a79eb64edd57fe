"""A model is an object: what save_model writes, load_model gives back to the bit, whatever the network and the data."""

import json
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from extensions import ENTRIES, TARGET, Mine, Pairs, even
from problems import refused
from safetensors.torch import load_file, save_file
from torch import Tensor

import nidiff
from nidiff.diffusion.scaling import PIXELS
from nidiff.errors import FileError
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.folder import same_covariance, save_process
from nidiff.model.network import NETWORKS, unet2d


@pytest.fixture
def registered(monkeypatch):
    for registry, name, entry in ENTRIES:
        monkeypatch.setitem(registry, name, entry)


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


def test_a_model_of_images_is_the_same_after_saving(tmp_path):
    for target in ("eps", "noise", "x0", "v", "score"):
        first = denoiser(images(), target=target, clip=0.7, scaling=PIXELS)
        nidiff.save_model(first, tmp_path / "m")
        second = nidiff.load_model(tmp_path / "m")
        assert_same(first, second)
        assert not second.net.training
        assert not torch.equal(drawn(second.clipped(None)), drawn(first))  # the clipping was the model's
    torch.manual_seed(1)
    other = unet2d((1, 8, 8), widths=(8,), layers=1, attention=())  # a network can be given, too
    assert_same(first, nidiff.load_model(tmp_path / "m", net=other))


def test_a_model_of_signals_opens(tmp_path):
    """A 1-D model of diffusers; its sample_size is a number, and by default one that says nothing."""
    for length in (64, 65536):
        first = denoiser(signals(length), (64,), "v", clip=3.0, scaling=nidiff.Scaling((2.0,), (-1.0,)))
        nidiff.save_model(first, tmp_path / str(length))
        assert_same(first, nidiff.load_model(tmp_path / str(length)))


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 4, 6)])
def test_any_network_on_any_number_of_axes(shape, tmp_path):
    first = denoiser(seeded(Mine), shape, "x0", scaling=nidiff.Scaling(2.0))
    nidiff.save_model(first, tmp_path / "m", {"data": "volumes of rock"})
    own = Mine()
    second = nidiff.load_model(tmp_path / "m", net=own)
    assert second.net is own
    assert own.first.weight is own.second.weight
    assert_same(first, second)
    assert "volumes of rock" in (tmp_path / "m" / "README.md").read_text()
    assert len(load_file(tmp_path / "m" / "network" / "weights.safetensors")) == 4  # the shared weight once


def test_schedules_without_a_name_arrays_of_sigma_and_what_torch_compile_wrapped_are_kept(tmp_path):
    schedule = nidiff.Schedule([3.0, 1.0, -0.5, -2.0, -4.0], "signal").shifted(0.3)
    cov = 0.5 * nidiff.Identity((6,)) + nidiff.Fourier((6,), torch.tensor([3.0, 2.0, 1.0, 0.5, 1.0, 2.0]))
    first = nidiff.Denoiser(seeded(Mine), nidiff.Process(schedule, cov), clip=1.0)
    nidiff.save_model(first.with_net(torch.compile(first.net)), tmp_path / "m")
    assert_same(first, nidiff.load_model(tmp_path / "m", Mine()))


def test_a_new_process_gets_the_same_samples_whatever_the_systems_encoding(registered, tmp_path):
    """A network, a family of Σ, a target and a schedule of one's own. The card has a Σ, which ASCII, or the encoding of
    a Windows machine, does not have."""
    process = nidiff.Process(even(30), Pairs((2, 6)))
    first = nidiff.Denoiser(seeded(Mine), process, "twice", clip=2.0, scaling=nidiff.Scaling(5.0, 1.0))
    nidiff.save_model(first, tmp_path / "m")
    config = json.loads((tmp_path / "m" / "scheduler" / "scheduler_config.json").read_text())
    assert config["prediction_type"] == "twice"
    code = """
import locale, nidiff
from extensions import ENTRIES, Mine
from safetensors.torch import save_file
for registry, name, entry in ENTRIES:
    registry[name] = entry
assert locale.getpreferredencoding(False).upper() in ("ANSI_X3.4-1968", "US-ASCII", "ASCII"), "no test"
model = nidiff.load_model("m", net=Mine())
assert (model.target_name, model.clip, model.scaling) == ("twice", 2.0, nidiff.Scaling(5.0, 1.0))
save_file({"x": nidiff.sample(model, (2, 1, 2, 6), num_steps=5, generator=[3, 4])}, "x")
nidiff.save_model(model, "again")
"""
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    plain["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=plain)
    assert torch.equal(load_file(tmp_path / "x")["x"], drawn(first))
    assert "Σ" in (tmp_path / "again" / "README.md").read_text(encoding="utf-8")


def test_the_scheduler_and_the_pipeline_know_a_target_of_ones_own(registered, tmp_path):
    process = nidiff.Process(nidiff.schedules.ddpm_linear(30), nidiff.gaussian_free_field((8, 8)))
    first = nidiff.Denoiser(images(), process, "twice", clip=1.0, scaling=PIXELS)
    nidiff.save_model(first, tmp_path / "m")
    pipeline = NonIsotropicPipeline.from_pretrained(tmp_path / "m")
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(2, num_inference_steps=5, seeds=[3, 4], output_type="pt").images
    assert torch.equal(made, (drawn(first) / 2 + 0.5).clamp(0, 1))
    by_object = NonIsotropicScheduler(process.covariance, process.schedule, TARGET)
    assert by_object.config.prediction_type == "twice"


def test_a_class_of_ones_own_with_a_configuration_is_rebuilt_once_it_is_registered(tmp_path, monkeypatch):
    class Ours(diffusers.UNet2DModel):
        pass

    first = denoiser(Ours.from_config(images().config).eval(), clip=1.0)
    nidiff.save_model(first, tmp_path / "m")
    assert not (tmp_path / "m" / "model_index.json").exists()  # diffusers would import what it names
    with refused("folder"):
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


# Refusals --------------------------------------------------------------------------------------------------------


def test_a_folder_of_version_0_1_is_refused_by_the_version_that_opens_it(tmp_path):
    """It says nothing of the data's scaling, for it knew only 8-bit images."""
    folder = tmp_path / "m"
    nidiff.save_model(denoiser(images()), folder)
    (folder / "manifest.json").unlink()
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "scaling"}))
    with pytest.raises(FileError, match="version 0.2"):
        nidiff.load_model(folder)


def test_what_could_not_be_loaded_is_refused_before_anything_is_written(tmp_path):
    net, gff, plain = seeded(Mine), nidiff.gaussian_free_field((6,)), nidiff.schedules.ddpm_linear(9)
    cases = {
        "TARGETS": nidiff.Denoiser(net, nidiff.Process(plain, gff), TARGET),
        "BASES": nidiff.Denoiser(net, nidiff.Process(plain, Pairs((6,)))),
        "SCHEDULES": nidiff.Denoiser(net, nidiff.Process(even(9), gff)),
        "torch.nn.Module": nidiff.Denoiser(lambda x, label: x, nidiff.Process(plain, gff)),
        r"images \(1, 8, 8\)": denoiser(images(), (6,)),
    }
    for words, model in cases.items():
        with pytest.raises(nidiff.InputError, match=words):
            nidiff.save_model(model, tmp_path / "m")
    assert [*tmp_path.iterdir()] == []


def test_the_weights_of_another_network_are_refused(tmp_path):
    nidiff.save_model(denoiser(seeded(Mine), (6,)), tmp_path / "m")
    for other in (None, Mine(5), torch.nn.Sequential(torch.nn.Linear(6, 6))):
        with refused("folder", "net"):
            nidiff.load_model(tmp_path / "m", net=other)
    (tmp_path / "m" / "manifest.json").unlink()  # which would notice the change
    file, whole = tmp_path / "m" / "network" / "weights.safetensors", Mine().state_dict()
    del whole["second.weight"]
    fewer = {name: tensor for name, tensor in whole.items() if name != "first.bias"}
    for tensors in (fewer, {**whole, "third": torch.ones(2)}, {name: tensor.long() for name, tensor in whole.items()}):
        save_file(tensors, file)
        with refused("folder"):
            nidiff.load_model(tmp_path / "m", net=Mine())
    file.write_bytes(b"torn")
    with pytest.raises(OSError, match="weights.safetensors"):
        nidiff.load_model(tmp_path / "m", net=Mine())


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


def test_a_network_of_ones_own_and_other_data_are_no_pipeline(tmp_path):
    """One sentence says what to use instead."""
    scheduler = NonIsotropicScheduler(nidiff.gaussian_free_field((6, 6)), nidiff.schedules.ddpm_linear(30))
    nidiff.save_model(denoiser(seeded(Mine), (6, 6)), tmp_path / "own")
    nidiff.save_model(denoiser(signals(), (64,)), tmp_path / "signals")
    nidiff.save_model(denoiser(images(), scaling=nidiff.Scaling(10.0, 20.0)), tmp_path / "degrees")
    for act in (
        lambda: NonIsotropicPipeline(seeded(Mine), scheduler),
        lambda: NonIsotropicPipeline(lambda x, t: x, scheduler),
        *(partial(NonIsotropicPipeline.from_pretrained, tmp_path / name) for name in ("own", "signals", "degrees")),
    ):
        with pytest.raises(nidiff.InputError, match="nidiff.load_model"):
            act()


def test_the_default_dtype_of_torch_does_not_change_the_weights_that_are_loaded(tmp_path):
    net = images()
    nidiff.save_model(denoiser(net), tmp_path / "model")
    for default in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(default)
        try:
            loaded = nidiff.load_model(tmp_path / "model").net.state_dict()
        finally:
            torch.set_default_dtype(torch.float32)
        assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
