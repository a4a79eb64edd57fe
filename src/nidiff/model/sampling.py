"""sampling.json of a model: the samplers that were chosen for few steps, with what they were chosen by.

It carries its own checksum and that of the model, so that it is written in one piece and never used for another model;
it is no part of the model's identity, for a job names its sampler: samples that were drawn before stay valid.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from nidiff import __version__
from nidiff.diffusion.choice import Choice
from nidiff.files import blaming, locked, replace_json, writing
from nidiff.recipe import fits
from nidiff.sealed import read_sealed, seal

FORMAT, SAMPLING = 1, "sampling.json"
DELETE = "delete it, and run nidiff tune again"
KINDS = {"evaluations": int, "sampler": str, "num_steps": int, "facts": dict}


def write_choices(file: Path, choices: Sequence[Choice], sha256: str) -> None:
    """Write the choices of the model with the checksum ``sha256``."""
    rows = [choice._asdict() for choice in sorted(choices, key=lambda choice: choice.evaluations)]
    replace_json(file, seal({"format": FORMAT, "nidiff": __version__, "model_sha256": sha256, "choices": rows}))


def store_choices(file: Path, choices: Sequence[Choice], sha256: str) -> None:
    """Add choices to those of the model with the checksum ``sha256``, in place of others for as many evaluations."""
    with writing("model", file), locked(file.parent):
        new = {choice.evaluations for choice in choices}
        before = [known for known in read_choices(file, sha256) if known.evaluations not in new]
        write_choices(file, [*before, *choices], sha256)


def read_choices(file: Path, sha256: str) -> tuple[Choice, ...]:
    """The choices in a file, if there is one and it is of the model with the checksum ``sha256``."""
    if not file.is_file():
        return ()
    values = read_sealed(file, FORMAT, DELETE)
    if values.get("model_sha256") != sha256:
        problem = "is of another model, or of this one before it changed, and is not used"
        print(f"{file} {problem}: run nidiff tune again", file=sys.stderr)
        return ()
    with blaming(file, DELETE):
        for row in values["choices"]:
            if wrong := [name for name, kind in KINDS.items() if not fits(row[name], kind)]:
                raise TypeError(f"{wrong[0]} is not of its kind")
        return tuple(Choice(**row) for row in values["choices"])
