"""What every file of ours relies on: whole or not at all, read only if it makes sense, one writer at a time."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from problems import refused

from nidiff import locks
from nidiff.errors import FileError, InputError
from nidiff.files import as_path, read_json, replace_json, replace_text, replacing, writing
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


def test_the_longest_name_that_a_file_may_have_can_be_replaced(tmp_path):
    file = tmp_path / ("a" * 255)
    replace_text(file, "one")
    replace_text(file, "two")
    assert file.read_text() == "two"


def test_a_name_that_is_not_utf8_keeps_its_bytes(tmp_path):
    replace_text(tmp_path / "card", os.fsdecode(b"data \xff"))
    assert (tmp_path / "card").read_bytes() == b"data \xff"


DEEP = "[" * 100_000 + "]" * 100_000
BOMBS = {
    "nested": DEEP,
    "nested in an object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "5,000 digits": "9" * 5000,
    "400 digits": "1" * 400,
    "Infinity": "[Infinity]",
    "NaN": '{"a": NaN}',
    "overflow": "1e999",
    "empty": "",
    "not JSON": "{",
    "not UTF-8": "ÿ",
}


@pytest.mark.parametrize("name", BOMBS)
def test_json_that_nobody_should_work_with_is_one_sentence(tmp_path, name):
    file = tmp_path / "a.json"
    file.write_bytes(BOMBS[name].encode("latin-1"))
    with pytest.raises(FileError, match="a.json.*: copy it again") as caught:
        read_json(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_json_that_is_missing_or_a_folder_is_one_sentence(tmp_path):
    with pytest.raises(FileError, match="missing"):
        read_json(tmp_path / "none.json")
    with pytest.raises(FileError, match="directory"):
        read_json(tmp_path)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(FileError, match="pipe"):
        read_json(tmp_path / "a.json")


def test_what_is_written_is_what_is_read(tmp_path):
    values = {"a": [1, -2.5, 1e-300, 2**63], "Σ": "ÿ", "none": None, "yes": True}
    replace_json(tmp_path / "a.json", values)
    assert read_json(tmp_path / "a.json") == values


@pytest.mark.parametrize("value", ["a" * 300, "zero\0byte", "x/" * 3000])
def test_what_cannot_be_a_path_is_one_sentence(value):
    with refused("data"):
        as_path("data", value)


def test_a_path_need_not_exist(tmp_path):
    assert as_path("data", str(tmp_path / "none" / "there")) == tmp_path / "none" / "there"


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
    with pytest.raises(InputError, match="widths=9.*GiB.*make it smaller"):
        require_memory("widths", 9, total_memory() * 2, "make it smaller")
    with pytest.raises(InputError, match="any machine"):
        require_memory("widths", 9, 1e300, "make it smaller")


# Locks -----------------------------------------------------------------------------------------------------------


def _hold(folder: Path, pipe) -> None:
    with claimed(folder):
        pipe.send("claimed")
        pipe.recv()


@pytest.fixture
def holder(tmp_path):
    """Another process that has claimed tmp_path / "run" until it is told something."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path / "run", theirs))
    process.start()
    assert pipe.recv() == "claimed"
    yield process, pipe
    if process.is_alive():
        pipe.send("end")
    process.join()


def test_the_second_is_told_who_has_the_folder(tmp_path, holder):
    process, pipe = holder
    for act in (lambda: claimed(tmp_path / "run").__enter__(), lambda: refuse_claimed(tmp_path / "run")):
        with pytest.raises(InputError, match=f"out=.*in use by process {process.pid} on "):
            act()
    pipe.send("end")
    process.join()
    assert not (tmp_path / "run").exists()  # it was made for the lock, and nothing was written
    with claimed(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_the_lock_of_a_process_that_was_killed_is_no_lock(tmp_path, holder):
    process, _ = holder
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert (tmp_path / "run" / LOCK).exists()
    refuse_claimed(tmp_path / "run")
    with claimed(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()


@pytest.fixture
def _no_system_locks(monkeypatch):
    monkeypatch.setattr(locks, "fcntl", None)  # as on Windows, and as on some network file systems


@pytest.mark.usefixtures("_no_system_locks")
def test_without_locks_of_the_system_the_file_says_who_is_alive(tmp_path, holder):
    process, _ = holder
    with pytest.raises(InputError, match=f"process {process.pid} .*delete"):
        refuse_claimed(tmp_path / "run")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with claimed(tmp_path / "run"):
        pass


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"{" * 3000, b'{"process": 1e9, "host": []}', b"null"])
def test_a_lock_file_of_any_content_is_replaced(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content)
    with claimed(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()


def test_a_link_is_no_lock_and_what_it_leads_to_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be written"), claimed(tmp_path):
        pass
    refuse_claimed(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
