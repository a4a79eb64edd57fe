"""What a new user sees first: the greeting, the demo and its pictures, and commands that run as they are printed."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

from nidiff.app.shelf import Shelf
from nidiff.cli import GREETING, main, parse_command
from nidiff.commands.demo import Demo
from nidiff.model import zoo

SMALL = ["--out", "my demo", "--steps", "3", "--num-samples", "8"]


def test_nidiff_alone_greets_with_commands_that_can_be_typed(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "nidiff --help" in out
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    shown = re.findall(r"^  (nidiff .*?)  +\S", out, re.M)
    assert shown == list(GREETING)
    assert len(shown) == 4
    for line in shown:
        parse_command(shlex.split(line)[1:])  # a flag or command that is not there is refused


def test_the_demo_draws_trains_compares_and_ends_with_commands_that_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = Path("my demo")
    assert main(["demo", *SMALL, "--json"]) == 0
    stdout, stderr = capsys.readouterr()
    rows = json.loads(stdout)
    assert [(row["model"], row["num_steps"]) for row in rows[1:]] == [
        *(("DDPM", 50), ("DDPM", 10), ("NI-DDPM", 50), ("NI-DDPM", 10)),
    ]
    assert rows[0]["recognised"] > 0.9  # the classifier knows real digits
    assert rows[1]["recognised"] < 0.9  # and three steps do not make any
    assert (out / "demo.png").stat().st_size > 10_000
    assert re.match(r"wrote my demo/first.png after \d+\.\d s", stderr)  # before anything is trained
    assert "\x1b" not in stderr
    white, noise, samples = np.array_split(np.asarray(Image.open(out / "first.png").convert("L"), float), 3, axis=1)
    roughness = [np.abs(np.diff(panel[60:-20, 20:-20])).mean() for panel in (white, noise, samples)]
    assert roughness[0] > 1.2 * roughness[1] > 1.2 * 1.2 * roughness[2] > 1

    before, commands = (out / "digits" / "log.jsonl").read_bytes(), list(Demo(out=out).next_commands())
    assert re.findall(r"^  (nidiff .*?)  +\S", stderr, re.M) == commands
    explore, *others = (shlex.split(line)[1:] for line in commands)
    assert Shelf(parse_command(explore).models).runs().keys() == {"my demo/digits", "my demo/digits-ddpm"}
    assert [main(words) for words in others] == [0, 0]

    (out / "first.png").unlink()
    monkeypatch.setattr(zoo, "PLACES", [])  # an install without models goes on without their picture
    assert main(["demo", *SMALL]) == 0
    assert "first.png" not in capsys.readouterr().err
    assert not (out / "first.png").exists()
    assert (out / "digits" / "log.jsonl").read_bytes() == before  # the runs are resumed, not repeated
