"""What ``nidiff restore`` is given: a file, stations, or both; and the truth, where it is known."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nidiff.errors import FileError, InputError, renamed

if TYPE_CHECKING:
    from torch import Tensor

    from nidiff.commands.restore import Restore
    from nidiff.data.dataset import Dataset
    from nidiff.data.stations import Stations
    from nidiff.generation.loaded_model import Model
    from nidiff.generation.observed import Observed


@dataclass(frozen=True, eq=False)
class Seen:
    """What was observed, and what of it decides the numbers."""

    path: Path
    model: "Model"
    """The model for the items, whose times it knows."""
    data: "Dataset"
    """What the file holds, and what the items lie along."""
    observed: "Observed"
    truth: "Tensor | None"
    """[N, C, *event] in the units of the data."""
    arguments: dict[str, Any]
    """Those of the command that decide the numbers."""


def observed_by(command: "Restore", model: "Model", kind: str | None) -> Seen:
    """What a command observes; ``kind`` is the flag that says what its FILE holds."""
    arguments = {kind: getattr(command, kind)} if kind is not None else {}
    stations = None if command.stations is None else _stations(command, model)
    if command.file is None:
        assert stations is not None
        path, model, data, observed = _of_stations(command, model, stations)
    else:
        path = command.file
        model, data = _load(command, path, model, kind)
        if stations is not None:
            model, data = _at_times_of(stations, command, model, data)
        observed, arguments = _of_file(command, model, data, kind, arguments)
        if stations is not None:
            observed = _with_stations(command, model, data, stations, observed)
    if stations is not None:
        arguments |= {"stations": _digest(stations), "interpolation": command.interpolation}
    truth = cast("Tensor", data.values).double() if command.degrade else None
    if command.truth is not None:
        truth = _truth(command, model, data, len(observed))
        arguments["truth"] = tensors_digest(truth)
    return Seen(path, model, data, observed, truth, arguments)


def tensors_digest(*tensors: "Tensor") -> str:
    """The sha256 of tensors with their shapes."""
    from nidiff.sealed import shaped, tensors_sha256

    return tensors_sha256(part for tensor in tensors for part in shaped(tensor))


# A file -------------------------------------------------------------------------------------------------------------


def _load(command: "Restore", path: Path, model: "Model", kind: str | None) -> "tuple[Model, Dataset]":
    """The items of FILE, or y of an operator, and the model for them."""
    flags, scale = command.restoring, 1 if command.degrade else command.scale or 1
    if kind == "operator" and not command.degrade:
        import torch

        from nidiff.covariance.checks import as_numbers
        from nidiff.data.arrays import stored_array
        from nidiff.data.dataset import Dataset
        from nidiff.data.grid import Grid

        if not path.is_file():
            raise FileError("file", str(path), "does not exist", "give an array with one row for each item")
        values = as_numbers(stored_array(path, "file", flags.variables), "file").to(torch.float64)
        if not bool(values.isfinite().all()):
            raise FileError("file", str(path), "has NaN or infinite values", "give finite numbers")
        data = Dataset(values, grid=Grid(("entry",)))  # y has the shape of no item
        return model.about(data, path), data
    _blocks_or_blur(command, model, kind)  # which refuses what makes no sense before a file is read
    reading: Any = {"noise": _number(command), "with_nan": kind in ("mask", "missing")}
    return flags.load(path, model, scale=scale, **reading)


def _number(command: "Restore") -> float:
    """The standard deviation of the noise, where it is one number."""
    try:
        return float(command.noise) if command.variance is None else max(0.0, float(command.variance)) ** 0.5
    except ValueError:
        return 0.0


def _of_file(
    command: "Restore", model: "Model", data: "Dataset", kind: str | None, arguments: dict[str, Any]
) -> "tuple[Observed, dict[str, Any]]":
    """The observation of the items of FILE, and what decides it."""
    import torch

    from nidiff.generation.observations import observe
    from nidiff.generation.observed import Observed, rows_of
    from nidiff.generation.own import check_noise, load_operator, observe_operator, read_noise

    flags, items = command.restoring, cast("Tensor", data.values)
    if kind is None:  # stations see it
        return Observed((), torch.zeros(0)), arguments
    name, text = ("noise", command.noise) if command.variance is None else ("variance", command.variance)
    degrading: Any = {"degrade": command.degrade, "seed": flags.seed}
    if kind == "operator":
        assert command.operator is not None
        operator, event = load_operator(command.operator), tuple(items.shape[1:])
        if command.degrade:
            event = tuple(seen_shape(operator, command.operator, model))
        noise = check_noise(read_noise(text, name, event, len(items), None, None), None, name, text)
        observation, shown = observe_operator(model, operator, items, noise, text=command.operator, **degrading)
        observed = Observed(rows_of(observation), shown)
    else:
        if kind in ("scale", "blur"):
            operator = _blocks_or_blur(command, model, kind)
            event = tuple(operator(torch.zeros(1, *model.shape)).shape[1:])
        else:
            operator, event = _mask(command, model, items), model.shape
            arguments["masks"] = tensors_digest(cast("Tensor", operator.observed))
        noise = read_noise(text, name, event, len(items), command.file, model if event == model.shape else None)
        seen = None if operator.observed is None else operator.observed.expand(len(items), *event)
        noise = check_noise(noise, seen, name, text)
        observation = observe(model, items, operator, noise, units=flags.units, **degrading)
        observed = Observed.of(model, observation, block={"scale": command.scale or 0, "blur": 1}.get(kind or "", 0))
    arguments["noise"] = tensors_digest(noise) if isinstance(noise, torch.Tensor) else noise
    return observed, arguments


def _blocks_or_blur(command: "Restore", model: "Model", kind: str | None) -> Any:
    from nidiff.generation.observations import blurring, pooling

    if kind == "scale":
        return pooling(model, cast(int, command.scale))
    return blurring(model, cast(float, command.blur)) if kind == "blur" else None


def seen_shape(operator: Any, text: str, model: "Model") -> "tuple[int, ...]":
    """The shape of what an operator of the user's makes of an item."""
    import torch

    from nidiff.errors import first_line
    from nidiff.generation.own import TAKES

    try:
        return tuple(operator(torch.zeros(1, *model.shape)).shape[1:])
    except InputError as error:
        raise InputError("operator", text, error.problem, error.remedy) from error
    except Exception as error:  # of a program of the user's
        problem = f"fails for items of shape {(1, *model.shape)} ({first_line(error)})"
        raise InputError("operator", text, problem, TAKES) from error


