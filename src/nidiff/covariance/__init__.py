"""Bases, numbers per mode of a basis, and the covariances made of them."""

from nidiff.covariance.basis import Basis, Eigen, PerMode, Pixels, Product
from nidiff.covariance.config import BASES
from nidiff.covariance.families import FAMILIES
from nidiff.covariance.fields import FIELDS
from nidiff.covariance.modes import Modes
from nidiff.covariance.waves import Waves
from nidiff.recipe import remembered

__all__ = [
    "BASES",
    "FAMILIES",
    "FIELDS",
    "Basis",
    "Eigen",
    "Modes",
    "PerMode",
    "Pixels",
    "Product",
    "Waves",
    "remembered",
]
