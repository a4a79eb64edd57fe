"""What every file of ours relies on: whole or not at all, read only if it makes sense, one writer at a time."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from problems import refused

from nidiff.errors import FileError, InputError
from nidiff.files import (
    ASIDE,
    REPLACED,
    as_path,
    marked,
    read_json,
    read_npz,
    recover_folder,
    remove_folder,
    replace_json,
    replace_npz,
    replace_text,
    replacing,
    replacing_folder,
    writing,
)
from nidiff.locks import LOCK, claimed, refuse_claimed
from nidiff.memory import require_memory, total_memory
from nidiff.sealed import digest, seal, unseal


def test_after_an_error_the_old_file_is_untouched_and_nothing_is_left(tmp_path):
    file = tmp_path / "figure.png"
    file.write_bytes(b"old")

    def fill_the_disk():
        with writing("out", file), replacing(file) as stream:
            stream.write(b"new")
            raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="out=.*No space"):
        fill_the_disk()
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "writable"),
        (errno.EACCES, "writable"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENAMETOOLONG, "shorter name"),
        (errno.EIO, "another place"),
    ],
)
def test_the_remedy_is_that_of_what_the_file_system_says(tmp_path, number, words):
    with pytest.raises(InputError) as error, writing("out", tmp_path, "continue it"):
        raise OSError(number, os.strerror(number))
    assert words in error.value.remedy
    assert error.value.remedy.endswith(", then continue it")
    assert ("room" in error.value.remedy) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_too_many_open_files_are_no_full_disk(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 if Path("/proc/self/fd").is_dir() else 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with pytest.raises(InputError) as error, writing("out", tmp_path), contextlib.ExitStack() as files:  # noqa: PT012
            while True:
                files.enter_context((tmp_path / "a").open("w"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in error.value.remedy


def test_names_may_be_long_and_not_utf8(tmp_path):
    file = tmp_path / ("a" * 255)
    replace_text(file, "one")
    replace_text(file, os.fsdecode(b"data \xff"))
    assert file.read_bytes() == b"data \xff"


def test_json_that_nobody_should_work_with_is_one_sentence(tmp_path):
    bombs = ["[" * 100_000 + "]" * 100_000, "9" * 5000, "[Infinity]", '{"a": NaN}', "1e999", "", "{", "ÿ"]
    file = tmp_path / "a.json"
    for bomb in bombs:
        file.write_bytes(bomb.encode("latin-1"))
        with pytest.raises(FileError, match="a.json.*: copy it again") as caught:
            read_json(file)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(FileError, match="directory"):
            read_json(path)


def test_what_is_written_is_what_is_read(tmp_path):
    values = {"a": [1, -2.5, 1e-300, 2**63], "Σ": "ÿ", "none": None, "yes": True}
    replace_json(tmp_path / "a.json", values)
    assert read_json(tmp_path / "a.json") == values


def test_an_npz_is_whole_or_refused(tmp_path):
    """Also where its header has become one of fewer numbers, which numpy alone would read."""
    file = tmp_path / "a.npz"
    replace_npz(file, {"x": np.arange(12.0), "y": np.array([b"word"])})
    whole = file.read_bytes()
    assert read_npz(file, ["x"], "again", optional=["y", "z"])["x"].tolist() == list(range(12))
    assert [*read_npz(file, ["x"], "again", optional=["y", "z"])] == ["x", "y"]
    for content in (whole.replace(b"(12,)", b"(10,)"), whole[:-40], whole.replace(b"word", b"work"), b""):
        file.write_bytes(content)
        with refused("file"):
            read_npz(file, ["x", "y"], "again")
    file.write_bytes(whole)
    with refused("file"):
        read_npz(file, ["z"], "again")


def test_what_cannot_be_a_path_is_one_sentence(tmp_path):
    for value in ("a" * 300, "zero\0byte", "x/" * 3000):
        with refused("data"):
            as_path("data", value)
    assert as_path("data", str(tmp_path / "none" / "there")) == tmp_path / "none" / "there"  # it need not exist


def test_a_sealed_record_notices_every_change():
    record = seal({"b": 1, "a": {"x": [1.5, "two"]}})
    assert unseal(record, "it", "again") == {"b": 1, "a": {"x": [1.5, "two"]}}
    text = json.dumps(record)
    for changed in (text.replace("1.5", "1.6"), text.replace('"b"', '"c"'), json.dumps({**record, "new": 1}), "{}"):
        with pytest.raises(FileError, match="checksum"):
            unseal(json.loads(changed), "it", "again")


def test_a_digest_does_not_depend_on_the_order_of_keys_but_on_all_else():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert len({digest(values) for values in ({"a": 1}, {"a": 1.5}, {"a": "1"}, {"b": 1}, [1], None)}) == 6


def test_what_cannot_fit_is_refused_and_what_can_is_not():
    require_memory("widths", 8, total_memory() / 2, "make it smaller")
    for needed in (total_memory() * 2, 1e300):
        with refused("widths"):
            require_memory("widths", 9, needed, "make it smaller")


# Folders that are replaced ---------------------------------------------------------------------------------------


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced_and_what_looks_like_a_name_of_ours_is_the_users(tmp_path):
    theirs = [".replaced-m", ".tmp-m", f"{marked(ASIDE)}0", f".replaced-m-{'0' * 16}-{'0' * 16}"]
    for name in (*theirs, "m"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name, "old")
    with replacing_folder(tmp_path / "m") as folder:
        fill(folder, "new")
        assert (tmp_path / "m" / "file").read_text() == "old"
    assert (tmp_path / "m" / "file").read_text() == "new"
    (tmp_path / "gone").mkdir()
    remove_folder(tmp_path / "gone")
    assert names(tmp_path) == sorted([*theirs, "m"])
    assert {(tmp_path / name / "file").read_text() for name in theirs} == {"old"}


@pytest.mark.parametrize("moment", ["while it is filled", "when it is synced"])
def test_after_an_error_the_old_folder_is_there_and_nothing_is_left(tmp_path, monkeypatch, moment):
    (tmp_path / "m").mkdir()
    fill(tmp_path / "m", "old")

    def fail(path: Path) -> None:
        raise OSError("full")

    def replace_it() -> None:
        with replacing_folder(tmp_path / "m") as folder:
            fill(folder, "new")
            if moment == "while it is filled":
                fail(folder)
            monkeypatch.setattr("nidiff.files.sync", fail)

    with pytest.raises(OSError, match="full"):
        replace_it()
    assert names(tmp_path) == ["m"]
    assert (tmp_path / "m" / "file").read_text() == "old"


def test_of_two_that_replace_a_folder_at_once_the_last_one_stays(tmp_path):
    """Neither deletes what the other writes; what a kill left is removed, also while another is at work."""
    dead = tmp_path / marked(ASIDE)
    with replacing_folder(tmp_path / "m") as first:
        fill(first, "first")
        dead.mkdir()
        with replacing_folder(tmp_path / "m") as second:
            fill(second, "second")
            assert first.is_dir()
            assert not dead.exists()
        assert (tmp_path / "m" / "file").read_text() == "second"
        assert first.is_dir()
    assert (tmp_path / "m" / "file").read_text() == "first"
    assert names(tmp_path) == ["m"]


def test_a_folder_gets_its_name_back_after_a_kill_between_two_renames(tmp_path):
    left = tmp_path / marked(f"{REPLACED}m-")
    left.mkdir()
    fill(left, "old")
    recover_folder(tmp_path / "other")
    assert names(tmp_path) == [left.name]  # it is not that one's
    recover_folder(tmp_path / "m")
    assert names(tmp_path) == ["m"]
    assert (tmp_path / "m" / "file").read_text() == "old"


# Locks -----------------------------------------------------------------------------------------------------------

HOLD = """
import pathlib, sys
from nidiff.locks import claimed
with claimed(pathlib.Path(sys.argv[1])):
    print("claimed", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed tmp_path / "run" until its input ends."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


def end(process, *, killed):
    process.send_signal(signal.SIGKILL) if killed else process.stdin.close()
    process.wait()


def holder_of(folder: Path) -> int:
    return json.loads((folder / LOCK).read_text())["process"]


def test_the_second_learns_who_has_the_folder(tmp_path, holder):
    for act in (lambda: claimed(tmp_path / "run").__enter__(), lambda: refuse_claimed(tmp_path / "run")):
        with pytest.raises(InputError, match=f"out=.*in use by process {holder.pid} on "):
            act()
    end(holder, killed=False)
    assert not (tmp_path / "run").exists()  # it was made for the lock, and nothing was written
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


@pytest.mark.parametrize("system", [True, False], ids=["the system's locks", "the file alone"])
def test_the_lock_of_a_process_that_was_killed_is_no_lock(tmp_path, holder, system, monkeypatch):
    """Also where the system has no locks, as on some network file systems: the file says who has it."""
    if not system:

        def flock(descriptor, operation):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match=f"process {holder.pid} .*delete"):
        refuse_claimed(tmp_path / "run")
    end(holder, killed=True)
    assert holder_of(tmp_path / "run") == holder.pid
    refuse_claimed(tmp_path / "run")
    with claimed(tmp_path / "run"):
        assert holder_of(tmp_path / "run") == os.getpid()


def test_a_lock_that_a_kill_or_a_power_cut_left_is_replaced(tmp_path):
    for content in (b"", bytes(80), b'{"process": 1e9, "host": [], "command": null}'):
        (tmp_path / LOCK).write_bytes(content)
        with claimed(tmp_path):
            assert holder_of(tmp_path) == os.getpid()
        assert not (tmp_path / LOCK).exists()


def test_a_file_of_the_user_that_has_the_name_of_the_lock_stays(tmp_path):
    for content in (b"mine", b"[]", b"\xff", b"{" * 3000, b'{"process": 1}', b"null"):
        (tmp_path / LOCK).write_bytes(content)
        with pytest.raises(InputError, match="has not written") as error, claimed(tmp_path):
            pass
        assert error.value.argument == "out"
        assert (tmp_path / LOCK).read_bytes() == content


def test_a_link_is_no_lock_and_what_it_leads_to_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be written"), claimed(tmp_path):
        pass
    refuse_claimed(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
