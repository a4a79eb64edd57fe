"""What was measured of fields, for a terminal: a line per metric, and the tables of the spectra."""

from collections.abc import Mapping
from typing import Any

from nidiff.aligned import aligned
from nidiff.evaluation.results import Measured, Result
from nidiff.evaluation.table import PLAIN, notes, number

MOST_TABLES = 8  # of spectra


def field_text(result: Result) -> str:
    """The metrics of one result with the same of real data, the band tables, and where the numbers come from."""
    floor, bands = result.details.get("floor", {}), result.details.get("bands", [])
    drawn = "" if result.sampler == "-" else f", {result.sampler_text} {result.num_steps}"
    head = [PLAIN.escape(f"{result.run}{drawn}"), "generated", "real"]
    rows = [[PLAIN.escape(name), number(one, PLAIN), _floor(floor.get(name))] for name, one in result.metrics.items()]
    against = result.details.get("floor_of", "other real data")
    parts = [aligned([head, *rows]), f"All are errors, 0 is best; real: the same of {against} in place of samples."]
    parts += [_table(table) for table in bands[:MOST_TABLES]]
    if len(bands) > MOST_TABLES:
        parts.append(f"and {len(bands) - MOST_TABLES} more tables, which --json prints.")
    if result.provenance.get("split") == "train":
        parts.append("The real data are those that the model was trained on: hold a part out for an honest comparison.")
    return "\n\n".join([*parts, *notes([result], PLAIN)])


def _floor(one: Any) -> str:
    return number(Measured(one["value"], one["error"]), PLAIN) if isinstance(one, Mapping) else PLAIN.missing


def _table(table: Mapping[str, Any]) -> str:
    """A spectrum of one channel, or the coherence of two."""
    if "spectrum" in table:
        title, columns = f"Spectrum over {table['spectrum']} of {table['channel']}", {"ratio": "{:.3g}"}
    else:
        title, columns = f"Coherence over {table['coherence']} of {table['channels']}", {}
    rows = [["k", "real", "generated", *columns, "z"]]
    for band in table["bands"]:
        low, high = int(band["low"]), int(band["high"])
        sides = [number(Measured(band[side], band[f"{side}_error"]), PLAIN) for side in ("real", "generated")]
        extra = [_shown(band[key], words) for key, words in columns.items()]
        rows.append([f"{low}" if low == high else f"{low}-{high}", *sides, *extra, _shown(band["z"], "{:.1f}")])
    inside = sum(band["z"] is not None and abs(band["z"]) <= 2 for band in table["bands"])
    share = f"{inside} of {len(table['bands'])} bands are within 2 standard errors of the real data"
    return "\n".join([f"{PLAIN.escape(title)}: {share}", aligned(rows)])


def _shown(value: float | None, words: str) -> str:
    return PLAIN.missing if value is None else words.format(value)
