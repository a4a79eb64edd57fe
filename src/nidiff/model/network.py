"""The default network: diffusers' UNet2DModel, sized by a few numbers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nidiff.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Module


def unet(
    image_shape: Sequence[int],
    *,
    widths: Sequence[int] = (32, 64),
    layers: int = 2,
    attention: Sequence[int] = (1,),
    dropout: float = 0.0,
) -> "Module":
    """A U-Net for images [C, H, W]: one resolution per width, each half the one before, ``layers`` blocks per
    resolution and self-attention at the resolutions listed in ``attention`` (0 is the full one).

    widths (128, 256, 256, 256), layers 2, attention (1,) is DDPM's CIFAR-10 network (35.7M parameters).
    """
    from diffusers import UNet2DModel

    channels, height, width = image_shape
    check_size(height, width, len(widths))
    if not widths or any(w < 8 or w % 8 for w in widths):
        raise InputError(f"widths={tuple(widths)} must be multiples of 8.")
    if any(not 0 <= depth < len(widths) for depth in attention):
        raise InputError(f"attention={tuple(attention)} must list resolutions from 0 to {len(widths) - 1}.")
    down = tuple("AttnDownBlock2D" if i in attention else "DownBlock2D" for i in range(len(widths)))
    up = tuple("AttnUpBlock2D" if i in attention else "UpBlock2D" for i in reversed(range(len(widths))))
    network: Any = UNet2DModel(
        sample_size=(height, width),
        in_channels=channels,
        out_channels=channels,
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        down_block_types=down,
        up_block_types=up,
        norm_num_groups=min(32, math.gcd(*widths) // 4),
        attention_head_dim=None,
        dropout=dropout,
    )
    return network


def check_size(height: int, width: int, resolutions: int) -> None:
    """Each resolution but the last is halved."""
    factor = 2 ** (resolutions - 1)
    if height % factor or width % factor:
        fits = ", ".join(str(max(1, n // factor) * factor) + f" or {-(-n // factor) * factor}" for n in (height, width))
        raise InputError(
            f"size={height}×{width} cannot be halved {resolutions - 1} times: use multiples of {factor} ({fits}), "
            "or fewer widths."
        )
