"""HDF5 files that must not lead to others."""

from pathlib import Path
from typing import Any

from nidiff.errors import FileError
from nidiff.extras import require


def check_hdf5(path: Path) -> None:
    """Refuse a file that would have us read other files."""
    h5py = require("h5py")

    def refers(name: str, link: Any) -> str | None:
        if isinstance(link, h5py.ExternalLink):
            return name
        entry = None if isinstance(link, h5py.SoftLink) else file[name]
        return name if isinstance(entry, h5py.Dataset) and (entry.is_virtual or entry.external) else None

    with h5py.File(path, "r") as file:
        elsewhere = file.visititems_links(refers)
    if elsewhere is not None:
        raise FileError("data", str(path), f"refers to another file for {elsewhere!r}", "copy the values into it")
