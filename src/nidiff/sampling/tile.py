"""A network that gives an image the same bits in a batch of any size.

How a convolution or a matrix product rounds depends on the size of the batch, not on the place in it or on the other
images. So the network is always called on the same number of images.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nidiff.diffusion.denoiser import as_tensor
from nidiff.recipe import check_whole

PIXELS, MOST = 2**14, 64
LARGEST = 4096


def tile_size(*event: int) -> int:
    """A power of two that keeps a processor busy and wastes little of a short batch, for items of one to three axes.

    64 at 8×8, 16 at 32×32 and for signals of 1024, 4 at 64×64, 1 from 128×128 and 32×32×32 on.
    """
    return 1 << (min(max(PIXELS // math.prod(event), 1), MOST).bit_length() - 1)


class Tiled(torch.nn.Module):
    """``net`` called on ``size`` images at a time, the last of which are filled up with copies; with a label and a row
    of every condition per image."""

    def __init__(self, net: Callable[..., Any], size: int) -> None:
        super().__init__()
        self.net, self.size = net, check_whole("tile", size, 1, LARGEST)

    def forward(self, x: Tensor, label: Tensor, **conditions: Any) -> Tensor:
        missing = -len(x) % self.size
        index = torch.arange(len(x) + missing, device=x.device).clamp(max=len(x) - 1)
        parts = []
        for part in index.split(self.size):
            values = {name: value[part] if isinstance(value, Tensor) else value for name, value in conditions.items()}
            parts.append(as_tensor(self.net(x[part], label[part], **values)))
        return torch.cat(parts)[: len(x)]
