"""``nidiff verify``: what is whole is named by its checksum, and what is not is said in a sentence."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from nidiff.cli import main
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.model.manifest import model_sha256

TRAIN = "--widths 8 --attention --batch-size 8 --precision fp32 --steps 2 --warmup 0 --cooldown 0 --num-samples 1"
EVALUATE = "--features pixels --bootstrap 0 --num-real 20 --seeds 0-9 --num-steps 2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run with a model, checkpoints, samples and results."""
    run = tmp_path_factory.mktemp("runs") / "r"
    assert main(["train", "--out", str(run), *TRAIN.split(), "--num-steps", "2", "--checkpoint-every", "1"]) == 0
    assert main(["evaluate", str(run), *EVALUATE.split()]) == 0
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "r")


@pytest.fixture
def verify(capsys):
    def act(*words):
        code = main(["verify", *map(str, words)])
        return code, *capsys.readouterr()

    return act


def test_what_is_whole_is_named(run, verify):
    code, out, _ = verify(run)
    sha256 = open_model(run, process_state()).sha256
    assert code == 0
    assert out == f"{run}: model {sha256}, checkpoints 2, samples 1, results 1\n"
    assert model_sha256(run / "model") == sha256
    alone = shutil.copytree(run / "model", run.parent / "alone")
    code, out, _ = verify(run / "model", alone, "--json")
    assert code == 0
    assert [one["model_sha256"] for one in json.loads(out)] == [sha256, sha256]
    assert [one["path"] for one in json.loads(out)] == [str(run), str(alone)]  # a model in a run is checked with it


def test_a_run_that_has_not_ended_has_no_model_yet(run, verify):
    shutil.rmtree(run / "model" / "unet")
    (run / "model" / "manifest.json").unlink()
    code, out, _ = verify(run)
    assert code == 0
    assert "no model yet, checkpoints 2" in out


def test_a_changed_file_is_named(run, verify, tmp_path):
    whole = shutil.copytree(run / "model", tmp_path / "whole")
    for name in (
        "model/unet/config.json",
        "model/unet/diffusion_pytorch_model.safetensors",
        "model/scheduler/scheduler_config.json",
        "model/manifest.json",
        "checkpoints/000002/model.safetensors",
        "checkpoints/000002/state.json",
        "experiment.json",
        "metrics.json",
        "generated/*/job.json",
        "generated/*/samples.npz",
    ):
        (file,) = run.glob(name)
        content = file.read_bytes()
        changed = bytearray(content)
        changed[len(content) // 2] ^= 4
        file.write_bytes(changed)
        code, out, log = verify(run, whole)
        assert (code, file.name in log) == (2, True), name
        assert out.startswith(f"{whole}: model ")  # the others are checked too, and only what is in order is listed
        assert f"{run}: " not in out
        file.write_bytes(content)
    assert verify(run, whole)[0] == 0


def test_bad_paths_are_bad_input(verify, tmp_path):
    for words in (
        (tmp_path / "nowhere",),
        (tmp_path,),
        ("x" * 300,),
        (),
        ("--accept", tmp_path),
        ("--accept", "nowhere"),
    ):
        code, _, log = verify(*words)
        assert code == 2
        assert "Traceback" not in log


def test_restorations_and_samples_are_checked_with_their_run_and_alone(run, verify, tmp_path, capsys):
    np.save(tmp_path / "digits.npy", np.zeros((1, 8, 8), np.uint8))
    words = [str(run), str(tmp_path / "digits.npy"), "--noise", "40", "--samples", "1", "--num-steps", "2"]
    assert main(["denoise", *words]) == 0
    capsys.readouterr()
    (restored,), (drawn,) = run.glob("denoised/*"), run.glob("generated/*")
    assert ", restorations 1, " in verify(run)[1]
    assert verify(restored, drawn)[:2] == (0, f"{restored}: restorations 1\n{drawn}: samples 1\n")
    for file, folder in ((restored / "mean.npy", restored), (drawn / "samples.npz", drawn)):
        content = file.read_bytes()
        file.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])
        for path in (run, folder):
            code, out, log = verify(path)
            assert (code, out, file.name in log) == (2, "", True)
        file.write_bytes(content)
    assert verify(run, restored, drawn)[0] == 0
