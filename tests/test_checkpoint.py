"""Checkpoints: the same bits back, and always one to go on from after a kill, a full disk or flipped bytes."""

import hashlib
import itertools
import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nidiff.errors import InputError
from nidiff.files import ASIDE, REPLACED, is_aside, marked, replaced_name
from nidiff.training import checkpoint
from nidiff.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint

FILES = ["model.safetensors", "ema.safetensors", "optimizer.pt", "state.json", "manifest.json"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Syncing is for a power cut, which these tests cannot cause; its order is tested on its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def save(folder: Path, step: int, value: float = 0.0, keep: int = 0) -> Path:
    """A checkpoint in which everything says ``value``."""
    weights = {"w": torch.full((4,), value)}
    optimizer = {"state": {0: {"step": torch.tensor(value), "exp_avg": torch.full((4,), value)}}}
    tensors = {"model": weights, "ema": weights}
    return save_checkpoint(folder, step, tensors=tensors, state={"v": value}, optimizer=optimizer, keep=keep)


def is_whole(path: Path) -> bool:
    """By the manifest alone, without the code under test."""
    files = json.loads((path / "manifest.json").read_text())["files"]
    content = {name: (path / name).read_bytes() for name in FILES if name != "manifest.json"}
    return files == {k: {"sha256": hashlib.sha256(v).hexdigest(), "size": len(v)} for k, v in content.items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    """Everything in the folder, hidden or not."""
    return sorted(p.name for p in folder.iterdir())


def same_bits(a: Tensor, b: Tensor) -> bool:
    # Bytes, so that NaN equals NaN and -0.0 differs from 0.0.
    def raw(x: Tensor) -> Tensor:
        return x.detach().contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


# What was saved comes back ----------------------------------------------------------------------------------------


def test_a_training_state_comes_back_to_the_bit(tmp_path):
    """Tied weights, and AdamW with its float step: the resumed optimizer takes the same next step."""
    torch.manual_seed(0)

    def tied() -> torch.nn.Module:
        net = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 7, bias=False))
        net[2].weight = net[0].weight
        return net

    def train_step(net: torch.nn.Module, adam: torch.optim.Optimizer) -> None:
        net(torch.arange(7)).square().sum().backward()
        adam.step()
        adam.zero_grad()

    net = tied()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-2, amsgrad=True)
    for _ in range(3):
        train_step(net, adam)
    state = {"epoch": 2, "losses": [0.1, 1 / 3], "seed": 2**63, "name": "Σ"}
    saved_net = {k: v.clone() for k, v in net.state_dict().items()}
    save_checkpoint(tmp_path, 3, tensors={"model": net.state_dict()}, state=state, optimizer=adam.state_dict(), keep=1)
    loaded = load_checkpoint(tmp_path)
    assert loaded is not None
    assert (loaded.step, loaded.state, loaded.path, loaded.damaged) == (3, state, tmp_path / "000003", [])
    assert all(same_bits(loaded.tensors["model"][k], v) for k, v in saved_net.items())
    assert loaded.tensors["model"].keys() == saved_net.keys()
    torch.testing.assert_close(loaded.optimizer, adam.state_dict(), rtol=0, atol=0)

    resumed = tied()
    resumed.load_state_dict(loaded.tensors["model"])
    resumed_adam = torch.optim.AdamW(resumed.parameters(), lr=0.5, amsgrad=True)
    resumed_adam.load_state_dict(loaded.optimizer)
    train_step(net, adam)
    train_step(resumed, resumed_adam)
    assert all(same_bits(a, b) for a, b in zip(net.parameters(), resumed.parameters(), strict=True))


TENSORS = [
    torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
    torch.randn(3, 4).bfloat16(),
    torch.randn(3, 4, dtype=torch.float64).T,
    torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    torch.ones(1).expand(5),
    torch.arange(10)[::3],
    torch.tensor(7),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.nn.Parameter(torch.randn(3)),
    torch.Generator().get_state(),
]


def test_every_kind_of_tensor_comes_back_to_the_bit(tmp_path):
    group = {f"{number}{again}": tensor for number, tensor in enumerate(TENSORS) for again in ("", " again")}
    save_checkpoint(tmp_path, 1, tensors={"model": group}, state={}, optimizer={"a": TENSORS}, keep=1)
    loaded = load_checkpoint(tmp_path)
    for number, tensor in enumerate(TENSORS):
        model = loaded.tensors["model"]
        for other in (model[f"{number}"], model[f"{number} again"], loaded.optimizer["a"][number]):
            assert same_bits(other, tensor)
            assert other.device.type == "cpu"


