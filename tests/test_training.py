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
from nidiff.commands.train import Train
from nidiff.files import ASIDE, REPLACED, marked
from nidiff.model.folder import load_model, same_covariance
from nidiff.model.manifest import write_manifest
from nidiff.randomness import mixed_seed
from nidiff.training import loop
from nidiff.training.build import build
from nidiff.training.draws import image_generators, image_indices
from nidiff.training.experiment import Experiment, read_experiment
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


def steps(count: int, *flags: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights after so many steps of a run, and the losses, without its directory."""
    trainer = build(Train.parsed([*TINY, "--steps", str(count), *flags]).experiment)
    batches = loop.step_batches(trainer)
    losses = [loop.train_step(trainer, batches).item() for _ in range(count)]
    return {f"model {name}": value.detach() for name, value in trainer.net.state_dict().items()}, losses


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 0.0) -> bool:
    shared = left.keys() & right.keys()
    assert shared
    return all(torch.allclose(left[name], right[name], rtol=0, atol=tolerance) for name in shared)


def assert_same_weights(a: Path, b: Path, step: int, tolerance: float = 0.0) -> None:
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys()
    assert same(left, right, tolerance)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run of 10 steps that nobody disturbed, with all of its checkpoints."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    assert train(out, "--steps", "10", "--keep", "0") == 0
    return out


@pytest.fixture
def copy(straight, tmp_path) -> Path:
    return shutil.copytree(straight, tmp_path / "copy")


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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = {path.name for path in straight.iterdir()}
    assert names == {"experiment.json", "checkpoints", "model", "log.jsonl", "samples", "tensorboard"}
    log = [json.loads(line) for line in (straight / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4, 6, 8, 10]
    events = EventAccumulator(str(straight / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(line["step"], np.float32(line["loss"])) for line in log]
    assert [path.name for path in sorted((straight / "checkpoints").iterdir())] == ["000004", "000008", "000010"]
    assert (straight / "samples" / "000010.png").stat().st_size > 100
    run = RunDirectory.open(straight)
    assert run.facts["image_shape"] == [1, 8, 8]
    assert run.has_model
    assert (run.name, run.experiment.steps) == ("straight", 10)


def test_the_model_is_the_averaged_network_and_holds_the_covariance_once(straight):
    """In the scheduler's folder of the model; no other JSON of the run has Σ."""
    denoiser, own = load_model(straight), nidiff.gaussian_free_field((8, 8), 1.0)
    ema = load_file(straight / "checkpoints" / "000010" / "ema.safetensors")
    for name, parameter in denoiser.net.named_parameters():
        assert torch.equal(parameter, ema[name])
    holders = [
        str(file.relative_to(straight))
        for file in straight.rglob("*")
        if file.name == "covariance.safetensors" or (file.suffix == ".json" and '"zero_mode"' in file.read_text())
    ]
    assert holders == ["model/scheduler/scheduler_config.json"]
    assert same_covariance(RunDirectory(straight).covariance, own)
    assert same_covariance(denoiser.process.covariance, own)
    assert load_model(straight, covariance=own).process.schedule.logsnr.shape == (50,)
    with refused("covariance"):
        load_model(straight, covariance=nidiff.Identity((8, 8)))
    images = nidiff.sample(denoiser, (2, 1, 8, 8), sampler="ddim", num_steps=3, generator=[0, 1])
    assert images.abs().max() <= 1


def test_a_model_fitted_to_its_data_carries_the_spectrum(tmp_path):
    assert train(tmp_path / "r", "--steps", "1", "--covariance", "from_data:average=modes") == 0
    images = nidiff.load_dataset("digits")
    fitted = nidiff.from_data(images.batch(torch.arange(len(images))), average="modes")
    assert same_covariance(load_model(tmp_path / "r").process.covariance, fitted)


def test_the_weights_are_a_function_of_the_settings(straight):
    """Of a covariance by its name or its folder, after other precisions in the same process; and other settings give
    others, the negative control of all equalities here."""
    expected = weights(straight, 4)
    assert not same(steps(4, "--precision", "bf16")[0], expected)
    assert same(steps(4, "--covariance", str(straight / "model"), "--sampler", "ddim:eta=0.5")[0], expected)
    assert not same(steps(4, "--covariance", "gff:gamma=0.5")[0], expected)
    assert not same(steps(4, "--seed", "1")[0], expected)


def test_accumulation_gives_the_same_step_up_to_rounding():
    """With dropout off the two differ by summation order alone."""
    plain, accumulated = (steps(4, "--dropout", "0", "--accumulation", parts)[0] for parts in ("1", "4"))
    assert same(plain, accumulated, tolerance=2e-4)


def test_training_lowers_the_loss():
    _, losses = steps(80, "--learning-rate", "0.005")
    assert np.mean(losses[-20:]) < 0.75 * np.mean(losses[:5])


def test_the_learning_rate_rises_stays_and_falls():
    experiment = Experiment(steps=6, warmup=3, cooldown=4)
    rates = [loop.learning_rate(experiment, step) for step in range(1, 7)]
    assert rates == pytest.approx([0.002 * share for share in (1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4)])


# Stopped and resumed ---------------------------------------------------------------------------------------------


def test_a_run_that_was_asked_to_stop_says_how_to_go_on_and_ends_with_the_same_bits(
    straight, tmp_path, capsys, monkeypatch
):
    step, out = loop.train_step, tmp_path / "r"

    def stop_at_5(trainer, batches):
        loss = step(trainer, batches)
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    monkeypatch.setattr(loop, "train_step", stop_at_5)
    assert train(out, "--steps", "10") == 130
    assert "stopped after step 5" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(out, "--steps", "10", "--resume") == 0
    assert_same_weights(straight, out, 10)
    assert (out / "log.jsonl").read_text().count('"step": 6,') == 1


def test_resume_takes_the_settings_of_the_run(copy, capsys):
    """Nothing has to be repeated; what is given and would change the run is still refused."""
    again = ["train", "--out", str(copy), "--resume", "--no-report"]
    assert main([*again, "--steps", "11"]) == 0
    assert (read_experiment(copy).steps, read_experiment(copy).dropout) == (11, 0.1)
    before = (copy / "experiment.json").read_bytes()
    assert main([*again, "--learning-rate", "0.001"]) == 2
    assert "--learning-rate: 0.002 → 0.001" in capsys.readouterr().err
    assert (copy / "experiment.json").read_bytes() == before


def test_a_run_whose_model_another_version_saved_in_other_words_is_resumed(copy, capsys):
    file = copy / "model" / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace('"gamma": 1.0', '"gamma": 1'))
    assert train(copy, "--steps", "10", "--resume") == 2  # by hand: it is not what the manifest says
    assert "the schedule" in capsys.readouterr().err
    write_manifest(copy / "model", RunDirectory(copy).identity)
    assert train(copy, "--steps", "10", "--resume") == 0


