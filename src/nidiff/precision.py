"""float64, which Apple's devices do not have."""

import torch
from torch import Tensor


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def with_float64(x: Tensor) -> Tensor:
    """x, on the CPU if its device has no float64."""
    return x if widest(x.device) is torch.float64 else x.cpu()