def _mask(command: "Restore", model: "Model", items: "Tensor") -> Any:
    from nidiff.generation.observations import MASK, NOT, as_mask, seeded
    from nidiff.generation.own import field_of
    from nidiff.inverse.operators import mask

    if command.mask is None:
        return mask(items.isfinite())
    word = command.mask.removeprefix(NOT)
    field = None if Path(word).exists() else field_of(word, "mask", command.file, model)
    if field is None:
        masks = as_mask(command.mask, model.shape, seeded(command.restoring.seed, MASK)).expand(items.shape)
    else:
        if not bool(((field == 0) | (field == 1) | field.isnan()).all()) or len(field) not in (1, len(items)):
            problem = f"has {len(field)} items, or numbers other than 0 and 1"
            raise InputError("mask", command.mask, problem, "give zeros and ones, for all items or for each")
        masks = ((field == 1) if word == command.mask else (field == 0)).expand(items.shape)
        if not bool(masks.flatten(1).any(1).all()):
            raise InputError("mask", command.mask, "observes nothing of an item", "leave that item out")
    inside = True if model.scaling.domain is None else model.scaling.domain
    if bool(((masks | command.degrade) & items.isnan() & inside).any()):
        remedy = "use `missing` instead, without `degrade`"
        raise InputError("mask", command.mask, "includes points that are NaN in the file", remedy)
    return mask(masks)


# Stations -----------------------------------------------------------------------------------------------------------


def _stations(command: "Restore", model: "Model") -> "Stations":
    """The table, matched with the model."""
    from nidiff.data.stations import read_stations
    from nidiff.generation.own import read_noise

    name, text = ("noise", command.noise) if command.variance is None else ("variance", command.variance)
    error: float | None = None
    if text != "0":
        known = read_noise(text, name, (), 1, None, None) if command.file is None else _number(command)
        error = known if isinstance(known, float) and known > 0 else None
    if command.restoring.units != "data" and error is not None:
        raise InputError("units", command.restoring.units, "is not for stations", "give their errors in the table")
    return read_stations(command.stations, model.grid, error=error, has_values=not command.degrade)


