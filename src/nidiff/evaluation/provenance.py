"""Where a number comes from."""

import hashlib
import subprocess
from pathlib import Path

import nidiff
from nidiff.files import file_sha256


def model_sha256(folder: Path) -> str:
    """The checksum of the network and of its Σ, schedule and target: what the images of a model depend on."""
    digest = hashlib.sha256()
    for file in sorted(path for part in ("unet", "scheduler") for path in (folder / part).iterdir()):
        digest.update(f"{file.relative_to(folder)} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def commit() -> str | None:
    """The commit of the checkout that nidiff runs from, marked where it was changed; None where it was installed."""
    root = Path(nidiff.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
