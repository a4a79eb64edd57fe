from .dataset import Dataset as Dataset
from .grid import Grid as Grid
from .spec import DataSpec as DataSpec
