"""Small problems run faster on one thread, and the suite runs in two processes."""

import torch

torch.set_num_threads(1)
