"""The command line: ``nidiff COMMAND``.

A command is a dataclass in `nidiff.commands`: its fields are the flags, ``run`` does the work and imports what it
needs, and one line in `COMMANDS` adds it. Results go to stdout, everything else to stderr.
"""

import sys
from collections.abc import Mapping
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
from nidiff.errors import InputError, Interrupted
from nidiff.extras import explained
from nidiff.threads import wait_briefly

ABOUT = "Diffusion models with non-isotropic Gaussian noise. `nidiff --version` prints the version."


class Command(Protocol):
    def run(self) -> None: ...


COMMANDS: Mapping[str, type[Command]] = {
    "calibrate": Calibrate,
    "demo": Demo,
    "evaluate": Evaluate,
    "noise": Noise,
    "report": Report,
    "sample": Sample,
    "table": Table,
    "train": Train,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 where the input is at fault."""
    wait_briefly()  # before anything imports torch
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        print(f"nidiff {nidiff.__version__}")
        return 0
    try:
        try:
            _parse(arguments or ["--help"]).run()
        except ModuleNotFoundError as error:
            raise explained(error) from error
    except SystemExit as stop:  # how tyro ends after a usage error or --help
        return int(stop.code or 0)
    except InputError as error:
        print(f"nidiff: {error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"nidiff: {stop}", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("nidiff: interrupted", file=sys.stderr)
        return 130
    return 0


def _parse(arguments: list[str]) -> Command:
    config = (tyro.conf.FlagCreatePairsOff,)
    command = COMMANDS.get(arguments[0])
    if command is Train:  # its flags have the defaults of a preset
        default, prog = Train.defaults(arguments[1:]), "nidiff train"
        return tyro.cli(Train, prog=prog, args=arguments[1:], default=default, config=config)
    choice: Command = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), prog="nidiff", description=ABOUT, args=arguments, config=config
    )
    return choice
