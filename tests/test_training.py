"""A run is a function of its experiment: stopped and resumed, on one process or two, it gives the same weights."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused
from safetensors.torch import load_file

import nidiff
from nidiff.cli import main
from nidiff.model.folder import load_model, same_covariance
from nidiff.model.manifest import write_manifest
from nidiff.randomness import mixed_seed
from nidiff.training.draws import image_generators, image_indices
from nidiff.training.experiment import read_experiment
from nidiff.training.run import RunDirectory

TINY = [
    *("--widths", "8", "--attention", "--layers", "1", "--batch-size", "16", "--precision", "fp32"),
    *("--checkpoint-every", "4", "--log-every", "2", "--num-samples", "4", "--num-steps", "3", "--dropout", "0.1"),
    *("--schedule", "ddpm_linear:num_levels=50", "--flip", "--warmup", "3", "--cooldown", "0", "--no-report"),
]


def train(out: Path, *flags: str) -> int:
    return main(["train", "--out", str(out), *TINY, *flags])


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return {
        f"{kind} {name}": tensor
        for kind in ("model", "ema")
        for name, tensor in load_file(out / "checkpoints" / f"{step:06d}" / f"{kind}.safetensors").items()
    }


def assert_same_weights(a: Path, b: Path, step: int, tolerance: float = 0.0) -> None:
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys()
    for name in left:
        if tolerance:
            torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance)
        else:
            assert torch.equal(left[name], right[name]), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of 10 steps that nobody disturbed, with all of its checkpoints."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert train(out, "--steps", "10", "--keep", "0") == 0
    return out


# Draws -----------------------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_image_once_and_the_next_in_another_order():
    first, second = (image_indices(3, 50, start, 50) for start in (0, 50))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(50))
    assert not torch.equal(first, second)
    assert not torch.equal(first, image_indices(4, 50, 0, 50))


def test_a_share_of_the_batch_is_what_one_process_would_have_drawn():
    whole = image_indices(0, 30, 7 * 16, 16)
    halves = [image_indices(0, 30, 7 * 16 + start, 8) for start in (0, 8)]
    assert torch.equal(whole, torch.cat(halves))
    cov = nidiff.gaussian_free_field((4, 4))
    together = cov.sample((16, 4, 4), image_generators(0, 7, 0, 16))
    share = cov.sample((8, 4, 4), image_generators(0, 7, 8, 8))
    assert torch.equal(together[8:], share)
    assert mixed_seed(1, 23) != mixed_seed(12, 3)


# One run ---------------------------------------------------------------------------------------------------------


def test_the_run_directory_holds_what_it_should(straight):
    names = {path.name for path in straight.iterdir()}
    assert names == {"experiment.json", "checkpoints", "model", "log.jsonl", "samples", "tensorboard"}
    log = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4, 6, 8, 10]
    assert [path.name for path in sorted((straight / "checkpoints").iterdir())] == ["000004", "000008", "000010"]
    assert (straight / "samples" / "000010.png").stat().st_size > 100
    run = RunDirectory.open(straight)
    assert run.facts["image_shape"] == [1, 8, 8]
    assert run.has_model
    assert (run.name, run.experiment.steps) == ("straight", 10)


def test_tensorboard_reads_the_log(straight):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(straight / "tensorboard")).Reload()
    log = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (line["step"], np.float32(line["loss"])) for line in log
    ]


def test_the_covariance_is_stored_once(straight):
    """In the scheduler's folder of the model; no other JSON of the run has Σ."""
    holders = [
        str(file.relative_to(straight))
        for file in straight.rglob("*")
        if file.name == "covariance.safetensors" or (file.suffix == ".json" and '"zero_mode"' in file.read_text())
    ]
    assert holders == ["model/scheduler/scheduler_config.json"]
    assert same_covariance(RunDirectory(straight).covariance, nidiff.gaussian_free_field((8, 8), 1.0))


def test_the_model_is_the_averaged_network_and_remembers_its_covariance(straight):
    denoiser = load_model(straight)
    ema = load_file(straight / "checkpoints" / "000010" / "ema.safetensors")
    for name, parameter in denoiser.net.named_parameters():
        assert torch.equal(parameter, ema[name])
    own = nidiff.gaussian_free_field((8, 8), 1.0)
    assert same_covariance(denoiser.process.covariance, own)
    assert load_model(straight, covariance=own).process.schedule.logsnr.shape == (50,)
    with refused("covariance"):
        load_model(straight, covariance=nidiff.Identity((8, 8)))
    images = nidiff.sample(denoiser, (2, 1, 8, 8), sampler="ddim", num_steps=3, generator=[0, 1])
    assert images.abs().max() <= 1


