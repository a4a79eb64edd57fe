"""What a device computes with: float64, which Apple's do not have, and bfloat16, which old processors emulate."""

import functools
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor, nn

BF16_TRIAL = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def with_float64(x: Tensor) -> Tensor:
    """x, on the CPU if its device has no float64."""
    return x if widest(x.device) is torch.float64 else x.cpu()


def has_bf16(device: str | None = None) -> bool:
    """Whether a device, "cpu" or "cuda" (by default a GPU if there is one), computes in bfloat16 without emulation."""
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() and _survives(BF16_TRIAL)


@functools.cache
def _survives(program: str) -> bool:
    """Whether a process lives through a program: some virtual machines announce instructions that kill it."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


class InBf16(nn.Module):
    """A network whose convolutions and products of matrices are computed in bfloat16."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.net(x, *arguments, **named)
