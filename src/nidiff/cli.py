"""The command line: ``nidiff COMMAND``.

A command is a dataclass in `nidiff.commands`: its fields are the flags, ``run`` does the work and imports what it
needs, and one line in `COMMANDS` adds it. Results go to stdout, all else to stderr.
"""

import sys
from collections.abc import Mapping
from typing import Protocol

import tyro

import nidiff
from nidiff.commands.noise import Noise
from nidiff.errors import InputError

ABOUT = "Diffusion models with non-isotropic Gaussian noise. `nidiff --version` prints the version."


class Command(Protocol):
    def run(self) -> None: ...


COMMANDS: Mapping[str, type[Command]] = {
    "noise": Noise,
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, or 2 where the input is at fault."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        print(f"nidiff {nidiff.__version__}")
        return 0
    try:
        command: Command = tyro.extras.subcommand_cli_from_dict(
            dict(COMMANDS),
            prog="nidiff",
            description=ABOUT,
            args=arguments or ["--help"],
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        command.run()
    except SystemExit as stop:  # how tyro ends after a usage error or --help
        return int(stop.code or 0)
    except InputError as error:
        print(f"nidiff: {error}", file=sys.stderr)
        return 2
    return 0