@pytest.mark.parametrize("name", [marked(f"{REPLACED}model-"), ".replaced-model"], ids=["now", "by version 0.2"])
def test_a_kill_while_the_model_is_replaced_does_not_lose_the_covariance(copy, name):
    (copy / "model").rename(copy / name)
    assert train(copy, "--steps", "10", "--resume") == 0
    assert same_covariance(load_model(copy).process.covariance, nidiff.gaussian_free_field((8, 8), 1.0))
    assert not (copy / name).exists()


# Two processes ---------------------------------------------------------------------------------------------------


def torchrun(out: Path, *flags: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "nidiff"]
    return subprocess.Popen(
        [*program, "train", "--out", str(out), *TINY, "--dropout", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


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
    assert (straight / "experiment.json").read_bytes() == before
    (tmp_path / "thesis.tex").write_text("years of work")
    assert train(tmp_path, "--steps", "1", "--overwrite") == 2
    assert "holds other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
    assert train(tmp_path / "new", "--steps", "1", "--resume") == 2
    assert "no run to resume" in capsys.readouterr().err


def test_what_would_fail_later_is_refused_before_the_old_run_is_lost(straight, capsys):
    for flags in (("--covariance", "gaussian_free_field:gamma=20"), ("--sampler", "cas")):
        assert train(straight, "--steps", "10", "--overwrite", *flags) == 2
        assert "Traceback" not in capsys.readouterr().err
    assert load_model(straight).process.covariance.event_shape == (8, 8)


def test_changed_data_are_noticed_on_resume(tmp_path, capsys):
    file = tmp_path / "data.npy"
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), dtype=np.uint8)
    np.save(file, images)
    assert train(tmp_path / "r", "--steps", "1", "--data", str(file)) == 0
    one_pixel = images.copy()
    one_pixel[1, 3, 3] ^= 1
    np.save(file, one_pixel)
    assert train(tmp_path / "r", "--steps", "2", "--data", str(file), "--resume") == 2
    assert "the data" in capsys.readouterr().err
    np.save(file, images)
    assert train(tmp_path / "r", "--steps", "2", "--data", str(file), "--resume") == 0
    assert read_experiment(tmp_path / "r").steps == 2


def test_a_run_that_died_while_it_began_can_begin_again(straight, tmp_path):
    """Before its folder had its name, there is no run yet; afterwards there is one, which is resumed."""
    early, late = tmp_path / "early", tmp_path / "late"
    shutil.copytree(straight / "model", early / marked(ASIDE) / "model")
    (early / ".lock").touch()
    assert train(early, "--steps", "4") == 0
    assert_same_weights(straight, early, 4)
    shutil.copytree(straight / "model", late / ".begun-run" / "model", ignore=shutil.ignore_patterns("unet", "*.md"))
    shutil.copy(straight / "experiment.json", late / ".begun-run")
    assert train(late, "--steps", "4") == 2
    with refused("run"):
        RunDirectory.open(late)
    assert train(late, "--steps", "4", "--resume") == 0
    assert_same_weights(straight, late, 4)


