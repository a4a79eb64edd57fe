"""The flags that `nidiff denoise` and `nidiff restore` share, and how both end."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from nidiff.errors import InputError, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.generation.opened import Model
    from nidiff.generation.restoration import Plan, Restoration


@dataclass(frozen=True)
class Restoring:
    """Which samples are drawn of each item, how, and where they go."""

    samples: int = 8
    """Samples of each item. From two on, their spread is measured."""
    sampler: Annotated[str | None, arg(metavar="STR", help_behavior_hint="(default: ancestral)")] = None
    """As in nidiff sample. One that adds no fresh noise, such as dpmpp_2m, has one answer for one start. The default is
    ancestral:variance=gaussian if the model knows its data's Gaussian, as nidiff train fits it, else variance=beta."""
    num_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 50, or all there are)")] = None
    """Sampling steps. With few of them, the spread of variance=posterior is too small, and that of beta too large."""
    seed: int = 0
    """Of the first sample of the first item; the samples of all items have seeds that follow."""
    batch: int = 64
    """Samples of an item at a time. It changes the speed and the memory, not the samples."""
    clip: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: the model's own)")] = None
    """The expected clean item is clipped to [-clip, clip] at every step; 0: no clipping."""
    tile: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: 1 to 8, by the size)")] = None
    """Items in one call of the network: the same bits with any --batch; 0: the whole batch."""
    units: Annotated[str, arg(metavar="{data,model}")] = "data"
    """Of --noise: those of the data (of 8-bit pictures, 0 to 255), or those of the model, noise / scale (of 8-bit
    pictures, noise / 127.5)."""
    classes: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """The class of all items, for a model that was trained with labels."""
    guidance: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="(default: 1)")] = None
    """Guidance towards that class: 1 is the law that the model learned."""
    layout: Annotated[str | None, arg(metavar="LETTERS", help_behavior_hint="(default: by the model's shape)")] = None
    """What the axes of an array are, such as NCHW, as in nidiff train."""
    variables: Annotated[tuple[str, ...], arg(metavar="NAME ...", help_behavior_hint="(default: the model's)")] = ()
    """Of NetCDF, HDF5 and Zarr: the variables that are the channels; of .npz: its array."""
    sample_axis: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="(default: the first one)")] = None
    """Of NetCDF, HDF5 and Zarr: the axis of the items."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="(default: in the run)")] = None
    """A new directory for the files; of a model that ships by default in out/NAME."""
    format: Annotated[str, arg(metavar="{npz,netcdf,zarr}")] = "npz"
    """samples.npz alone, or samples.nc or samples.zarr beside it, with names, units and coordinates."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of the directory."""

    def open(self, path: Path) -> tuple["Model", "Plan"]:
        """The model, and the plan of what to draw."""
        from nidiff.generation.opened import open_model, process_state
        from nidiff.generation.restoration import UNITS, check_format, plan_restoration

        one_of("units", self.units, UNITS)
        model = open_model(path, process_state())
        check_format(self.format, model.grid)
        drawing: dict[str, Any] = {"samples": self.samples, "seed": self.seed, "batch": self.batch}
        drawing |= {"clip": self.clip, "tile": self.tile, "guidance": self.guidance}
        drawing["classes"] = [] if self.classes is None else [self.classes]
        return model, plan_restoration(model, self.sampler, self.num_steps, **drawing)

    def load(self, path: Path, model: "Model", shape: tuple[int, ...], *, with_nan: bool = False) -> "Tensor":
        """Items [N, C, *event] in the units of the data."""
        from nidiff.data.items import load_items
        from nidiff.data.science import is_science

        names = self.variables or (model.grid.channels if is_science(path) else ())
        items = load_items(path, shape, layout=self.layout, variables=names, sample_axis=self.sample_axis)
        stored = str(items.dtype).removeprefix("torch.")
        if not items.is_floating_point() and stored != model.grid.dtype:
            problem = f"file={str(path)!r} holds {stored}, and the model's data are {model.grid.dtype}"
            raise InputError(f"{problem}: convert it to their type.")
        known = items.isfinite() if items.is_floating_point() else None
        if known is not None and not bool(known.all()):
            if not with_nan or bool(items.isinf().any()):
                remedy = "use nidiff restore with --missing, which takes NaN as unobserved, or fill them in"
                raise InputError(f"file={str(path)!r} has NaN or infinite values: {remedy}.")
            for item in range(len(items)):
                if not bool(known[item].any()):
                    raise InputError(f"file={str(path)!r}: item {item} is NaN everywhere: leave it out.")
        return items

    def task(self, command: str, path: Path, items: "Tensor", plan: "Plan", **own: Any) -> dict[str, Any]:
        """All that decides the numbers."""
        from nidiff.generation.restoration import values_sha256

        told = {"units": self.units} if "noise" in own else {}
        file = {"file": path.name, "values": values_sha256(items)}
        return {"command": command, "format": self.format, **file, **own, **told, **plan.to_json()}

    def finish(self, model: "Model", task: Mapping[str, Any], make: "Callable[[], Restoration]") -> None:
        """Draw the samples, unless they are there already, write them, and print where they are."""
        from nidiff.generation.restoration import (
            about,
            check_writable,
            default_folder,
            errors_text,
            known_facts,
            new_folder,
        )
        from nidiff.report.restored import save_restored

        out = default_folder(model, task) if self.out is None else self.out
        facts = known_facts(out, task)
        if facts is None:
            check_writable(out)
            found = make()
            measured = {"items": len(found.x), "samples": found.x.shape[1], "same": found.same, **found.errors()}
            facts = {"task": dict(task), "found": measured}
            with new_folder(out, facts) as folder:
                found.write(folder, self.format, about(task))
                save_restored(found, folder / "restored.png")
            if (out / "restored.png").is_file():
                print(f"wrote {out / 'restored.png'}", file=sys.stderr)
        else:
            print("the same was done before, and its files are left as they are", file=sys.stderr)
        measured = facts["found"]
        if measured["same"]:
            print(_ONE_ANSWER.format(task["sampler"]), file=sys.stderr)
        if "rmse_of_mean" in measured:
            print(errors_text(measured), file=sys.stderr)
        print(json.dumps({"out": str(out), **measured}) if self.json else out)


_ONE_ANSWER = (
    "all samples of an item are the same, so they are not draws of the posterior: {} adds no fresh noise (ancestral "
    "does), or all of it is beyond the range of the model."
)
