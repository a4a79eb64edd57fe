"""The command line: ``nidiff COMMAND``.

A command is a dataclass in `nidiff.commands`: its fields are the flags, ``run`` does the work and imports what it
needs, and one line in `COMMANDS` adds it. Results go to stdout, everything else to stderr.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import tyro

import nidiff
from nidiff.aligned import aligned
from nidiff.commands.calibrate import Calibrate
from nidiff.commands.completion import completion
from nidiff.commands.demo import Demo
from nidiff.commands.design import Design
from nidiff.commands.evaluate import Evaluate
from nidiff.commands.explore import Explore
from nidiff.commands.likelihood import Likelihood
from nidiff.commands.models import Models
from nidiff.commands.noise import Noise
from nidiff.commands.report import Report
from nidiff.commands.restore import Denoise, Restore
from nidiff.commands.sample import Sample
from nidiff.commands.sweep import Sweep
from nidiff.commands.table import Table
from nidiff.commands.train import Train
from nidiff.commands.tune import Tune
from nidiff.commands.usage import CONFIG, flags_of, parse
from nidiff.commands.verify import Verify
from nidiff.errors import InputError, Interrupted, one_of, printable
from nidiff.extras import explained
from nidiff.files import remedy_for
from nidiff.memory import keep_freed_memory
from nidiff.plugins import import_plugins, split_imports
from nidiff.threads import wait_briefly

ABOUT = (
    "Diffusion models with non-isotropic Gaussian noise. `nidiff --version` prints the version. Every command takes "
    "--import MODULE, which imports a module of yours first."
)
GREETING = {
    "nidiff demo": "pictures in seconds, then a training",
    "nidiff explore": "a page to play with, in the browser",
    "nidiff sample fashion-mnist --seeds 0-15": "clothes, drawn by a model that ships",
    "nidiff train --data my_images/ --size 32": "a model of your own pictures",
}
BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 2, 130, 141  # exit codes; the last two are those of a shell
LONGEST = 200  # letters of a value in a message
NARROWEST = 60  # columns: tyro needs some, and never ends in a terminal of five
NO_MEMORY = re.compile(
    "(can't|cannot|unable to) (allocate|mmap)|not enough memory|out of memory|size calculation overflowed|bad_alloc"
    "|can't start new thread|failed to map segment|could not (create|execute) a primitive$",
    re.IGNORECASE,
)
SMALLER = ("--batch-size", "--batch", "--widths", "--num-samples", "--num-images", "--num-real", "--shape", "--size")


class Command(Protocol):
    def run(self) -> None: ...


_ALL: tuple[type[Command], ...] = (Calibrate, Demo, Denoise, Design, Evaluate, Explore, Likelihood, Models)
_ALL += (Noise, Report, Restore, Sample, Sweep, Table, Train, Tune, Verify)
COMMANDS: dict[str, type[Command]] = {command.__name__.lower(): command for command in _ALL}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 where the input is at fault, or 130 after an interrupt."""
    wait_briefly()  # before anything imports torch
    keep_freed_memory()  # without it, 40 % of the time of computing features went into page faults
    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # so that any name can be printed
    arguments = sys.argv[1:] if argv is None else argv
    try:
        if arguments == ["--version"]:
            print(f"nidiff {nidiff.__version__}")
        elif not arguments:
            print(_greeting())
        elif arguments[0].partition("=")[0] == "--completion":
            print(completion(" ".join([*arguments[0].split("=")[1:], *arguments[1:]]), COMMANDS))
        else:
            arguments, modules = split_imports(arguments)
            with _plain_warnings():
                import_plugins(modules)
            command = parse_command(arguments or ["--help"])
            remarks = _without_remarks() if getattr(command, "quiet", False) else contextlib.nullcontext()
            with explained(), _plain_warnings(), remarks:
                command.run()
        sys.stdout.flush()
    except SystemExit as stop:  # how tyro ends after --help
        return int(stop.code or 0)
    except (Interrupted, KeyboardInterrupt) as error:
        return _stop(INTERRUPTED, str(error) or "interrupted")
    except BrokenPipeError:  # of `nidiff … | head`, which has read enough
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return BROKEN_PIPE
    except Exception as error:
        if (sentence := _sentence(error, arguments)) is None:
            raise
        return _stop(BAD_INPUT, sentence)
    return 0


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """With --quiet, progress and remarks on stderr go nowhere; warnings and errors are printed outside of this."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """What nidiff warns of is one sentence on stderr, once; other warnings stay as they are."""
    ours, before, printed = str(Path(nidiff.__file__).parent), warnings.showwarning, set[str]()
    stderr = sys.stderr

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
        if not issubclass(category, UserWarning) or not filename.startswith(ours):
            before(message, category, filename, lineno, *rest)
        elif (key := str(message) if category is UserWarning else category.__name__) not in printed:
            printed.add(key)  # of a kind that has a name, the first one
            with contextlib.redirect_stderr(stderr):
                _stop(0, str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _open_closed_streams() -> None:
    """Of `nidiff … >&-`: what is printed goes nowhere, instead of into the next file that is opened."""
    for name in ("stdin", "stdout", "stderr"):  # in the order of their numbers
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("r" if name == "stdin" else "w"))  # noqa: SIM115 - until we end


def _greeting() -> str:
    about = "Diffusion models whose Gaussian noise has any covariance you like."
    commands = aligned([(f"  {command}", what) for command, what in GREETING.items()])
    return f"{about}\n\n{commands}\n\nnidiff --help lists all."


def parse_command(arguments: list[str]) -> Command:
    """The command that the words after ``nidiff`` ask for."""
    name, *words = arguments
    if name in ("-h", "--help"):
        choose = tyro.extras.subcommand_cli_from_dict
        choice: Command = choose(dict(COMMANDS), prog="nidiff", description=ABOUT, args=["--help"], config=CONFIG)
        return choice
    command, prog = COMMANDS[one_of("command", name, COMMANDS)], f"nidiff {name}"
    made: Command = command.parsed(words) if hasattr(command, "parsed") else parse(command, words, prog=prog)
    return made


def _stop(code: int, message: str) -> int:
    """Print a message on one line: long values are cut, and characters that cannot be printed are escaped."""
    message = re.sub(rf"'([^']{{{LONGEST}}})[^']+'", r"'\1…'", " ".join(message.split()))
    with contextlib.suppress(OSError):  # stderr is closed or full
        print(f"nidiff: {printable(message)}", file=sys.stderr, flush=True)
    return code


def _sentence(error: Exception, arguments: list[str]) -> str | None:
    """What is wrong and what to do about it; None if the error is a bug.

    Arguments are named as the flags of the command: ``num_steps=3`` as ``--num-steps=3``. A key that was written inside
    NAME:key=value is not a flag.
    """
    command = COMMANDS.get(arguments[0]) if arguments else None
    flags = flags_of(command) if command else {}
    if _lacks_memory(error):
        smaller = [flag for flag in SMALLER if flag in flags]
        remedy = f"give a smaller {' or '.join(smaller)}, or smaller data" if smaller else "use smaller data"
        saved = "; --resume goes on from the last checkpoint" if "--resume" in flags else ""
        return f"there is not enough memory for this: {remedy}{saved}."
    if isinstance(error, InputError):
        keys = re.findall(r"[:,](\w+)=", " ".join(arguments))
        names = {flag[2:].replace("-", "_"): flag for flag in flags}
        return error.rendered(lambda name: name if name in keys else names.get(name, name))
    return _about(error) if isinstance(error, OSError) else None


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory has run out: each library has its own."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError | ImportError) and NO_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _about(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return f"a file or stream cannot be read or written ({reason}): {remedy_for(error)}."
    return f"{os.fsdecode(error.filename)!r} cannot be read or written ({reason}): {remedy_for(error)}."
