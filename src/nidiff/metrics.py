"""Metrics of generated data against real data: features, images and fields, as tensors or numpy arrays.

`METRICS` has what ``nidiff evaluate`` measures; a `Metric` of your own is an entry of it.
"""

from nidiff.evaluation.distributions import structure_function, wasserstein
from nidiff.evaluation.evaluate import evaluate_cell, evaluate_images
from nidiff.evaluation.frechet import frechet_distance
from nidiff.evaluation.kernel_distance import kernel_distance
from nidiff.evaluation.metrics import METRICS, Metric, compare_fields
from nidiff.evaluation.precision_recall import precision_recall
from nidiff.evaluation.samples import SampleSet
from nidiff.evaluation.spectrum import compare_cross_spectra, compare_spectra, field_spectrum, spectrum_error

__all__ = [
    "METRICS",
    "Metric",
    "SampleSet",
    "compare_cross_spectra",
    "compare_fields",
    "compare_spectra",
    "evaluate_cell",
    "evaluate_images",
    "field_spectrum",
    "frechet_distance",
    "kernel_distance",
    "precision_recall",
    "spectrum_error",
    "structure_function",
    "wasserstein",
]
