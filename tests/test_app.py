"""What `nidiff explore` promises: it reads what it was given and nothing else, works within bounds, and ends clean."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import gradio as gr
import pytest
from problems import refused
from starlette.testclient import TestClient
from visitor import Visitor

from nidiff.app import gate, work
from nidiff.app.forward import TURBULENCE
from nidiff.app.page import TABS, build
from nidiff.app.runs import details, losses, newest
from nidiff.app.server import free_port
from nidiff.app.shelf import Shelf
from nidiff.cli import main
from nidiff.errors import InputError
from nidiff.model.zoo import read_card, zoo_models

NONE = "'none'"
HTML = "<img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path):
    """A finished run, one that is still training, and one whose name is HTML."""
    folder = tmp_path / "runs"
    shipped = zoo_models()["digits"]
    for name in ("done", "training", HTML):
        run = Path(shutil.copytree(shipped, folder / name))
        (run / "zoo.json").unlink()
        lines = [{"step": step, "loss": 1 / step, "images_per_s": 10.0} for step in range(1, 20)]
        (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "samples").mkdir()
        for step in (10, 20):
            shutil.copy(run / "samples.png", run / "samples" / f"{step:06d}.png")
    shutil.rmtree(folder / "training" / "model" / "unet")
    return folder


# The shelf ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_runs_offers_the_finished_ones_beside_the_models_that_ship(runs):
    shelf = Shelf([runs])
    assert {*shelf.runs()} == {str(runs / name) for name in ("done", "training", HTML)}
    assert str(runs / "training") not in shelf.models()
    assert {str(runs / "done"), *zoo_models()} <= {*shelf.models()}
    assert shelf.open(str(runs / "done")).shape == (1, 8, 8)


def test_a_name_that_is_not_on_the_shelf_is_not_opened_even_if_it_is_a_model(runs):
    named, other = runs / "done", runs / HTML
    shelf = Shelf([named])
    assert shelf.open(str(named)).shape == (1, 8, 8)
    for name in (str(other), f"{named}/../{HTML}", "/etc", "", None, 3):
        with pytest.raises(InputError):
            shelf.open(name)
        with pytest.raises(InputError):
            shelf.run(name)


def test_a_link_in_a_folder_of_runs_leads_nowhere_and_a_run_that_is_partly_a_link_is_not_offered(runs, tmp_path):
    elsewhere, done = Path(shutil.copytree(runs / "done", tmp_path / "elsewhere")), runs / "done"
    (runs / "link").symlink_to(elsewhere)
    assert str(runs / "link") not in Shelf([runs]).models()
    assert str(elsewhere) in Shelf([elsewhere]).models()  # it is a model, had it been given
    for name in ("experiment.json", "model", "model/unet/diffusion_pytorch_model.safetensors"):
        assert str(done) in Shelf([runs]).runs()
        shutil.move(done / name, tmp_path / "outside")
        (done / name).symlink_to(tmp_path / "outside")
        assert str(done) not in {**Shelf([runs]).runs(), **Shelf([runs]).models()}
        (done / name).unlink()
        shutil.move(tmp_path / "outside", done / name)


def test_a_run_goes_before_the_model_that_ships_under_its_name(runs, monkeypatch):
    monkeypatch.chdir(runs)
    shutil.copytree(zoo_models()["fashion-mnist"], "digits")
    Path("digits/zoo.json").unlink()
    assert Shelf([Path("digits")]).open("digits").shape == (1, 28, 28)
    assert Shelf([Path("done")]).open("digits").shape == (1, 8, 8)  # the control: the one that ships


def test_a_folder_that_cannot_be_read_or_named_hides_no_other(runs):
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        shutil.copytree(runs / "done", f"{open_to_all}/done")
        shelf = Shelf([Path(open_to_all)])
        os.mkdir(f"{open_to_all}/lost+found", 0o000)
        shutil.copytree(runs / "done", os.fsencode(f"{open_to_all}/run-").decode() + "\udcff")
        before = os.geteuid()
        try:
            os.seteuid(before or 65534)  # root can read everything
            assert {*shelf.user_models()} == {f"{open_to_all}/done"}
        finally:
            os.seteuid(before)


def test_a_run_that_vanishes_is_no_longer_offered_and_a_folder_that_fills_later_is_seen(runs, tmp_path):
    later = Shelf(folder=tmp_path / "later")
    assert later.runs() == {}
    assert "nidiff train" in losses(later, [], False)
    shutil.copytree(runs, tmp_path / "later")
    assert len(later.runs()) == 3
    shelf, name = Shelf([runs / "done"]), str(runs / "done")
    assert name in shelf.models()
    shutil.rmtree(name)
    assert name not in shelf.models()
    with pytest.raises(InputError):
        shelf.open(name)


def test_models_are_opened_once_and_again_when_they_change(runs):
    shelf, name = Shelf([runs]), str(runs / "done")
    assert shelf.open(name) is shelf.open(name)
    before = shelf.open(name)
    os.utime(runs / "done" / "model", ns=(1, 1))
    assert shelf.open(name) is not before


# Bad input ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_explored_is_refused_in_one_sentence(runs, capsys):
    (runs / "empty").mkdir()
    (runs / "file").write_text("")
    for name in ("training", "empty", "file", "missing"):
        assert main(["explore", str(runs / name), "--port", "0"]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        assert name in message


def test_a_port_that_is_taken_is_refused_and_without_one_the_next_is_used(runs, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["explore", str(runs), "--port", str(port)]) == 2
        assert f"--port={port}" in capsys.readouterr().err
    assert free_port("127.0.0.1", port) == port
    assert free_port("127.0.0.1", None) >= 7860
    for flag, value in (("--port", "99999"), ("--host", "256.1.1.1"), ("--host", "::1")):
        assert main(["explore", str(runs), flag, value]) == 2
        assert capsys.readouterr().err.count(flag) == 1


def test_a_missing_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["explore"]) == 2
    assert "nidiff[app]" in capsys.readouterr().err


# Work ---------------------------------------------------------------------------------------------------------------


def drain(generator):
    """All that was shown, and the result."""
    shown, result = [], []

    def whole():
        result.append((yield from generator))

    shown += whole()
    return shown, result[0]


def test_work_shows_the_newest_of_what_comes_fast_and_returns_its_result(monkeypatch):
    monkeypatch.setattr(work, "OFTEN", 0.0)

    seen = threading.Event()

    def count(show):
        number = 0
        while not seen.is_set():
            show(number := number + 1)
        return number

    generator = work.watched(count)
    first = next(generator)
    seen.set()
    shown, result = drain(generator)
    assert [first, *shown] == sorted({first, *shown})
    assert result >= first > 0


def test_work_ends_when_the_visitor_stops_it_and_when_they_go(monkeypatch):
    monkeypatch.setattr(work, "OFTEN", 0.0)
    monkeypatch.setattr(work, "PATIENCE", 0.05)
    for leave in (lambda generator: generator.close(), lambda generator: None):  # stopped, or simply gone
        ended, steps = threading.Event(), threading.Event()

        def forever(show, ended=ended, steps=steps):
            try:
                while True:
                    show(0)
                    steps.set()
            finally:
                ended.set()

        generator = work.watched(forever)
        next(generator)
        assert steps.wait(5)
        leave(generator)
        assert ended.wait(5)


def test_work_that_takes_too_long_or_fails_is_a_sentence(monkeypatch):
    def forever(show):
        while True:
            show(0)

    with monkeypatch.context() as patch, refused(None):
        patch.setattr(work, "LONGEST", 0.1)
        drain(work.watched(forever))

    def fail(show):
        raise InputError("steps", 0, "is too small")

    with refused("steps"):
        drain(work.watched(fail))


def test_errors_reach_the_visitor_as_a_sentence_without_html(capsys):
    for error in (InputError("model", HTML, "is unknown"), RuntimeError(HTML), MemoryError(), OSError(2, HTML)):

        def fail(error=error):
            raise error

        def fail_later(error=error):
            yield 1
            raise error

        for answer in (work.with_messages(fail, 3, False)(), [*work.with_messages(fail_later, 3, True)()][-1]):
            message, *others = answer
            assert others == [gr.skip()] * 2  # whatever was shown stays
            sentence = message.removeprefix('<p class="error" role="alert">').removesuffix("</p>")
            assert sentence.endswith(".")
            assert "<" not in sentence
            assert sentence.count("\n") == 0
        # A bug is shown to who serves the page.
        assert (HTML in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_what_went_well_takes_the_message_away():
    assert work.with_messages(lambda: ("a", "b"), 3, False)() == ("", "a", "b")
    assert work.with_messages(lambda: "a", 2, False)() == ("", "a")
    assert work.with_messages(lambda: ("Done.", "a"), 2, True)() == ("Done.", "a")


# The first answer of the server -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config():
    """What the server sends before it is asked for anything."""

    async def built():  # with a loop of ours, for gradio would leave one open
        return build(Shelf()).get_config_file()

    return asyncio.run(built())


def names_of(config, ids):
    known = {part["id"]: part["props"].get("elem_id") for part in config["components"]}
    return [known[number] for number in ids]


def test_every_tab_comes_with_a_picture_and_the_first_one_is_turbulence(config):
    values = {part["props"].get("elem_id"): part["props"].get("value") for part in config["components"]}
    tabs = [part["props"]["label"] for part in config["components"] if part["type"] == "tabitem"]
    assert tabs == [*TABS]
    assert tabs[0] == "Forward"
    places = {"forward-pictures": 3, "noise-draws": 2, "sample-view": 1, "compare-view": 1, "restore-view": 10}
    for place, count in places.items():
        assert values[place].count("data:image") >= count, place
    assert values["forward-source"] == TURBULENCE
    assert {values[f"{tab}-model"] for tab in ("sample", "compare-first", "compare-second", "restore")} == {
        "turbulence"
    }
    for place in ("forward-maps", "noise-draws"):  # figures, which follow the page
        day, night = values[place].split('<div class="by-night">')
        assert day.startswith('<div class="by-day">')
        assert day.partition("data:image")[2][:9999] != night.partition("data:image")[2][:9999]
    assert values["noise-command"].startswith("nidiff noise gff")  # text is as it is
    assert values["sample-sampler"] == read_card(zoo_models()["turbulence"]).picture.sampler
    assert values["compare-second-sampler"] != values["compare-first-sampler"]


def test_every_event_says_on_its_own_tab_that_it_works_and_what_went_wrong(config):
    seen = set()
    for event in config["dependencies"]:
        outputs = names_of(config, event["outputs"])
        if event["show_progress"] == "hidden" or not event["backend_fn"] or not outputs:
            assert all(name is None or name.endswith("model") for name in outputs)  # a menu, or what the browser knows
            continue
        status = outputs[-1].partition("-")[0] + "-status"
        assert outputs[0] == status
        assert names_of(config, event["show_progress_on"]) == [status]
        seen.add(status)
    assert seen == {f"{name.lower()}-status" for name in TABS}


# The gate -----------------------------------------------------------------------------------------------------------


async def _asked(scope, receive, send):
    """An app that answers as gradio does: it fails, before or while it answers, or sends a page."""
    start = {"type": "http.response.start", "status": 200, "headers": []}
    if scope["path"] == "/config":
        raise KeyError(99999)
    await send(start)
    if scope["path"] == "/":
        await send({"type": "http.response.body", "body": b"<script>f()</script><script src=x></script>"})
    else:
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        raise RuntimeError


@pytest.mark.parametrize("frame", [None, "https://huggingface.co"])
def test_a_failure_of_gradio_is_a_refusal_and_a_page_may_run_its_own_scripts_only(frame, tmp_path):
    client = TestClient(gate.Gate(_asked, hosts=(), folder=tmp_path, frame=frame))  # which would raise what is raised
    failed = client.get("/config")
    assert failed.status_code == 400
    assert failed.json()["detail"].endswith(".")
    assert client.get("/theme.css").text == "begun"
    page = client.get("/").headers
    assert f"'sha256-{b64encode(sha256(b'f()').digest()).decode()}';" in page["content-security-policy"]
    assert page["content-security-policy"].endswith(f"frame-ancestors {frame or NONE}")
    assert ("x-frame-options" in page) == (frame is None)
    assert failed.headers["x-content-type-options"] == "nosniff"


# Runs ---------------------------------------------------------------------------------------------------------------


def test_the_tab_of_runs_shows_what_there_is_and_escapes_names(runs):
    shelf = Shelf([runs])
    names = newest(shelf)
    shown = [losses(shelf, names, False), *(details(shelf, name, False) for name in names)]
    assert all(HTML not in html for html in shown)
    assert losses(shelf, names, False) != losses(shelf, names, True)
    training = details(shelf, str(runs / "training"), False)
    assert "19 of 800 steps, not ended" in training
    assert training.count("Grid of samples") == 2
    assert details(shelf, None, False) == ""
    (runs / "training" / "metrics.json").write_text("{")
    assert "Not shown" in details(shelf, str(runs / "training"), False)
    for name in ("/etc", 3, ["done"]):
        with refused("run"):
            details(shelf, name, False)
        with refused("run"):
            losses(shelf, [name], False)


# The server ---------------------------------------------------------------------------------------------------------


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_ended_while_it_samples_leaves_no_damaged_file(runs, tmp_path, how):
    before, place = contents(runs), tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "nidiff", "explore", str(runs), "--port", "0"]
    environment = os.environ | {"TMPDIR": str(place), "HTTP_PROXY": "http://127.0.0.1:9"}  # which nobody serves
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=place) as server:
        assert server.stderr is not None
        with Visitor(server.stderr.readline().split()[0]) as visitor:
            event = visitor.event("sample-draw", "click")
            values = visitor.usual(event)
            values[visitor.names(event).index("sample-steps")] = 100
            visitor.leave(event, values)
        server.send_signal(how)
        assert server.wait(30) == (-how if how == signal.SIGKILL else 0)
    assert contents(runs) == before
    left = [path for path in place.rglob("*") if path.is_file()]
    assert how == signal.SIGKILL or left == []
    assert all(path.is_relative_to(next(place.glob("nidiff-explore-*"))) for path in left)