def test_a_model_fitted_to_its_data_carries_the_spectrum(tmp_path):
    assert train(tmp_path / "r", "--steps", "2", "--covariance", "from_data:average=modes") == 0
    images = nidiff.load_dataset("digits")
    fitted = nidiff.from_data(images.batch(torch.arange(len(images))), average="modes")
    assert same_covariance(load_model(tmp_path / "r").process.covariance, fitted)


def test_a_run_may_take_the_covariance_and_the_schedule_of_texts_and_folders(straight, tmp_path):
    flags = ("--covariance", str(straight / "model"), "--sampler", "ddim:eta=0.5")
    assert train(tmp_path / "folder", "--steps", "4", *flags) == 0
    assert_same_weights(straight, tmp_path / "folder", 4)
    assert train(tmp_path / "other", "--steps", "4", "--covariance", "gff:gamma=0.5") == 0
    with pytest.raises(AssertionError):
        assert_same_weights(straight, tmp_path / "other", 4)


def test_one_process_may_train_with_one_precision_after_another(straight, tmp_path):
    assert train(tmp_path / "bf16", "--steps", "4", "--precision", "bf16") == 0
    assert train(tmp_path / "fp32", "--steps", "4", "--precision", "fp32") == 0
    assert_same_weights(straight, tmp_path / "fp32", 4)
    with pytest.raises(AssertionError):  # it was another precision
        assert_same_weights(tmp_path / "bf16", tmp_path / "fp32", 4)


def test_training_lowers_the_loss(tmp_path):
    assert train(tmp_path / "r", "--steps", "100", "--log-every", "20", "--learning-rate", "0.005") == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.7 * losses[0]


def test_seeds_and_settings_matter(straight, tmp_path):
    """Negative control for all equalities here: another seed gives other weights."""
    assert train(tmp_path / "r", "--steps", "4", "--seed", "1") == 0
    with pytest.raises(AssertionError):
        assert_same_weights(straight, tmp_path / "r", 4)


def test_accumulation_gives_the_same_step_up_to_rounding(straight, tmp_path):
    """With dropout off the two differ by summation order alone."""
    for name, flags in (("one", ()), ("four", ("--accumulation", "4"))):
        assert train(tmp_path / name, "--steps", "4", "--dropout", "0", *flags) == 0
    assert_same_weights(tmp_path / "one", tmp_path / "four", 4, tolerance=2e-4)


# Stopped and resumed ---------------------------------------------------------------------------------------------


def test_a_run_that_stopped_and_went_on_is_bit_identical(straight, tmp_path):
    out = tmp_path / "r"
    assert train(out, "--steps", "6") == 0
    assert train(out, "--steps", "10", "--resume") == 0
    assert_same_weights(straight, out, 10)
    assert (out / "log.jsonl").read_text().count('"step": 6,') == 1


@pytest.mark.parametrize("change", [{"format": 1}, {"identity": None}], ids=["format", "identity"])
def test_a_run_of_version_0_1_is_refused_and_named(straight, tmp_path, capsys, change):
    out = shutil.copytree(straight, tmp_path / "r")
    experiment = json.loads((out / "experiment.json").read_text())
    (out / "experiment.json").write_text(json.dumps(experiment | change))
    assert train(out, "--steps", "12", "--resume") == 2
    assert "nidiff 0.2" in capsys.readouterr().err


def test_a_run_whose_model_another_version_saved_in_other_words_is_resumed(straight, tmp_path, capsys):
    out = shutil.copytree(straight, tmp_path / "r")
    file = out / "model" / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace('"gamma": 1.0', '"gamma": 1'))
    assert train(out, "--steps", "12", "--resume") == 2  # by hand: it is not what the manifest says
    assert "the schedule" in capsys.readouterr().err
    write_manifest(out / "model", RunDirectory(out).identity)
    assert train(out, "--steps", "12", "--resume") == 0
    shutil.copytree(straight, tmp_path / "same")
    assert train(tmp_path / "same", "--steps", "12", "--resume") == 0
    assert_same_weights(out, tmp_path / "same", 12)