def _digest(stations: "Stations") -> str:
    import torch

    from nidiff.sealed import digest

    numbers = (torch.from_numpy(each) for each in (stations.places, stations.values, stations.errors))
    times = [] if stations.times is None else stations.times.astype(str).tolist()
    return digest([tensors_digest(*numbers), times])


def _of_stations(command: "Restore", model: "Model", stations: "Stations") -> "tuple[Path, Model, Dataset, Observed]":
    """What stations alone have observed: an item for each of their times."""
    from dataclasses import replace

    import torch

    from nidiff.data.dataset import Dataset
    from nidiff.generation.stations import observe_stations, times_of

    times, path = times_of(stations), cast(Path, command.stations)
    along = None if times is None else ("time", times)
    blank = Dataset(torch.zeros(1 if times is None else len(times), *model.shape), along=along)
    if times is None and model.scaling.climatology is not None:
        problem = f"has no times, and the model sees {model.scaling.anomalies}"
        raise FileError("stations", str(path), problem, "add a column time, such as 2020-01-31")
    with renamed("file", "stations"):
        model = model.about(blank, path)
    observed = observe_stations(model, stations, times, kind=command.interpolation)
    return path, model, replace(blank, values=observed.shown), observed


def _at_times_of(stations: "Stations", command: "Restore", model: "Model", data: "Dataset") -> "tuple[Model, Dataset]":
    """The items of FILE at the times of the stations, where these have times."""
    from nidiff.generation.stations import times_of

    times, name = times_of(stations), stations.name
    if times is None:
        if len(data.values) > 1 and not command.degrade:
            problem = f"has no times, and {str(command.file)!r} has {len(data.values)} items"
            raise FileError("stations", name, problem, "add a column time")
        return model, data
    data = at_times(data, times, "stations", name, str(command.file))
    return model.about(data, str(command.file)), data


def at_times(data: "Dataset", times: Any, argument: str, name: str, file: str) -> "Dataset":
    """The items of a file at some times; refused if it lacks one of them."""
    import numpy as np
    import torch

    known = None if data.times is None else data.times.astype("datetime64[s]")
    wanted = times.astype("datetime64[s]")
    lacking = wanted if known is None else wanted[~np.isin(wanted, known)]
    if len(lacking):
        problem = f"has {len(lacking)} of {len(wanted)} times that {file!r} lacks, the first {lacking[0]}"
        raise FileError(argument, name, problem, "give the same times in both")
    rows = [int(np.flatnonzero(known == time)[0]) for time in wanted]
    return data.take(torch.tensor(rows))


def _with_stations(
    command: "Restore", model: "Model", data: "Dataset", stations: "Stations", observed: "Observed"
) -> "Observed":
    """What the file says and the stations, too."""
    from nidiff.generation.stations import observe_stations, times_of

    items = cast("Tensor", data.values)
    clean = items if command.degrade else None
    options: Any = {"count": len(items), "kind": command.interpolation, "seed": command.restoring.seed}
    seen = observe_stations(model, stations, times_of(stations), clean, **options)
    return seen if not len(observed) else observed.together(seen)


# The truth ----------------------------------------------------------------------------------------------------------


def _truth(command: "Restore", model: "Model", data: "Dataset", count: int) -> "Tensor":
    """What the items were, at their times."""
    from nidiff.data.load import open_items

    assert command.truth is not None
    known = open_items(command.truth, model.shape, grid=model.grid, argument="truth")
    if data.times is not None and known.times is not None:
        known = at_times(known, data.times, "file", str(command.file or command.stations), str(command.truth))
    values = cast("Tensor", known.values).double()
    inside = True if model.scaling.domain is None else model.scaling.domain
    if len(values) != count or bool((~values.isfinite() & inside).any()):
        problem = f"has {len(values)} items, or NaN among them, and {count} are restored"
        raise FileError("truth", str(command.truth), problem, "give the items that are restored")
    return values