def test_checkpoints_are_in_order_of_their_steps(tmp_path):
    assert load_checkpoint(tmp_path) is load_checkpoint(tmp_path / "absent") is None
    assert list_checkpoints(tmp_path / "absent") == []
    for name in ["notes", "12", ".tmp-000007", "0001000000", "٠٠٠٥٠٠"]:
        (tmp_path / name).mkdir()
    (tmp_path / "000009").write_text("a file")
    for step in [1_000_000, 5, 999_999]:
        save(tmp_path, step)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["000005", "999999", "1000000"]
    assert load_checkpoint(tmp_path).step == 1_000_000


# Damage ------------------------------------------------------------------------------------------------------------


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    middle = len(data) // 2
    if how == "flip":
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif how == "truncate":
        file.write_bytes(data[:middle])
    elif how == "missing":
        file.unlink()
    else:
        file.unlink()
        file.mkdir()


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, float(step))
    for name, how in itertools.product(FILES, ("flip", "truncate", "missing", "directory")):
        save(tmp_path, 3, 3.0)
        damage(tmp_path / "000003" / name, how)
        before = contents(tmp_path)
        loaded = load_checkpoint(tmp_path)
        assert (loaded.step, loaded.state, loaded.path.name) == (2, {"v": 2.0}, "000002")
        (report,) = loaded.damaged
        reasons = {"missing": "missing", "directory": "unreadable"}
        assert report.startswith(f"000003/{name}: {reasons.get(how, '')}")
        if name != "manifest.json" and how in ("flip", "truncate"):
            assert report.endswith("checksum differs")
        assert contents(tmp_path) == before


def test_no_single_flipped_bit_of_the_manifest_passes_for_another_checkpoint_or_format(tmp_path):
    for step in (1, 2):
        path = save_checkpoint(tmp_path, step, tensors={}, state={}, optimizer=None, keep=2)
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for bit in range(0, 8 * len(data), 11):
        manifest.write_bytes(data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :])
        loaded = load_checkpoint(tmp_path)
        # A flip that turns one blank into another changes nothing.
        assert loaded.step == 2 or loaded.damaged[0].startswith("000002/manifest.json: ")
    manifest.write_bytes(data)
    assert load_checkpoint(tmp_path).step == 2


def test_if_all_are_damaged_the_error_names_each_in_one_sentence(tmp_path):
    for step in (1, 2):
        damage(save(tmp_path, step) / "ema.safetensors", "flip")
    with pytest.raises(InputError, match=r"000002/ema.safetensors.*000001/ema.safetensors") as error:
        load_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_format_is_passed_over_and_untouched(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 0)
    monkeypatch.setattr(checkpoint, "__version__", "0.0.9")
    save(tmp_path, 2)
    monkeypatch.undo()
    before, loaded = contents(tmp_path), load_checkpoint(tmp_path)
    assert loaded.step == 1
    assert loaded.damaged[0].endswith("nidiff 0.0.9")
    assert contents(tmp_path) == before


