"""Tables of stations: a row for each place, with its coordinates, what was observed there, and the error of that.

The columns are called as the axes and channels of a model, with the error of NAME in NAME_error, and a unit may follow
in brackets: latitude, longitude, t2m (K), t2m_error (K), and time where there are several. Or a row has one value:
variable, value, error.
"""

import csv
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nidiff.data.grid import Grid
from nidiff.data.match import columns_of_axes, converted, is_time
from nidiff.data.science import is_table, read_columns
from nidiff.errors import FileError, known_names, printable, shown
from nidiff.files import blaming

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nidiff.diffusion.climatology import Times

ERROR, VARIABLE, VALUE = "error", "variable", "value"
SEPARATORS = (",", ";", "\t")
MISSING = ("", "na", "n/a", "nan", "null", "none", "-")
HEADER = re.compile(r"(.*?)\s*[(\[](.*)[)\]]\s*")  # a name, and a unit in brackets
ARGUMENT = "stations"
Columns = Mapping[str, "tuple[NDArray[Any], str]"]
"""The columns of a table by their names, each with its unit; texts are numbers or times that are still to be read."""


@dataclass(frozen=True, eq=False)
class Stations:
    """P places, and what was observed there, in the units of a model's data."""

    name: str
    places: "NDArray[np.float64]"
    """[P, axes], in the units of the grid's coordinates."""
    values: "NDArray[np.float64]"
    """[C, P], NaN where nothing was observed."""
    errors: "NDArray[np.float64]"
    """[C, P], standard deviations, NaN where nothing was observed."""
    rows: "NDArray[np.int64]"
    """[P], the number of the row in the table, from 1."""
    times: "Times | None" = None
    """[P], when each was observed."""

    def take(self, chosen: "NDArray[Any]") -> "Stations":
        """Some of the places."""
        times = None if self.times is None else self.times[chosen]
        columns = (self.values[:, chosen], self.errors[:, chosen])
        return Stations(self.name, self.places[chosen], *columns, self.rows[chosen], times)


def read_stations(source: Any, grid: Grid, *, error: float | None = None, has_values: bool = True) -> Stations:
    """The stations of a table on the ``grid`` of a model: of a .csv or .tsv file, NetCDF or Zarr, a DataFrame of
    pandas, a Dataset of xarray, or a mapping from the names of columns to numbers.

    Args:
        error: the standard deviation of values whose error the table does not give, in the units of the data.
        has_values: false if only the places and the errors are wanted; a column of values that is there says by NaN
            which are not observed.
    """
    name = str(source) if isinstance(source, Path) else "the table"
    columns, file, notes = _columns(source, name), (ARGUMENT, name), list[str]()
    units = {column: unit for column, (_, unit) in columns.items()}
    found = columns_of_axes([*columns], units, grid)
    if None in found:
        lacking = [axis for axis, column in zip(grid.axes, found, strict=True) if column is None]
        problem = f"has the columns {', '.join(columns) or 'none'}, and no coordinate {' and '.join(lacking)}"
        raise FileError(*file, problem, f"name the columns of the coordinates {', '.join(grid.axes)}")
    axes = [column for column in found if column is not None]
    places = np.empty((len(columns[axes[0]][0]), len(axes)))
    for axis, column in enumerate(axes):
        given, wanted = units[column], grid.axis_units.get(grid.axes[axis], "")
        numbers = _numbers(columns, column, file)
        places[:, axis] = converted(numbers, column, (given, wanted) if given and wanted else ("", ""), file, notes)
    when = next((column for column in columns if column not in axes and is_time(column, grid)), None)
    times = None if when is None else _times(columns[when][0], when, file)
    values, errors, used = _values(columns, grid, file, notes, has_values)
    rows = np.arange(1, len(places) + 1)
    if unread := [column for column in columns if column not in {*axes, *used, when}]:
        notes.append(f"it has columns that are not read: {', '.join(unread)}")
    if notes:
        warnings.warn(f"{shown(name)}: {'; '.join(dict.fromkeys(notes))}.", stacklevel=2)
    known = np.isfinite(values).any(0)
    if not known.any():
        raise FileError(*file, "has no value that was observed", f"give values of {_channels(grid)}")
    if (lost := known & ~np.isfinite(places).all(1)).any():
        problem = f"has {_counted(lost, rows)} without a coordinate"
        raise FileError(*file, problem, "give all coordinates, or leave them out")
    if error is not None:
        errors = np.where(np.isnan(errors), error, errors)
    errors = np.where(np.isfinite(values), errors, np.nan)
    if (wrong := np.isfinite(values) & ~((errors > 0) & np.isfinite(errors))).any():
        is_missing = bool(np.isnan(errors[wrong]).all())
        problem = (
            f"has {_counted(wrong.any(0), rows)} {'without an error' if is_missing else 'with an error of 0 or less'}"
        )
        remedy = f"add a column {_channels(grid)}_error, or give `noise`" if is_missing else "give errors above 0"
        raise FileError(*file, problem, remedy)
    return Stations(name, places, values, errors, rows, times).take(known)


