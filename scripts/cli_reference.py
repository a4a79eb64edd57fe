"""Write docs/cli.md from the commands themselves: `python scripts/cli_reference.py`.

`tests/test_docs.py` fails when the page and the code differ.
"""

import argparse
import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import tyro

from nidiff.cli import ABOUT, COMMANDS
from nidiff.commands.usage import CONFIG, REGISTRY, own_flags
from nidiff.data.spec import changed_flags
from nidiff.training.experiment import PRESETS, Experiment

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
# What tyro puts at the end of a help text; "required" and "optional" have no default.
HINT = re.compile(r"\s*\((?:default: (?P<default>.*)|(?P<other>required.*|optional|repeatable.*))\)\s*$")
NOTHING = {None: "", "none": "", "False": "", "optional": ""}


def page() -> str:
    """The whole page."""
    parts = [
        "# Command line",
        "<!-- Written by scripts/cli_reference.py from the code: change it there. -->",
        ABOUT,
        "Results go to stdout, everything else to stderr. The exit code is 0; 2 where the input is at fault, and one "
        "sentence says what is wrong and what to do; 130 after an interrupt. `python -m nidiff` is the same program.",
        "`nidiff` alone names the commands to begin with. `nidiff --completion bash`, or zsh, prints what a shell "
        "needs to complete commands and flags: [one line](install.md#completion) sets it up.",
        table(("Command", ""), ((f"[`nidiff {name}`](#nidiff-{name})", about(command)) for name, command in shown())),
    ]
    for name, command in shown():
        parts += [f"## nidiff {name}", *section(name, command)]
    return "\n\n".join(parts) + "\n"


def shown() -> list[tuple[str, Any]]:
    return sorted(COMMANDS.items())


def about(command: Any) -> str:
    return text(" ".join((command.__doc__ or "").split("\n\n")[0].split()))


def section(name: str, command: Any) -> list[str]:
    """What a command does, how it is called, its flags; those of a dataclass inside it in a table of their own."""
    parser = parser_of(name, command)
    actions = [action for action in parser._actions if "--help" not in action.option_strings]
    places = [action for action in actions if not action.option_strings]
    usage = " ".join(["nidiff", name, *map(place_of, places), *["[flags]"] * (len(places) < len(actions))])
    parts = [about(command), f"    {usage}"]
    inside = groups(command)
    theirs = {flag[2:].replace("-", "_"): kind for kind in inside for flag in own_flags(kind)}
    parts.append(flags(action for action in actions if owner(action, theirs) is None))
    for kind in inside:
        parts.append(f"### {kind.__name__}\n\n{about(kind)}")
        parts.append(flags(action for action in actions if owner(action, theirs) is kind))
        if kind is Experiment:
            parts += ["### Presets", presets()]
    return parts


def groups(command: Any) -> list[Any]:
    """The dataclasses inside a command, the outer ones first."""
    kinds = [get_type_hints(command)[field.name] for field in dataclasses.fields(command)]
    inside = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    return [*inside, *(inner for kind in inside for inner in groups(kind))]


def parser_of(name: str, command: Any) -> argparse.ArgumentParser:
    """The parser that `nidiff.cli` makes of the command."""
    default = {"default": command.defaults([])} if hasattr(command, "defaults") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # tyro offers no other way to see its flags
        return tyro.extras.get_parser(command, prog=f"nidiff {name}", config=CONFIG, registry=REGISTRY, **default)


def owner(action: argparse.Action, theirs: dict[str, Any]) -> Any:
    return theirs.get(action.dest.rpartition(".")[2].replace("-", "_")) if action.option_strings else None


def flags(actions: Any) -> str:
    return table(("Flag", "Default", "Meaning"), (flag(action) for action in actions))


def flag(action: argparse.Action) -> tuple[str, str, str]:
    """One row: the flag with what follows it, its default, its help."""
    help_text = " ".join((action.help or "").split())
    hint = HINT.search(help_text)
    default = hint and (hint["default"] or hint["other"])
    if hint:
        help_text = help_text[: hint.start()]
    words = f"{action.option_strings[-1]} {metavar(action)}".strip() if action.option_strings else place_of(action)
    return f"`{words}`", text(NOTHING.get(default, default or "")), text(help_text)


def place_of(action: argparse.Action) -> str:
    return f"[{metavar(action)}]" if action.nargs in ("?", "*") else metavar(action)


def metavar(action: argparse.Action) -> str:
    return str(action.metavar or "").strip("[]")


def presets() -> str:
    """Each preset by the flags in which it differs from the defaults."""
    rows = []
    for name, experiment in PRESETS.items():
        words = [f"`{' '.join(flag)}`" for flag in changed_flags(experiment.settings(), Experiment().settings())]
        rows.append((f"`{name}`", " ".join(words) or "the defaults above"))
    return table(("Preset", "Flags that give the same"), rows)


def table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def text(words: str) -> str:
    """As Markdown in a cell of a table; flags as code."""
    words = words.replace("<", "&lt;").replace("|", "\\|")
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*[a-z])(?![\w`])", r"`\1`", words)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
