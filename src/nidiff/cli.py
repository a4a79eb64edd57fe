"""The command line: ``nidiff COMMAND``.

A command is a dataclass in `nidiff.commands`: its fields are the flags, ``run`` does the work and imports what it
needs, and one line in `COMMANDS` adds it. Results go to stdout, everything else to stderr.
"""

import sys
from typing import Protocol

import tyro

import nidiff
from nidiff.commands.calibrate import Calibrate
from nidiff.commands.demo import Demo
from nidiff.commands.evaluate import Evaluate
from nidiff.commands.noise import Noise
from nidiff.commands.report import Report
from nidiff.commands.sample import Sample
from nidiff.commands.table import Table
from nidiff.commands.train import Train
from nidiff.commands.verify import Verify
from nidiff.errors import InputError, Interrupted
from nidiff.extras import explained
from nidiff.threads import wait_briefly

ABOUT = "Diffusion models with non-isotropic Gaussian noise. `nidiff --version` prints the version."


class Command(Protocol):
    def run(self) -> None: ...


COMMANDS: dict[str, type[Command]] = {
    command.__name__.lower(): command
    for command in (Calibrate, Demo, Evaluate, Noise, Report, Sample, Table, Train, Verify)
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 where the input is at fault."""
    wait_briefly()  # before anything imports torch
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        print(f"nidiff {nidiff.__version__}")
        return 0
    try:
        with explained():
            _parse(arguments or ["--help"]).run()
    except SystemExit as stop:  # how tyro ends after a usage error or --help
        return int(stop.code or 0)
    except (InputError, Interrupted, KeyboardInterrupt) as error:
        print(f"nidiff: {str(error) or 'interrupted'}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 130
    return 0


def _parse(arguments: list[str]) -> Command:
    config = (tyro.conf.FlagCreatePairsOff,)
    if arguments[0] == "train":  # its flags have the defaults of a preset
        default = Train.defaults(arguments[1:])
        on = {f"--{name}".replace("_", "-") for name, value in vars(default.experiment).items() if value is True}
        words = [word for word in arguments[1:] if word not in on]  # of those already on, tyro knows only --no-…
        return tyro.cli(Train, prog="nidiff train", args=words, default=default, config=config)
    choose = tyro.extras.subcommand_cli_from_dict
    choice: Command = choose(dict(COMMANDS), prog="nidiff", description=ABOUT, args=arguments, config=config)
    return choice