def _counted(chosen: "NDArray[Any]", rows: "NDArray[Any]") -> str:
    return f"{int(chosen.sum())} of {len(rows)} rows, the first in row {rows[int(chosen.argmax())]},"


def _channels(grid: Grid) -> str:
    return " or ".join(grid.channels) or VALUE


def _values(
    columns: Columns, grid: Grid, file: tuple[str, str], notes: list[str], has_values: bool
) -> "tuple[NDArray[Any], NDArray[Any], set[str]]":
    """Values and errors [C, P] in the units of the data, NaN where there are none, and the columns that they are."""
    names = grid.channels or (VALUE,)
    count = len(next(iter(columns.values()))[0])
    values, errors = np.full((len(names), count), np.nan), np.full((len(names), count), np.nan)
    if VARIABLE in columns and not {*names} & {*columns}:  # a value in each row
        which, used = np.asarray(columns[VARIABLE][0]).astype(str), {VARIABLE, VALUE, ERROR}
        if unknown := {*which.tolist()} - {*names}:
            problem = f"has values of {min(unknown)!r}, which is no channel of the model"
            raise FileError(*file, problem, known_names(min(unknown), names))
        pairs = [(channel, VALUE, ERROR, which == name) for channel, name in enumerate(names)]
    else:
        everywhere = np.ones(count, dtype=bool)
        pairs = [(channel, name, f"{name}_{ERROR}", everywhere) for channel, name in enumerate(names)]
        if len(names) == 1:
            _, name, wrong, _ = pairs[0]
            pairs = [(0, name if name in columns else VALUE, wrong if wrong in columns else ERROR, everywhere)]
        used = {column for _, *pair, _ in pairs for column in pair}
    if not {value for _, value, _, _ in pairs} & {*columns}:
        if has_values:
            problem = f"has the columns {', '.join(columns)}, and the channels are {', '.join(names)}"
            raise FileError(*file, problem, "name the columns of the values as the channels, or variable and value")
        values[:] = 0.0
    for channel, value, wrong, chosen in pairs:
        wanted = grid.units[channel] if grid.units else ""
        unit = columns[value][1] if value in columns else ""
        for target, column, given in (
            (values, value, unit),
            (errors, wrong, columns[wrong][1] or unit if wrong in columns else ""),
        ):
            if column in columns:
                numbers = _numbers(columns, column, file)[chosen]
                label = names[channel] if column == value else f"the error of {names[channel]}"
                target[channel, chosen] = converted(
                    numbers, label, (given, wanted), file, notes, is_difference=column == wrong
                )
    return values, errors, used


