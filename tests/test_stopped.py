"""A run that was stopped: its checkpoints are models, and it can be ended early, as if it had been planned so."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import refused

import nidiff
from nidiff.app.shelf import Shelf
from nidiff.cli import main
from nidiff.files import replace_json
from nidiff.generation.loaded_model import open_model, process_state
from nidiff.locks import claimed
from nidiff.model.network import BUILDERS
from nidiff.training import loop
from nidiff.training.experiment import Experiment, read_experiment
from nidiff.training.run import RunDirectory

TINY = [
    *("--widths", "8", "--attention", "--layers", "1", "--batch-size", "8", "--precision", "fp32", "--labels", "data"),
    *("--checkpoint-every", "3", "--log-every", "1", "--num-samples", "2", "--num-steps", "2", "--keep", "0"),
    *("--schedule", "ddpm_linear:num_levels=30", "--warmup", "2", "--no-report"),
]
PLAN = ["--steps", "20", "--cooldown", "3"]


def train(out: Path, *flags: str) -> int:
    return main(["train", "--out", str(out), *TINY, *flags])


def stop(step: int, *command: str) -> int:
    """Run a command that trains, and send it SIGTERM when it has done a step."""
    take = loop.train_step

    def step_and_stop(trainer, batches):
        loss = take(trainer, batches)
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", step_and_stop)
        return main([*command])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def drawn(model: nidiff.Denoiser, sampler: str = "dpmpp_2m") -> torch.Tensor:
    model = model.given(class_labels=torch.tensor([3, 5]))
    return nidiff.sample(model, (2, 1, 8, 8), sampler=sampler, num_steps=4, generator=[0, 1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """``stopped`` after step 4 of 20, with checkpoints 3 and 4, and the runs that it may become."""
    folder = tmp_path_factory.mktemp("stopped")
    assert stop(4, "train", "--out", str(folder / "stopped"), *TINY, *PLAN) == 130
    assert train(folder / "now", "--steps", "4", "--cooldown", "0") == 0
    assert train(folder / "cooled", "--steps", "7", "--cooldown", "3") == 0
    return folder


@pytest.fixture
def stopped(runs, tmp_path) -> Path:
    return shutil.copytree(runs / "stopped", tmp_path / "stopped")


# A checkpoint is a model -----------------------------------------------------------------------------------------


def test_a_checkpoint_is_the_model_of_a_run_that_ended_there(runs):
    """With its Σ, schedule, scaling, Gaussian, conditions and grid, whether its run has ended or not."""
    model, other = nidiff.load_model(runs / "now"), nidiff.load_model(runs / "stopped", checkpoint=3)
    state = process_state()
    for path, checkpoint in ((runs / "stopped", "latest"), (runs / "now", "4")):
        opened = open_model(path, state, checkpoint)
        for loaded in (nidiff.load_model(path, checkpoint=checkpoint), opened.denoiser):
            assert torch.equal(drawn(loaded), drawn(model))
            assert loaded.process.schedule.logsnr.equal(model.process.schedule.logsnr)
            assert (loaded.scaling, loaded.conditions, loaded.clip) == (model.scaling, model.conditions, model.clip)
        assert opened.grid == open_model(runs / "now", state).grid
    assert not torch.equal(drawn(other), drawn(model))


def test_kappa_belongs_to_the_weights_it_was_measured_with(runs):
    """The checkpoint that became the model is the model, and no other checkpoint has its κ."""
    model = nidiff.load_model(runs / "now")
    assert model.kappa is not None
    assert torch.equal(drawn(nidiff.load_model(runs / "now/checkpoints/000004"), "angle"), drawn(model, "angle"))
    for path in (runs / "now/checkpoints/000003", runs / "stopped/checkpoints/000004"):
        assert nidiff.load_model(path).kappa is None
    assert not torch.equal(drawn(model.with_kappa(None), "angle"), drawn(model, "angle"))


def test_a_network_of_your_own_takes_the_weights_of_a_checkpoint(tmp_path):
    """Its buffers and its shared weights too, which have no moving average of their own."""

    class Mine(torch.nn.Module):
        def __init__(self, shape) -> None:
            super().__init__()
            self.first = torch.nn.Conv2d(shape[0], shape[0], 3, padding=1)
            self.second = self.first
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x, label):
            self.calls += self.training
            return self.second(self.first(x))

    out, flags = tmp_path / "r", [*TINY[: TINY.index("--labels")], *TINY[TINY.index("--checkpoint-every") :]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, "mine", Mine)
        assert main(["train", "--out", str(out), *flags, "--network", "mine", "--steps", "3", "--cooldown", "0"]) == 0
    averaged, ended = (nidiff.load_model(out, Mine((1, 8, 8)), checkpoint=which).net for which in (3, None))
    for name, value in ended.state_dict().items():
        assert torch.equal(averaged.state_dict()[name], value)
    assert ended.calls.item() >= 3


def test_every_command_that_takes_a_model_takes_a_checkpoint(stopped, tmp_path, capsys):
    """By its step or its path; and what it writes is apart from that of other checkpoints and of the model."""
    np.save(tmp_path / "file.npy", np.full((1, 8, 8), 100, np.uint8))
    few = ["--num-steps", "2", "--seeds", "0-19"]
    quick = [*few, "--features", "pixels", "--num-real", "200", "--bootstrap", "0"]
    file = [str(tmp_path / "file.npy"), "--samples", "1", "--num-steps", "2"]
    commands = {
        "sample": few,
        "evaluate": quick,
        "table": [*quick, "--samplers", "ddim", "--out", str(tmp_path / "table")],
        "likelihood": ["--num-images", "1", "--rtol", "0.1", "--atol", "0.1"],
        "denoise": [*file, "--noise", "50"],
        "restore": [*file, "--mask", "left"],
        "verify": [],
    }
    for command, flags in commands.items():
        assert main([command, str(stopped), *flags]) in ((0,) if command == "verify" else (2,))
        assert main([command, str(stopped / "checkpoints/000003"), *flags]) == 0, capsys.readouterr().err
        assert main([command, str(stopped), "--checkpoint", "latest", *flags]) == 0, capsys.readouterr().err
        assert main([command, str(stopped), "--checkpoint", "5", *flags]) == 2
        assert "choose from 3, 4 and latest" in capsys.readouterr().err
    for step in ("000003", "000004"):
        assert {path.name for path in (stopped / "steps" / step).iterdir()} == {
            *("generated", "denoised", "restored", "metrics.json"),
        }
    assert not any((stopped / name).exists() for name in ("generated", "metrics.json", "report.html", "restored"))
    assert {row["run"] for row in json.loads((tmp_path / "table/table.json").read_text())} == {"stopped-000004"}
    assert list(Shelf([stopped / "checkpoints/000003"]).user_models()) == [str(stopped / "checkpoints/000003")]
    assert Shelf([stopped], checkpoint="latest").open(str(stopped / "checkpoints/000004")).step == 4


def test_a_run_that_has_not_ended_says_what_can_be_done(runs, capsys):
    with pytest.raises(nidiff.InputError, match=r"`?checkpoint`? latest.* --finish"):
        nidiff.load_model(runs / "stopped")
    assert main(["sample", str(runs / "stopped")]) == 2
    assert "--checkpoint latest" in capsys.readouterr().err
    for path, checkpoint in (("turbulence", "latest"), (runs / "stopped/checkpoints/000004", 4), (runs, "latest")):
        with refused("checkpoint"):
            nidiff.load_model(path, checkpoint=checkpoint)
    for word in ("-4", "4.0", "", "newest", "٤٤", "9" * 5000):
        with refused("checkpoint"):
            nidiff.load_model(runs / "stopped", checkpoint=word)


def test_a_run_is_not_replaced_while_a_checkpoint_of_it_is_used(stopped):
    for name in ("generated", "restored"):
        before = contents(stopped)
        with claimed(stopped / "steps/000004" / name / "job"):
            assert train(stopped, "--steps", "2", "--overwrite") == 2
        assert contents(stopped) == before
    assert train(stopped, "--steps", "2", "--overwrite") == 0


def test_a_checkpoint_that_is_damaged_or_of_another_run_is_no_model(stopped, runs):
    path = stopped / "checkpoints/000004"
    for file in (path / "ema.safetensors", path / "state.json", stopped / "model/unet/config.json"):
        content = file.read_bytes()
        file.write_bytes(content.replace(b"1", b"2", 1))
        with pytest.raises(nidiff.InputError, match="has changed"):
            nidiff.load_model(path)
        file.write_bytes(content)
    assert nidiff.load_model(path).kappa is None
    values = json.loads((stopped / "experiment.json").read_text())
    replace_json(stopped / "experiment.json", values | {"identity": values["identity"] | {"settings": "of another"}})
    with pytest.raises(nidiff.InputError, match="another run"):
        nidiff.load_model(path)


def test_a_run_that_began_with_an_earlier_version_is_sampled_after_it_was_resumed(stopped):
    """Which stored neither the network nor a manifest before the end."""
    shutil.rmtree(stopped / "model/unet")
    (stopped / "model/manifest.json").unlink()
    with pytest.raises(nidiff.InputError, match="earlier version"):
        nidiff.load_model(stopped, checkpoint="latest")
    assert stop(5, "train", "--resume", "--out", str(stopped), "--no-report") == 130
    assert nidiff.load_model(stopped, checkpoint=4).conditions


# Ended early -----------------------------------------------------------------------------------------------------


def finish(out: Path, *flags: str) -> int:
    return main(["train", "--out", str(out), "--resume", "--finish", "--no-report", *flags])


def test_a_run_that_is_finished_is_the_one_that_began_with_so_many_steps(stopped, runs, tmp_path):
    """Stopped after step 4, with its cool-down of 3 steps it is the run of 7, byte for byte; also if it stops again
    on the way, or falls back to a checkpoint from before."""
    for at, lost in ((None, False), (6, False), (5, True)):
        out = shutil.copytree(stopped, tmp_path / f"stopped again at {at}")
        if at is not None:
            assert stop(at, "train", "--out", str(out), "--resume", "--finish", "--no-report") == 130
            assert read_experiment(out).steps == 7
            assert nidiff.load_model(out, checkpoint=4).conditions
        if lost:
            shutil.rmtree(out / "checkpoints" / f"{at:06d}")
        assert finish(out) == 0
        assert contents(out / "model") == contents(runs / "cooled/model")
        assert RunDirectory.open(out).identity == RunDirectory.open(runs / "cooled").identity
        assert [main(["verify", str(out)]), train_again(out)] == [0, 0]
        assert contents(out / "model") == contents(runs / "cooled/model")


def train_again(out: Path, *flags: str) -> int:
    return main(["train", "--out", str(out), "--resume", "--no-report", *flags])


def test_a_cooldown_of_no_steps_ends_the_run_at_once_and_it_can_go_on(stopped, runs):
    assert finish(stopped, "--cooldown", "0") == 0
    assert contents(stopped / "model") == contents(runs / "now/model")
    assert train_again(stopped, "--steps", "5") == 0
    assert finish(stopped, "--cooldown", "2") == 0
    assert (read_experiment(stopped).steps, read_experiment(stopped).cooldown) == (7, 2)
    assert main(["verify", str(stopped)]) == 0
    assert nidiff.load_model(stopped, checkpoint=3).conditions  # of the first of three plans


def test_what_would_not_be_such_a_run_is_refused(runs, stopped, tmp_path, capsys):
    """A cool-down that has begun goes on as it was planned, and nothing is changed by a refusal."""
    planned = Experiment(steps=20, cooldown=5, warmup=2)
    assert planned.ended(16, 5) is planned
    for step in range(1, 16):
        rates = [
            [loop.learning_rate(each, k) for k in range(1, step + 1)] for each in (planned, planned.ended(step, 2))
        ]
        assert rates[0] == rates[1]
    with refused("cooldown"):
        planned.ended(16, 2)
    before = contents(stopped)
    for flags, argument in (
        (["--resume", "--steps", "6"], "--steps"),
        (["--resume", "--learning-rate", "1"], "--learning-rate"),
        ([], "--resume"),
    ):
        assert main(["train", "--out", str(stopped), "--finish", *flags]) == 2
        assert argument in capsys.readouterr().err
    assert finish(tmp_path / "nowhere") == 2
    assert contents(stopped) == before
    shutil.rmtree(stopped / "checkpoints")
    assert finish(stopped) == 2
    assert "--finish needs a checkpoint" in capsys.readouterr().err


# What is said ----------------------------------------------------------------------------------------------------


def test_a_log_has_a_line_for_each_checkpoint_and_quiet_has_none(tmp_path, capsys):
    few = ["--steps", "6", "--cooldown", "0"]
    assert train(tmp_path / "r", *few) == 0
    out, err = capsys.readouterr()
    place, *lines = err.splitlines()
    assert place.startswith("training on 1 process")
    assert [line.partition(":")[0] for line in lines] == ["step 3 of 6", "step 6 of 6"]
    assert train(tmp_path / "quiet", *few, "--quiet") == 0
    assert capsys.readouterr() == (out.replace("/r\n", "/quiet\n"), "")
    assert train(tmp_path / "quiet", *few, "--quiet") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["noise", "--shape", "8", "8", "--out", str(tmp_path / "x.png"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""