def test_an_unfinished_run_has_no_model_yet_and_overwrite_begins_anew(copy):
    shutil.rmtree(copy / "model" / "unet")
    (copy / "model" / "manifest.json").unlink()
    assert not RunDirectory.open(copy).has_model
    with pytest.raises(nidiff.InputError):
        load_model(copy)
    assert train(copy, "--steps", "2", "--overwrite") == 0
    assert [p.name for p in (copy / "checkpoints").iterdir()] == ["000002"]


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path, capsys):
    assert train(tmp_path / "r", "--steps", "50", "--learning-rate", "1e30", "--gradient-clip", "1e30") == 2
    error = capsys.readouterr().err
    assert "the loss is nan" in error
    assert "checkpoint" in error


def test_config_repeats_a_run(straight, tmp_path):
    again = ["--out", str(tmp_path / "again"), "--steps", "4", "--no-report"]
    assert main(["train", "--config", str(straight), *again]) == 0
    assert_same_weights(straight, tmp_path / "again", 4)


def test_a_run_can_begin_with_the_weights_of_a_model(straight, tmp_path, capsys):
    """Its average too; a run resumed from a checkpoint has no more need of them; and the weights, not a copy of its
    settings, are what it has of the other run."""
    initial = ["--initial", str(straight)]
    begun = build(Train.parsed([*TINY, *initial, "--covariance", "white", "--seed", "3"]).experiment)
    stored = load_model(straight).net.state_dict()
    assert same(begun.net.state_dict(), stored)
    assert all(map(torch.equal, begun.ema.shadow_params, begun.net.parameters()))
    random = build(Train.parsed([*TINY, "--covariance", "white", "--seed", "3"]).experiment)
    assert not same(random.net.state_dict(), stored)  # the control
    assert not begun.notes
    assert any("eps" in note for note in build(Train.parsed([*TINY, *initial, "--target", "v"]).experiment).notes)

    model, out = shutil.copytree(straight / "model", tmp_path / "model"), tmp_path / "run"
    assert train(out, "--steps", "4", "--initial", str(model)) == 0
    assert not same(weights(out, 4), weights(straight, 4))
    shutil.rmtree(model)
    assert main(["train", "--out", str(out), "--resume", "--steps", "6", "--no-report"]) == 0

    with refused("initial", str(straight)):
        build(Train.parsed([*TINY, *initial, "--widths", "16"]).experiment)
    with refused("initial"):
        build(Train.parsed([*TINY, "--initial", "nothing-of-that-name"]).experiment)


def test_dry_run_measures_and_writes_nothing(tmp_path, capsys):
    assert train(tmp_path / "r", "--dry-run") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["images_per_s"] > 0
    assert facts["parameters"] > 0
    assert facts["experiment"]["batch_size"] == 16
    assert not (tmp_path / "r").exists()


def test_attention_that_is_not_given_follows_the_widths():
    assert Train.parsed(["--widths", "8"]).experiment.attention == ()
    assert Train.parsed(["--widths", "8", "16", "16"]).experiment.attention == (1,)
    assert Train.parsed(["--preset", "cifar10-small", "--widths", "8", "16"]).experiment.attention == ()
    build(Train.parsed(["--widths", "8"]).experiment)
    with refused("attention"):
        build(Train.parsed(["--widths", "8", "--attention", "1"]).experiment)


@pytest.mark.parametrize(
    ("name", "network"), [("float", "FieldUNet"), ("picture", "FieldUNet"), ("even", "UNet2DModel")]
)
def test_a_grid_that_no_network_can_halve_is_trained_and_sampled(name, network, tmp_path):
    """Pictures have diffusers' U-Net only where it can halve them; asked for by name, it is refused by name."""
    random, size = np.random.default_rng(0), (12, 8) if name == "even" else (9, 7)
    values = random.normal(size=(20, *size)) if name == "float" else random.integers(0, 256, (20, *size), np.uint8)
    np.save(tmp_path / "odd.npy", values)
    flags = ["--data", str(tmp_path / "odd.npy"), "--widths", "8", "8", "8", "--steps", "2", "--boundary", "reflecting"]
    assert train(tmp_path / "run", *flags) == 0
    model = load_model(tmp_path / "run")
    assert type(model.net).__name__ == network
    assert model.gaussian is not None
    x = nidiff.sample(model, (2, 1, *size), num_steps=3, generator=range(2))
    assert x.isfinite().all()
    assert (
        main(["sample", str(tmp_path / "run"), "--seeds", "0-1", "--out", str(tmp_path / "s"), "--num-steps", "2"]) == 0
    )
    refused = train(tmp_path / "other", *flags, "--network", "unet2d") == 2
    assert refused == (name != "even")
    if name == "float":  # also on another grid that cannot be halved
        words = ["sample", str(tmp_path / "run"), "--seeds", "0", "--out", str(tmp_path / "t"), "--shape", "11", "13"]
        assert main([*words, "--num-steps", "2"]) == 0
