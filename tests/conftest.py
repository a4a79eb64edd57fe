"""Small problems run faster on one thread, and the suite runs in two processes."""

import torch
from browser import browser  # noqa: F401  (a fixture for all)

torch.set_num_threads(1)