def reseal(path: Path) -> None:
    """Make the manifest agree with the files, as someone who means harm would."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.file),)


def test_nothing_is_unpickled_and_nonsense_not_read_even_if_the_checksums_match(tmp_path):
    save(tmp_path / "c", 1)
    path = save(tmp_path / "c", 2)
    trap = tmp_path / "sprung"
    torch.save({"state": Trap(trap)}, path / "optimizer.pt")
    torch.load(path / "optimizer.pt", weights_only=False)
    assert trap.is_dir()  # the trap works
    trap.rmdir()
    reseal(path)
    loaded = load_checkpoint(tmp_path / "c")
    assert not trap.exists()
    assert loaded.step == 1
    assert loaded.damaged == ["000002/optimizer.pt: unreadable (UnpicklingError)"]
    for name in FILES[:-1]:
        path = save(tmp_path / "c", 2)
        (path / name).write_bytes(b"nonsense")
        reseal(path)
        assert load_checkpoint(tmp_path / "c").damaged[0].startswith(f"000002/{name}: unreadable")


# How many are kept -------------------------------------------------------------------------------------------------


def test_the_newest_are_kept_and_later_steps_neither_counted_nor_removed(tmp_path):
    """A run that went back past a damaged 9 keeps its own two newest, whole ones."""
    for keep, first in ((0, 1), (2, 4)):
        for step in range(1, 6):
            save(tmp_path / str(keep), step, keep=keep)
        assert names(tmp_path / str(keep)) == [f"{step:06d}" for step in range(first, 6)]
    damage(save(tmp_path / "2", 9) / "ema.safetensors", "flip")
    save(tmp_path / "2", 6, keep=2)
    assert names(tmp_path / "2") == ["000005", "000006", "000009"]
    assert load_checkpoint(tmp_path / "2").step == 6


def test_what_a_crash_left_is_removed_and_what_is_not_ours_stays(tmp_path):
    save(tmp_path, 2)
    ours, theirs = [marked(ASIDE), marked(f"{REPLACED}000002-")], [".replaced-000002", ".tmp-000001", ".tmp-mine"]
    theirs.append(ours[0][:-1])  # nearly a name of ours
    for name in [*ours, *theirs, "notes"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    save(tmp_path, 2, keep=1)
    assert names(tmp_path) == [*sorted(theirs), "000002", "notes"]


def test_a_checkpoint_that_was_being_replaced_is_used_and_gets_its_name_back(tmp_path):
    for name in (marked(f"{REPLACED}000002-"), ".replaced-000002"):  # now, and by version 0.2
        folder = tmp_path / name
        save(folder, 2, 1.0).rename(folder / name)
        assert load_checkpoint(folder).step == 2
        save(folder, 3, keep=1)
        assert names(folder) == ["000003"]


# A power cut -------------------------------------------------------------------------------------------------------


def test_everything_is_synced_before_it_gets_its_name_and_before_anything_is_deleted(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, 1.0)
    events: list[object] = []

    def rename(source: Path, target: Path, rename=os.rename) -> None:
        rename(source, target)
        events.append((plain(source.name), plain(target.name)))

    def rmtree(path: Path, ignore_errors: bool, rmtree=shutil.rmtree) -> None:
        if path.exists():
            events.append(plain(path.name))
        rmtree(path, ignore_errors)

    def plain(name: str) -> str:
        return ASIDE if is_aside(name) else f"{REPLACED}{old}" if (old := replaced_name(name)) else name

    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    path = save(tmp_path, 2, 2.0, keep=1)
    files, inside, outside = {file.stat().st_ino for file in path.iterdir()}, path.stat().st_ino, tmp_path.stat().st_ino
    start = events.index(inside)
    assert files <= set(events[:start])
    assert events[start:] == [
        inside,
        ("000002", ".replaced-000002"),
        (ASIDE, "000002"),
        outside,
        ".replaced-000002",
        ("000001", ASIDE),
        outside,
        ASIDE,
    ]


# A full disk -------------------------------------------------------------------------------------------------------


def test_a_write_that_fails_says_so_and_leaves_the_others_as_they_were(tmp_path, monkeypatch):
    """1000 bytes fail in the model, 10 000 in the optimizer, 30 000 in the state: a new checkpoint or one again."""
    for step in (1, 2):
        save(tmp_path, step)
    before = contents(tmp_path)
    tensors, optimizer = {"model": {"w": torch.zeros(1000)}}, {"m": torch.zeros(4000)}
    state = {"long": "x" * 40_000}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, size in itertools.product((2, 3), (1000, 10_000, 30_000)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # the system refuses to write further into a file
        try:
            with pytest.raises(InputError, match=f"00000{step}.*File too large") as error:
                save_checkpoint(tmp_path, step, tensors=tensors, state=state, optimizer=optimizer, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "\n" not in str(error.value)
        assert contents(tmp_path) == before
        assert names(tmp_path) == ["000001", "000002"]

    def rename(source: Path, target: Path, rename=os.rename) -> None:
        if source.name.startswith(".tmp-"):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(InputError, match="No space left on device"):
            save(tmp_path, 2, 2.0)
    assert contents(tmp_path) == before
    assert save(tmp_path, 3) in list_checkpoints(tmp_path)  # once there is room again


# A kill ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_kill_before_any_file_operation_leaves_a_whole_checkpoint(tmp_path):
    """Step 2 is saved again and step 1 pruned: whichever operation is the last, step 2 is there, old or new."""
    seen = {1.0: 0, 2.0: 0}
    for last in range(1000):
        folder = tmp_path / str(last)
        for step in (1, 2):
            save(folder, step, 1.0)
        child = os.fork()
        if child == 0:
            try:
                kill_before(last)
                save(folder, 2, 2.0, keep=1)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        loaded = load_checkpoint(folder)
        assert (loaded.step, loaded.damaged) == (2, [])
        assert all(is_whole(path) for path in list_checkpoints(folder))
        value = loaded.state["v"]
        for group in [*loaded.tensors.values(), {"m": loaded.optimizer["state"][0]["exp_avg"]}]:
            assert all(tensor.tolist() == [value] * 4 for tensor in group.values())
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen[value] += 1
        save(folder, 3, 3.0, keep=2)
        assert set(names(folder)) <= {"000002", "000003"}, names(folder)
        shutil.rmtree(folder)
    assert min(seen.values()) >= 10


def kill_before(last: int) -> None:
    """Let this process die before its file operation number ``last``."""
    left = iter(range(last))

    def count(event: str) -> None:
        if event in ("fsync", "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda descriptor: count("fsync")
    sys.addaudithook(lambda event, arguments: count(event))  # os.open and os.remove of rmtree among them
