"""Modules of your own for the command line: they add to the registries when they are imported.

A command imports the plugins of all installed packages, which name them as entry points in the group `GROUP`, and then
the modules that ``--import`` names. A module is never imported because a file names it.
"""

import importlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from nidiff.errors import InputError, first_line

GROUP = "nidiff.plugins"
FLAG = "--import"
IMPORTED: list[str] = []  # by --import
OURS = ("nidiff", "torch", "diffusers", "builtins", "__main__")  # of which no model has to say that it needs them


def split_imports(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without each ``--import MODULE``, and the modules."""
    rest, modules, left = list[str](), list[str](), iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        module = value if equals else next(left, "")
        if not module or module.startswith("-"):
            raise InputError(FLAG, None, "names no module", "give one, such as --import my_module")
        modules.append(module)
    return rest, modules


def import_plugins(modules: Iterable[str] = ()) -> None:
    """Import the plugins of installed packages, and ``modules``, also from the current folder.

    An installed plugin that cannot be imported is left out with a warning; such a module of ``modules`` is refused.
    """
    for plugin in entry_points(group=GROUP):
        try:
            plugin.load()
        except Exception as error:  # whatever somebody else's module raises
            warnings.warn(f"the plugin {plugin.value} was left out ({first_line(error)}).", stacklevel=2)
    for module in modules:
        try:
            import_here(module)
        except (Exception, SystemExit) as error:  # it is a program
            problem = f"cannot be imported ({type(error).__name__}: {first_line(error)})"
            raise InputError(FLAG, module, problem, "correct it, install it, or run this where its file is") from error
        IMPORTED.append(module)


def import_here(module: str) -> ModuleType:
    """A module that the user names, of the current folder or an installed one. The folder is searched for this module
    alone, so that other files in it are not taken for packages that are missing."""
    before = [*sys.path]
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module)
    finally:
        sys.path[:] = before


def import_words() -> list[str]:
    """The words of a command line that import the same modules."""
    return [word for module in dict.fromkeys(IMPORTED) for word in (FLAG, module)]


def modules_of(parts: Iterable[object]) -> list[str]:
    """The modules that ``parts``, functions or classes, come from, without those of nidiff and its dependencies."""
    names = {getattr(getattr(part, "func", part), "__module__", None) or "builtins" for part in parts}
    return sorted(name for name in names if name.partition(".")[0] not in OURS)
