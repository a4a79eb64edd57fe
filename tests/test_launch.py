"""Runs that a launcher starts: a network that is sharded over two processes is the one that one process trains."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import nidiff
from nidiff.cli import main

TINY = [
    *("--widths", "8", "--attention", "--layers", "1", "--batch-size", "16", "--precision", "fp32", "--dropout", "0"),
    *("--checkpoint-every", "3", "--log-every", "1", "--num-samples", "4", "--num-steps", "3", "--no-report"),
    *("--schedule", "ddpm_linear:num_levels=50", "--accumulation", "2", "--warmup", "0", "--cooldown", "0"),
]
ROUNDING = 2e-4  # Adam turns a gradient of 1e-8 into a step of the size of its rounding
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
BLOCKS = ("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "ResnetBlock2D")


def launch(*words: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "accelerate.commands.launch", *words]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV)


def sharded(out: Path, *flags: str, blocks: tuple[str, ...] = ()) -> str:
    """What a training on two processes prints, each of which holds a part of the network."""
    asked = ("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--main_process_port", "0", *blocks)
    job = launch(*asked, "-m", "nidiff", "train", "--out", str(out), *TINY, *flags)
    output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    return output


def train(out: Path, *flags: str) -> None:
    assert main(["train", "--out", str(out), *TINY, *flags]) == 0


def distance(left: Path, right: Path, step: int) -> float:
    """The largest difference of two checkpoints, in their weights or in the moving average of these."""
    files = [f"checkpoints/{step:06d}/{name}.safetensors" for name in ("model", "ema")]
    pairs = [(load_file(left / file), load_file(right / file)) for file in files]
    assert all(a.keys() == b.keys() for a, b in pairs)
    return max((a[name] - b[name]).abs().max().item() for a, b in pairs for name in a)


@pytest.mark.slow
def test_a_sharded_network_is_trained_resumed_and_finished_like_a_whole_one(tmp_path):
    """And so is the checkpoint of two processes that one resumes, and that of one that two resume."""
    pair, alone, other, two, one, back = (tmp_path / name for name in ("pair", "alone", "other", "two", "one", "back"))
    assert "2 processes, each with a part of the network" in sharded(pair, "--steps", "3")
    train(alone, "--steps", "3")
    train(other, "--steps", "3", "--seed", "1")
    assert distance(alone, pair, 3) < ROUNDING < distance(alone, other, 3)
    shapes = {
        tuple(value.shape) for value in load_file(pair / "model/unet/diffusion_pytorch_model.safetensors").values()
    }
    assert shapes == {tuple(value.shape) for value in nidiff.load_model(alone).net.state_dict().values()}

    for copy, source in ((two, pair), (one, pair), (back, alone)):
        shutil.copytree(source, copy)
    sharded(two, "--steps", "6", "--resume")
    train(one, "--steps", "6", "--resume")
    sharded(back, "--steps", "6", "--resume", blocks=BLOCKS)
    train(alone, "--steps", "6", "--resume")
    assert distance(two, one, 6) < ROUNDING
    assert distance(back, alone, 6) < ROUNDING
    options = {"sampler": "ddim", "num_steps": 3, "generator": [0, 1]}
    x, same, before = (
        nidiff.sample(nidiff.load_model(run, checkpoint=step), (2, 1, 8, 8), **options)
        for run, step in ((two, 6), (one, 6), (two, 3))
    )
    assert (x - same).abs().max() < 1e-4 < (x - before).abs().max()


def test_the_first_version_of_fsdp_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # which accelerate launch --use_fsdp sets
    assert main(["train", "--out", str(tmp_path / "r"), *TINY, "--steps", "1"]) == 2
    assert "--fsdp_version 2" in capsys.readouterr().err
    assert not list((tmp_path / "r").glob("*.json"))


@pytest.mark.slow
def test_a_launcher_that_starts_one_process_instead_of_two_is_noticed(tmp_path):
    """As accelerate launch does on a computer without GPUs; one process that was asked for is no news."""
    words = ("-m", "nidiff", "sample", "digits", "--seeds", "0", "--quiet")
    jobs = [launch("--cpu", "--num_processes", n, *words, "--out", str(tmp_path / n)) for n in "12"]
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert ["torchrun --nproc_per_node N" in output for output in outputs] == [False, True]
