"""A run is followed by W&B (offline), MLflow (a folder) and TensorBoard, which all hold the numbers of log.jsonl."""

import json
import os
import struct
import subprocess
import sys

import pytest

RUN = ["train", "--out", "run", "--cooldown", "0", "--warmup", "1", "--batch-size", "8", "--log-every", "1"]
RUN += ["--checkpoint-every", "1", "--precision", "fp32", "--no-report"]


def leveldb_records(data, place=7):
    """The records of a log of LevelDB: in blocks of 32 KB, with a checksum, a length and a kind each."""
    whole = b""
    while len(data) >= 7:
        if (left := 32768 - place % 32768) < 7:
            data, place = data[left:], place + left
            continue
        _, length, kind = struct.unpack("<IHB", data[:7])
        whole += data[7 : 7 + length]
        data, place = data[7 + length :], place + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def of_wandb(run):
    """The history of an offline run, by step, from all its files."""
    from wandb.proto import wandb_internal_pb2

    found = {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(file.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if values:
                found[values["_step"]] = values
    return found


def of_mlflow(folder):
    """The metrics of all runs of the project, by step."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(f"file:{folder}"), {}
    (experiment,) = [each for each in client.search_experiments() if each.name == "nidiff"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["covariance"] == "gaussian_free_field:gamma=1.0"
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.setdefault(metric.step, {})[name] = metric.value
    return found


def of_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in sorted(run.glob("tensorboard/*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                found.setdefault(event.step, {})[name] = event.value
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_numbers_in_all_three_also_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    places = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}"}
    for words in (["--steps", "2"], ["--steps", "4", "--resume"]):
        command = [sys.executable, "-m", "nidiff", *RUN, *words, "--tracker", "wandb", "mlflow", "tensorboard"]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **places}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "training on 1 process, cpu, fp32" in done.stderr
    run = tmp_path / "run"
    logged = {line.pop("step"): line for line in map(json.loads, (run / "log.jsonl").read_text().splitlines())}
    assert [*logged] == [1, 2, 3, 4]
    for of_tracker in (of_wandb(run), of_mlflow(tmp_path / "mlruns"), of_tensorboard(run)):
        for step, values in logged.items():
            assert {name: of_tracker[step][name] for name in values} == pytest.approx(values)


def test_a_tracker_that_is_unknown_or_missing_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    code, _, error = run("train", "--out", tmp_path / "run", "--tracker", "wandbb")
    assert code == 2
    assert "--tracker='wandbb'" in error
    monkeypatch.setitem(sys.modules, "mlflow", None)
    code, _, error = run("train", "--out", tmp_path / "run", "--tracker", "mlflow")
    assert code == 2
    assert "install nidiff[track]" in error
    assert not (tmp_path / "run").exists()