def test_a_kill_while_the_model_is_replaced_does_not_lose_the_covariance(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "r")
    (tmp_path / "r" / "model").rename(tmp_path / "r" / ".replaced-model")
    assert train(tmp_path / "r", "--steps", "10", "--resume") == 0
    assert same_covariance(load_model(tmp_path / "r").process.covariance, nidiff.gaussian_free_field((8, 8), 1.0))


def test_a_damaged_checkpoint_is_reported_and_the_one_before_used(straight, tmp_path, capsys):
    out = tmp_path / "r"
    assert train(out, "--steps", "8") == 0
    file = out / "checkpoints" / "000008" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)
    assert train(out, "--steps", "10", "--resume") == 0
    assert "000008" in capsys.readouterr().err
    assert_same_weights(straight, out, 10)


def test_a_request_to_stop_leaves_a_checkpoint_and_says_how_to_go_on(straight, tmp_path, capsys, monkeypatch):
    from nidiff.training import loop

    steps = loop.train_step

    def stop_at_5(trainer, batches):
        loss = steps(trainer, batches)
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    monkeypatch.setattr(loop, "train_step", stop_at_5)
    assert train(tmp_path / "r", "--steps", "10") == 130
    assert "stopped after step 5" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(tmp_path / "r", "--steps", "10", "--resume") == 0
    assert_same_weights(straight, tmp_path / "r", 10)


# Two processes ---------------------------------------------------------------------------------------------------


def torchrun(out: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", "nidiff", "train", "--out", str(out), *TINY, "--dropout", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.slow
@pytest.mark.slow
def test_two_processes_train_the_same_model_and_survive_the_death_of_one(tmp_path):
    alone, pair = tmp_path / "alone", tmp_path / "pair"
    assert train(alone, "--steps", "10", "--dropout", "0") == 0
    job = torchrun(pair, "--steps", "100000")
    deadline = time.monotonic() + 120
    while not list(pair.glob("checkpoints/0*/manifest.json")):
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    ranks = [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    os.kill(ranks[-1], signal.SIGKILL)
    output, _ = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "exitcode" in output or "Signal 9" in output
    newest = max(int(p.parent.name) for p in pair.glob("checkpoints/0*/manifest.json"))
    steps = str(max(10, newest))
    assert train(alone, "--steps", steps, "--dropout", "0", "--resume") == 0
    finished = torchrun(pair, "--steps", steps, "--resume")
    output, _ = finished.communicate(timeout=120)
    assert finished.returncode == 0, output
    assert_same_weights(alone, pair, int(steps), tolerance=2e-3)


# Bad input -------------------------------------------------------------------------------------------------------


def test_a_run_is_never_overwritten_unasked(straight, tmp_path, capsys):
    before = (straight / "experiment.json").read_bytes()
    assert train(straight, "--steps", "10") == 2
    assert "--resume" in capsys.readouterr().err
    assert train(straight, "--steps", "10", "--resume", "--learning-rate", "0.5") == 2
    assert "--learning-rate: 0.002 → 0.5" in capsys.readouterr().err
    assert (straight / "experiment.json").read_bytes() == before
    (tmp_path / "thesis.tex").write_text("years of work")
    assert train(tmp_path, "--steps", "1", "--overwrite") == 2
    assert "holds other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
    assert train(tmp_path / "new", "--steps", "1", "--resume") == 2
    assert "no run to resume" in capsys.readouterr().err


def test_with_a_cooldown_the_number_of_steps_matters_and_the_rate_ends_near_zero(tmp_path, capsys):
    assert train(tmp_path / "r", "--steps", "6", "--cooldown", "4") == 0
    rates = [json.loads(line)["learning_rate"] for line in (tmp_path / "r" / "log.jsonl").read_text().splitlines()]
    assert rates == pytest.approx([0.002 * 2 / 3, 0.002 * 3 / 4, 0.002 * 1 / 4])
    assert train(tmp_path / "r", "--steps", "8", "--cooldown", "4", "--resume") == 2
    assert "--steps: 6 → 8" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--covariance", "gaussian_free_field:gamma=20"), ("--sampler", "cas")])
def test_what_would_fail_later_is_refused_before_the_old_run_is_lost(flags, straight, capsys):
    assert train(straight, "--steps", "10", "--overwrite", *flags) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert load_model(straight).process.covariance.event_shape == (8, 8)


def test_changed_data_are_noticed_on_resume(tmp_path, capsys):
    file = tmp_path / "data.npy"
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.save(file, images)
    assert train(tmp_path / "r", "--steps", "4", "--data", str(file)) == 0
    one_pixel = images.copy()
    one_pixel[1, 3, 3] ^= 1
    np.save(file, one_pixel)
    assert train(tmp_path / "r", "--steps", "6", "--data", str(file), "--resume") == 2
    assert "the data" in capsys.readouterr().err
    np.save(file, images)
    assert train(tmp_path / "r", "--steps", "6", "--data", str(file), "--resume") == 0
    assert json.loads((tmp_path / "r" / "experiment.json").read_text())["steps"] == 6


def test_a_run_that_died_while_it_began_can_begin_again(straight, tmp_path):
    """Before its folder had its name, there is no run yet; afterwards there is one, which is resumed."""
    early, late = tmp_path / "early", tmp_path / "late"
    shutil.copytree(straight / "model", early / ".tmp-.begun-run" / "model")
    (early / ".lock").write_text("{}")
    assert train(early, "--steps", "10") == 0
    assert_same_weights(straight, early, 10)
    shutil.copytree(straight / "model", late / ".begun-run" / "model", ignore=shutil.ignore_patterns("unet", "*.md"))
    shutil.copy(straight / "experiment.json", late / ".begun-run")
    assert train(late, "--steps", "10") == 2
    with refused("run"):
        RunDirectory.open(late)
    assert train(late, "--steps", "10", "--resume") == 0
    assert_same_weights(straight, late, 10)


def test_an_unfinished_run_has_no_model_yet(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "r")
    shutil.rmtree(tmp_path / "r" / "model" / "unet")
    (tmp_path / "r" / "model" / "manifest.json").unlink()
    assert not RunDirectory.open(tmp_path / "r").has_model
    with pytest.raises(nidiff.InputError):
        load_model(tmp_path / "r")


def test_overwrite_begins_anew(tmp_path):
    assert train(tmp_path / "r", "--steps", "4") == 0
    assert train(tmp_path / "r", "--steps", "2", "--overwrite") == 0
    assert [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()] == ["000002"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--preset", "digit"), "did you mean 'digits'"),
        (("--data", "nowhere"), "nowhere"),
        (("--widths", "8", "8", "8", "8", "8"), "widths"),
        (("--covariance", "gf"), "covariance='gf'"),
        (("--target", "flow"), "target='flow'"),
        (("--weighting", "snr"), "weighting='snr'"),
        (("--sampler", "plms"), "sampler='plms'"),
        (("--batch-size", "0"), "batch-size=0"),
        (("--config", "missing.json"), "missing.json"),
    ],
)
def test_bad_flags_exit_with_2_and_write_nothing(flags, message, tmp_path, capsys):
    assert train(tmp_path / "r", "--steps", "2", *flags) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "r").exists()


