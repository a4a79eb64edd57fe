"""A seed is an image: whatever the batch, the number of processes, and however often the job was killed."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from problems import refused, untrained_model

import nidiff
from nidiff.cli import main
from nidiff.data.dataset import quantise
from nidiff.generation import folder as sample_folder
from nidiff.generation.folder import SampleFolder
from nidiff.generation.job import Job, draw_seeds, plan_job
from nidiff.generation.loaded_model import SingleProcess, open_model
from nidiff.model.folder import save_model
from nidiff.notation import parse_seeds, seeds_text
from nidiff.sampling.tile import Tiled, tile_size
from nidiff.training.experiment import Experiment

FLAGS = ("--seeds", "0-19", "--num-steps", "4", "--tile", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return untrained_model(tmp_path_factory.mktemp("untrained") / "model")


@pytest.fixture
def sample(model, capsys):
    def run(out, *flags):
        code = main(["sample", str(model), "--out", str(out), *FLAGS, *flags])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def straight(model, tmp_path_factory) -> Path:
    """The job that nobody disturbed."""
    out = tmp_path_factory.mktemp("jobs") / "straight"
    assert main(["sample", str(model), "--out", str(out), *FLAGS, "--format", "png"]) == 0
    return out


def stored(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "samples.npz", allow_pickle=False) as content:
        return dict(content)


# The sampler ------------------------------------------------------------------------------------------------------


def test_the_sampler_of_a_run_is_the_one_it_was_trained_with(model, tmp_path):
    """Its pictures are what a user has seen. Negative controls: a model without a run, and a sampler that is named."""
    experiment = Experiment(sampler="heun:spacing=logsnr", num_steps=7)
    (tmp_path / "experiment.json").write_text(json.dumps(experiment.to_json()))
    alone = open_model(model, SingleProcess(torch.device("cpu")))
    of_run = alone._replace(path=tmp_path)

    def used(*asked) -> tuple[str, int, str]:
        job = plan_job(*asked)
        return job.sampler, job.num_steps, job.spacing

    assert used(of_run) == ("heun", 7, "logsnr")
    assert used(of_run, None, 3) == ("heun", 3, "logsnr")
    assert used(of_run, "ddim") == ("ddim", 20, "trailing")
    assert used(alone) == ("dpmpp_2m", 20, "trailing")


# What is written -------------------------------------------------------------------------------------------------


def test_the_files_are_what_the_library_draws(model, straight):
    denoiser = nidiff.load_model(model)
    expected = nidiff.sample(denoiser, (20, 1, 8, 8), sampler="dpmpp_2m", num_steps=4, generator=range(20))
    found = stored(straight)
    assert found["seeds"].tolist() == list(range(20))
    assert found["arr_0"].dtype == np.uint8
    assert found["arr_0"].shape == (20, 8, 8, 1)
    difference = found["arr_0"].astype(int) - quantise(expected).movedim(1, -1).numpy()
    assert np.abs(difference).max() <= 1  # the library's batch is another, so it rounds otherwise
    for seed in range(20):
        with Image.open(straight / "png" / f"{seed:06d}.png") as picture:
            assert np.array_equal(np.asarray(picture), found["arr_0"][seed, :, :, 0])
    assert not (straight / "parts").exists()
    with Image.open(straight / "grid.png") as grid:
        first = np.asarray(grid)[::8, ::8]  # each pixel is 8 × 8 there
        assert np.array_equal(first[:8, :8], found["arr_0"][0, :, :, 0])
        assert np.array_equal(first[9:17, :8], found["arr_0"][5, :, :, 0])  # the second of four rows


@pytest.mark.parametrize("channels", [2, 3])
def test_a_channel_is_never_shown_as_transparency(tmp_path, channels):
    """One and three channels are grey and colours; others stand side by side in grey."""
    shape, job = (channels, 4, 6), Job("model", "ddim", 5, "uniform")
    images = torch.randint(256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    folder = SampleFolder(tmp_path / "s", job, shape, "png")
    folder.add([0, 1, 2], images)
    folder.finish([0, 1, 2])
    with Image.open(folder.path / "png" / "000001.png") as picture, Image.open(folder.path / "grid.png") as grid:
        found, enlarged = np.asarray(picture), 64 // picture.width
        shown = np.asarray(grid)[::enlarged, ::enlarged]
        assert picture.mode == grid.mode == ("RGB" if channels == 3 else "L")
    expected = images[1].movedim(0, -1) if channels == 3 else torch.cat(list(images[1]), 1)
    assert np.array_equal(found, expected.numpy())
    assert np.array_equal(shown[:4, found.shape[1] + 1 :][:, : found.shape[1]], found)  # the second of the first row


def test_floats_are_the_images_before_rounding_and_clipped_as_asked(sample, straight, tmp_path):
    assert json.loads((straight / "job.json").read_text())["job"]["clip"] == 1.0  # that of the model
    code, out, log = sample(tmp_path / "f", "--floats", "--format", "png")
    assert (code, out.strip(), "grid.png" in log) == (0, str(tmp_path / "f"), True)
    floats = stored(tmp_path / "f")["arr_0"]
    assert floats.dtype == np.float32
    assert np.array_equal(quantise(torch.from_numpy(floats)).numpy(), stored(straight)["arr_0"])
    with Image.open(tmp_path / "f" / "png" / "000003.png") as picture:  # in whole numbers
        assert np.array_equal(np.asarray(picture), stored(straight)["arr_0"][3, :, :, 0])
    _, out, _ = sample(tmp_path / "tight", "--clip", "0.2", "--floats", "--seeds", "3", "--json")
    assert json.loads(out) == {"out": str(tmp_path / "tight"), "images": 1, "seeds": "3", "shape": [1, 8, 8]}
    assert np.abs(stored(tmp_path / "tight")["arr_0"]).max() == np.float32(0.2)
    assert sample(tmp_path / "off", "--clip", "0", "--seeds", "3")[0] == 0
    assert json.loads((tmp_path / "off" / "job.json").read_text())["job"]["clip"] is None


# A seed is an image ----------------------------------------------------------------------------------------------


def test_the_network_always_sees_as_many_images():
    class Counting(torch.nn.Module):
        sizes: list[int] = []  # noqa: RUF012

        def forward(self, x, label):
            self.sizes.append(len(x))
            return x * label.reshape(-1, 1)

    net = Counting()
    x, label = torch.randn(11, 3), torch.arange(11)
    assert torch.equal(Tiled(net, 4)(x, label), x * label.reshape(-1, 1))
    assert net.sizes == [4, 4, 4]
    sizes = [tile_size(n, n) for n in (8, 28, 32, 64, 128, 256, 1024)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def test_batches_change_no_bit_and_more_seeds_are_added_to_those_that_are_there(sample, straight, tmp_path):
    assert sample(tmp_path / "g", "--seeds", "0-4,17")[0] == 0
    assert sample(tmp_path / "g", "--seeds", "0-19", "--batch", "3")[0] == 0
    assert (tmp_path / "g" / "samples.npz").read_bytes() == (straight / "samples.npz").read_bytes()
    assert sample(tmp_path / "g", "--seeds", "2")[0] == 0  # and fewer lose none
    assert len(stored(tmp_path / "g")["seeds"]) == 20
    assert sample(tmp_path / "d", "--sampler", "ddim:eta=1,spacing=karras", "--seeds", "20-22")[0] == 0
    assert not np.array_equal(stored(tmp_path / "d")["arr_0"], stored(straight)["arr_0"][:3])  # other seeds


# Killed, and on two processes ------------------------------------------------------------------------------------

KILLED = """
import json, os, signal, sys
import torch
from nidiff.cli import main
import nidiff.generation.folder, diffusers, matplotlib.figure
torch.set_num_threads(1)
replace, calls = os.replace, 0

