"""What a new user sees first: the greeting, the demo and its pictures, and commands that run as they are printed."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nidiff.app.shelf import Shelf
from nidiff.cli import COMMANDS, GREETING, main, parse_command
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


@pytest.mark.slow
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


# Completion ---------------------------------------------------------------------------------------------------------

TRIED = {  # what is typed before Tab, and what is offered
    "nidiff sam": ["sample"],
    "nidiff --ver": ["--version"],
    "nidiff sample --nu": ["--num-steps"],
    "nidiff sample fashion-mnist --gui": ["--guidance", "--guidance-interval"],
    "nidiff train --cov": ["--covariance"],
    "nidiff sweep --wid": ["--widths"],  # a flag of nidiff train, which it also takes
    "nidiff sample --bogus": [],
    "nidiff sample train": [],  # no command and no flag: the shell offers files
    "nidiff bogus --nu": [],
}
TRY = """
source <("$@")
complete -p nidiff >&2
while IFS= read -r line; do
    COMP_WORDS=($line); [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _nidiff nidiff "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_flags():
    program = [sys.executable, "-m", "nidiff", "--completion", "bash"]
    lines = "".join(f"{line}\n" for line in ["nidiff ", *TRIED])
    done = subprocess.run(["bash", "-c", TRY, "bash", *program], input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "complete -o default -F _nidiff nidiff\n")
    everything, *offered = (line.split() for line in done.stdout.splitlines())
    assert everything == [*COMMANDS, "--completion", "--help", "--version"]
    assert dict(zip(TRIED, offered, strict=True)) == TRIED


def test_zsh_reads_the_script_of_bash(capsys):
    scripts = {}
    for shell in ("bash", "zsh"):
        assert main([f"--completion={shell}"]) == 0
        scripts[shell] = capsys.readouterr().out
    begin, _, rest = scripts["zsh"].partition("\n")
    assert "bashcompinit" in begin
    assert rest == scripts["bash"]


def test_another_shell_is_refused_in_a_sentence(capsys):
    for words in (["fish"], [""], [], ["bash", "zsh"]):
        assert main(["--completion", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert all(word in err for word in ("completion", "bash", "zsh"))