def test_a_loss_that_is_not_a_number_stops_the_run_and_names_the_step(tmp_path, capsys):
    assert train(tmp_path / "r", "--steps", "50", "--learning-rate", "1e30", "--gradient-clip", "1e30") == 2
    error = capsys.readouterr().err
    assert "the loss of step" in error
    assert "checkpoint" in error


def test_config_repeats_a_run(straight, tmp_path):
    assert main(["train", "--config", str(straight), "--out", str(tmp_path / "again"), "--no-report"]) == 0
    assert_same_weights(straight, tmp_path / "again", 10)


def test_dry_run_measures_and_writes_nothing(tmp_path, capsys):
    assert train(tmp_path / "r", "--dry-run") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["images_per_s"] > 0
    assert facts["parameters"] > 0
    assert facts["experiment"]["batch_size"] == 16
    assert not (tmp_path / "r").exists()


def test_resume_takes_the_settings_of_the_run(tmp_path, capsys):
    """Nothing has to be repeated; what is given and would change the run is still refused."""
    assert train(tmp_path / "run", "--steps", "2", "--learning-rate", "0.001") == 0
    again = ["train", "--out", str(tmp_path / "run"), "--resume", "--no-report"]
    assert main([*again, "--steps", "3"]) == 0
    assert read_experiment(tmp_path / "run").learning_rate == 0.001
    assert main([*again, "--learning-rate", "0.002"]) == 2
    assert "--learning-rate: 0.001" in capsys.readouterr().err