def kill_at(moment):
    # Every file of the job gets its name here: die before it, or just after.
    def dying(source, target):
        global calls
        calls += 1
        if calls == moment // 2 + 1:
            if moment % 2:
                replace(source, target)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = dying

moments, commands = json.loads(sys.argv[1])
for arguments in commands:
    kills = 0
    for moment in [*moments, None]:  # each life dies at its moment, if it gets there; the last one lives
        child = os.fork()
        if child == 0:
            if moment is not None:
                kill_at(moment)
            os._exit(main(arguments))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            break
        kills += 1
    if code:
        sys.exit(code)
    print("killed", kills)
"""
# Before and after each of the first four files; for `make test`, around the first, before the second, after the third.
MOMENTS = [*range(8)] if int(os.environ.get("NIDIFF_HOSTILE", "1")) > 1 else [0, 1, 2, 5]


def run_killed(commands: list[list[str]], code: str = KILLED) -> None:
    """Each command in one life after another, until it ends; all in one process, which imports everything once."""
    program = [sys.executable, "-c", code, json.dumps([MOMENTS, commands])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    kills = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("killed ")]
    assert len(kills) == len(commands)
    assert min(kills) > len(MOMENTS) // 2, kills


@pytest.mark.slow
def test_killed_again_and_again_it_leaves_the_same_files(model, straight, tmp_path):
    own = ["sample", str(model), *FLAGS, "--batch", "4"]
    run_killed([[*own, "--out", str(tmp_path / "out"), "--format", "png"]])
    for name in (*(f"png/{seed:06d}.png" for seed in range(20)), "samples.npz", "grid.png"):
        assert (tmp_path / "out" / name).read_bytes() == (straight / name).read_bytes(), name
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"job.json", "grid.png", "png", "samples.npz"}


@pytest.mark.slow
def test_two_processes_draw_the_same_images(model, straight, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "nidiff", "sample", str(model), "--out", str(tmp_path / "p"), *FLAGS, "--batch", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "p" / "samples.npz").read_bytes() == (straight / "samples.npz").read_bytes()


def test_a_second_job_learns_who_has_the_folder(sample, straight, tmp_path, monkeypatch):
    """It comes while the first one draws."""
    draw, second = sample_folder._draw, []

    def interrupted(*arguments):
        monkeypatch.setattr(sample_folder, "_draw", draw)
        second.append(sample(tmp_path / "a"))
        draw(*arguments)

    monkeypatch.setattr(sample_folder, "_draw", interrupted)
    assert sample(tmp_path / "a", "--format", "png")[0] == 0
    ((code, _, log),) = second
    assert (code, f"is in use by process {os.getpid()}" in log) == (2, True)
    for name in ("samples.npz", "job.json", "png/000007.png"):
        assert (tmp_path / "a" / name).read_bytes() == (straight / name).read_bytes()


def test_pictures_that_are_cut_short_or_swapped_are_drawn_again(sample, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "p")
    place = tmp_path / "p" / "png"
    whole, before = (place / "000003.png").read_bytes(), (place / "000010.png").stat().st_mtime_ns
    (place / "000003.png").write_bytes(whole[: len(whole) // 2])
    (place / "000004.png").write_bytes(b"")
    flipped = bytearray(whole)
    flipped[whole.index(b"IDAT") + 20] ^= 1
    (place / "000005.png").write_bytes(flipped)
    (place / "000006.png").write_bytes(whole)  # the image of another seed
    Image.new("RGB", (8, 8)).save(place / "000007.png")
    Image.new("L", (8, 8)).save(place / "000009.png", format="bmp")
    assert sample(tmp_path / "p", "--format", "png")[0] == 0
    for seed in range(20):
        assert (place / f"{seed:06d}.png").read_bytes() == (straight / "png" / f"{seed:06d}.png").read_bytes()
    assert (place / "000010.png").stat().st_mtime_ns == before  # one that is whole is kept


def test_images_of_another_kind_or_job_are_not_merged(sample, straight, tmp_path):
    found = stored(straight)
    others = {
        "uint8": {**found, "arr_0": found["arr_0"].astype(np.float32)},
        "9, 8, 1": {**found, "arr_0": np.zeros((20, 9, 8, 1), np.uint8)},
        "another job": {**found, "job": np.array("0" * 64)},
        "rising seeds": {**found, "seeds": found["seeds"][::-1]},
        "header": None,
    }
    for number, (name, arrays) in enumerate(others.items()):
        place, folder = ("parts/3-17.npz", "samples.npz")[number % 2], tmp_path / name
        folder.mkdir()
        shutil.copy(straight / "job.json", folder)
        (folder / place).parent.mkdir(exist_ok=True)
        if arrays is not None:
            np.savez(folder / place, **arrays)
        else:  # 10¹² images in a file of some bytes
            with zipfile.ZipFile(folder / place, "w") as archive, archive.open("arr_0.npy", "w") as member:
                header = {"descr": "|u1", "fortran_order": False, "shape": (10**12, 8, 8, 1)}
                np.lib.format.write_array_header_1_0(member, header)
        content = (folder / place).read_bytes()
        code, _, log = sample(folder, "--seeds", "0-20")
        assert (code, f"{place.split('/')[-1]}'" in log, name in log, "delete it" in log) == (2, True, True, True), log
        assert (folder / place).read_bytes() == content


# Bad input -------------------------------------------------------------------------------------------------------


def test_the_samples_of_another_job_are_left_alone(sample, straight, tmp_path):
    before = (straight / "samples.npz").read_bytes()
    code, _, log = sample(straight, "--num-steps", "5")
    assert (code, "--num-steps: 4, not 5" in log) == (2, True)
    assert (straight / "samples.npz").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    assert sample(tmp_path / "mine")[0] == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_model_that_gives_nan_is_said_to(model, tmp_path, capsys):
    assert main(["sample", str(tmp_path)]) == 2
    assert "is not a model or a run" in capsys.readouterr().err
    broken = tmp_path / "broken"
    denoiser = nidiff.load_model(model)
    with torch.no_grad():
        denoiser.net.conv_out.bias.fill_(float("nan"))
    save_model(denoiser, broken)
    assert main(["sample", str(broken), *FLAGS, "--out", str(tmp_path / "n")]) == 2
    assert "ended in NaN" in capsys.readouterr().err
    assert not (tmp_path / "n" / "samples.npz").exists()


def test_seeds_are_read_and_written():
    for words, seeds in (("7", [7]), ("0-3", [0, 1, 2, 3]), ("9, 1-2,2", [1, 2, 9])):
        assert parse_seeds(words) == seeds
        assert parse_seeds(seeds_text(seeds)) == seeds
    for words in ("", "a", "1-", "5-2", "-1", "1.5", "1--2", "0x3"):
        with pytest.raises(nidiff.InputError, match="seeds"):
            parse_seeds(words)


# Precision -------------------------------------------------------------------------------------------------------


def test_bf16_is_another_job_with_nearly_the_same_images(monkeypatch):
    model = open_model(Path("digits-ddpm"), SingleProcess(torch.device("cpu")))
    usual = plan_job(model, "ddim", 10)
    assert "precision" not in usual.to_json()  # so that what was drawn before is not drawn again
    monkeypatch.setattr("nidiff.generation.job.has_bf16", lambda device: True)
    fast = plan_job(model, "ddim", 10, precision="bf16")
    assert fast.name != usual.name
    exact, rounded = (
        draw_seeds(model.denoiser, job, range(8), model.shape, lambda visit: None) for job in (usual, fast)
    )
    apart = (exact - rounded).abs()
    assert 0 < apart.mean() < 0.02
    assert rounded.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_variance_that_steps_lose_is_measured_once_for_all_batches(monkeypatch, tmp_path, precision):
    monkeypatch.setattr("nidiff.generation.job.has_bf16", lambda device: True)
    calls = []
    for count in (2, 8):
        model, counted = open_model(Path("digits-ddpm"), SingleProcess(torch.device("cpu"))), []
        model.denoiser.net.register_forward_hook(lambda *_, counted=counted: counted.append(1))
        job = plan_job(model, "angle_2m:rescale=true", 3, tile=2, precision=precision)
        folder = SampleFolder(tmp_path / str(count), job, model.shape, grid=model.grid)
        sample_folder.run_job(model.denoiser, folder, range(count), batch=2, state=SingleProcess(torch.device("cpu")))
        calls.append(len(counted))
    assert calls[1] - calls[0] == 3 * 3  # three more batches, of three steps
    assert calls[0] > 3 * 3  # the control: measuring takes more than that


def test_emulated_bf16_is_refused(monkeypatch):
    model = open_model(Path("digits-ddpm"), SingleProcess(torch.device("cpu")))
    monkeypatch.setattr("nidiff.generation.job.has_bf16", lambda device: False)
    with refused("precision"):
        plan_job(model, precision="bf16")
    with refused("precision"):
        plan_job(model, precision="fp64")
