"""The power of restored items, where the truth is known."""

from typing import Any

from nidiff.evaluation.spectrum import Shells
from nidiff.generation.restoration import Restoration


def spectra(restoration: Restoration, boundary: tuple[str, ...]) -> dict[str, Any]:
    """The power in bands of the truth, of the samples, of their mean and of the baselines, of each channel in the units
    of the model; nothing where the truth is not known, or not everywhere."""
    truth, scaling = restoration.truth, restoration.scaling
    if truth is None or (scaling is not None and scaling.domain is not None) or max(truth.shape[2:]) < 2:
        return {}
    shells = Shells(tuple(truth.shape[2:]), None, boundary)
    fields = {"truth": truth if scaling is None else scaling.to_model(truth.double())}
    fields |= {"samples": restoration.x.flatten(0, 1), "mean": restoration.x.double().mean(1)}
    for name, baseline in restoration.baselines.items():
        fields[name] = baseline.mean if baseline.samples is None else baseline.samples.flatten(0, 1)
    powers = {name: shells.in_bands(shells.powers(x)).mean(0).tolist() for name, x in fields.items()}
    return {"spectrum": {"bands": [list(band) for band in shells.bands], "power": powers}}
