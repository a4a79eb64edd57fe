"""Metrics of generated data against real data: features, images and fields, as tensors or numpy arrays.

`METRICS` has what ``nidiff evaluate`` measures; a `Metric` of your own is an entry of it.
"""

from nidiff.evaluation.distributions import structure_function as structure_function
from nidiff.evaluation.distributions import wasserstein as wasserstein
from nidiff.evaluation.evaluate import evaluate_cell as evaluate_cell
from nidiff.evaluation.evaluate import evaluate_images as evaluate_images
from nidiff.evaluation.frechet import frechet_distance as frechet_distance
from nidiff.evaluation.kernel_distance import kernel_distance as kernel_distance
from nidiff.evaluation.metrics import METRICS as METRICS
from nidiff.evaluation.metrics import Metric as Metric
from nidiff.evaluation.metrics import compare_fields as compare_fields
from nidiff.evaluation.precision_recall import precision_recall as precision_recall
from nidiff.evaluation.samples import SampleSet as SampleSet
from nidiff.evaluation.spectrum import compare_cross_spectra as compare_cross_spectra
from nidiff.evaluation.spectrum import compare_spectra as compare_spectra
from nidiff.evaluation.spectrum import field_spectrum as field_spectrum
from nidiff.evaluation.spectrum import spectrum_error as spectrum_error
from nidiff.evaluation.tune import Tuning as Tuning
from nidiff.evaluation.tune import tune as tune
from nidiff.inverse.scores import covered as covered
from nidiff.inverse.scores import crps as crps
from nidiff.inverse.scores import rank_histogram as rank_histogram