def _numbers(columns: Columns, column: str, file: tuple[str, str]) -> "NDArray[np.float64]":
    """A column as numbers, NaN where it is empty."""
    values = columns[column][0]
    if values.dtype.kind not in "OU":
        return values.astype(np.float64)
    words = [str(word).strip() for word in values]
    numbers = np.empty(len(words))
    for row, word in enumerate(words):
        try:
            numbers[row] = np.nan if word.lower() in MISSING else float(word)
        except ValueError:
            problem = f"has {shown(printable(word))} in row {row + 1} of the column {column}"
            raise FileError(*file, problem, "give numbers, and nothing where none is known") from None
    return numbers


def _times(values: "NDArray[Any]", column: str, file: tuple[str, str]) -> "Times":
    try:
        words = values if values.dtype.kind == "M" else np.char.rstrip(values.astype(str), "Z")
        times: Times = np.array(words, dtype="datetime64[s]")
        if values.dtype.kind in "iuf" or np.isnat(times).any():
            raise ValueError(column)
    except ValueError:
        problem = f"has a column {column} that holds no times of everyday life"
        raise FileError(*file, problem, "write them as 2020-01-31 or 2020-01-31T12:00") from None
    return times


# Tables -------------------------------------------------------------------------------------------------------------


def _columns(source: Any, name: str) -> Columns:
    """The columns of a table."""
    if isinstance(source, Path):
        if not source.is_file() and not is_table(source):
            raise FileError(ARGUMENT, name, "does not exist", "give a table with coordinates and values")
        return _of_netcdf(source) if is_table(source) else _of_text(source, name)
    if is_table(source):
        return _of_netcdf(source)
    named: dict[str, Any]
    if "pandas" in sys.modules and isinstance(source, sys.modules["pandas"].DataFrame):
        named = {str(column): source[column].to_numpy() for column in source.columns}
    elif isinstance(source, Mapping):
        named = {str(column): np.asarray(values) for column, values in source.items()}
    else:
        problem = f"is a {type(source).__name__}"
        raise FileError(ARGUMENT, None, problem, "give a path, a DataFrame, a Dataset of xarray, or a dict of columns")
    if len({np.shape(values) for values in named.values()}) > 1 or any(
        np.ndim(values) != 1 for values in named.values()
    ):
        shapes = ", ".join(f"{column} {np.shape(values)}" for column, values in named.items())
        raise FileError(ARGUMENT, name, f"has columns of several shapes ({shapes})", "give columns of one length")
    return _with_units(named)


def _of_netcdf(source: Any) -> Columns:
    return read_columns(source, ARGUMENT)


def _of_text(file: Path, name: str) -> Columns:
    """A file with a line of names, and a line for each row; lines that begin with # are skipped."""
    with blaming(
        name, "write a line of names and a line for each row, in UTF-8", "cannot be read as a table", ARGUMENT
    ):
        with file.open(encoding="utf-8-sig", newline="") as stream:
            lines = [line for line in stream if line.strip() and not line.startswith("#")]
        separator = max(SEPARATORS, key=lines[0].count) if lines else ","
        head, *rows = list(csv.reader(lines, delimiter=separator, skipinitialspace=True)) or [[]]
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            problem = f"has {len(row)} entries in row {number}, and {len(head)} names"
            raise FileError(ARGUMENT, name, problem, "give one entry for each name")
    if not rows or len({*head}) < len(head):
        problem = "has no rows" if not rows else "has a name twice"
        raise FileError(ARGUMENT, name, problem, "write a line of different names and a line for each row")
    return _with_units(
        {name: np.array(values, dtype=object) for name, values in zip(head, zip(*rows, strict=True), strict=True)}
    )


def _with_units(columns: Mapping[str, Any]) -> Columns:
    """Columns by their names without the units that stand in brackets behind them."""
    known = {}
    for name, values in columns.items():
        match = HEADER.fullmatch(name)
        known[printable((match[1] if match else name).strip())] = values, printable(match[2].strip()) if match else ""
    return known
