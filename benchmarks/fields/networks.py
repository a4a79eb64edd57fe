"""Small networks net(x, label) -> a tensor like x, quick enough to train in a minute or two on one core."""

import torch
from diffusers import UNet2DModel
from diffusers.models.embeddings import get_timestep_embedding
from torch import Tensor

from nidiff.model.network import unet2d


class DilatedConvolutions(torch.nn.Module):
    """Residual blocks of dilated convolutions over signals [B, views, L], told the level; edges are repeated.

    ``patch`` neighbours are one position with as many channels. It returns one signal, [B, 1, L].
    """

    def __init__(
        self, views: int = 1, width: int = 48, dilations: tuple[int, ...] = (1, 2, 4, 8, 1, 2, 4, 8), patch: int = 4
    ) -> None:
        super().__init__()
        self.patch, self.width = patch, width
        self.embed = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.SiLU(), torch.nn.Linear(2 * width, 2 * width), torch.nn.SiLU()
        )
        self.skip = Skip(1)
        self.first = torch.nn.Conv1d(views * patch, width, 3, padding=1, padding_mode="replicate")
        self.blocks = torch.nn.ModuleList(_Block(width, dilation) for dilation in dilations)
        self.last = torch.nn.Conv1d(width, patch, 3, padding=1, padding_mode="replicate")
        torch.nn.init.zeros_(self.last.weight)
        torch.nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        told = self.embed(get_timestep_embedding(label, self.width).to(x.dtype))
        hidden = self.first(x.unflatten(2, (-1, self.patch)).movedim(3, 2).flatten(1, 2))
        for block in self.blocks:
            hidden = block(hidden, told)
        return self.last(torch.nn.functional.silu(hidden)).mT.flatten(1).unsqueeze(1) + self.skip(x, label)


class _Block(torch.nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(4, width)
        self.scale_shift = torch.nn.Linear(2 * width, 2 * width)
        self.mix = torch.nn.Conv1d(width, width, 3, dilation=dilation, padding=dilation, padding_mode="replicate")
        self.out = torch.nn.Conv1d(width, width, 1)

    def forward(self, hidden: Tensor, told: Tensor) -> Tensor:
        scale, shift = self.scale_shift(told).unsqueeze(-1).chunk(2, dim=1)
        inner = torch.nn.functional.silu(self.norm(hidden) * (1 + scale) + shift)
        return hidden + self.out(torch.nn.functional.silu(self.mix(inner)))


class Skip(torch.nn.Module):
    """The first ``channels`` of x, times a number that depends on the level and is 0 before training.

    What v and eps have of x need not pass through the network.
    """

    def __init__(self, channels: int, width: int = 32) -> None:
        super().__init__()
        self.channels, self.width, self.out = channels, width, torch.nn.Linear(width, 1)
        self.hidden = torch.nn.Linear(width, width)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        told = torch.nn.functional.silu(self.hidden(get_timestep_embedding(label, self.width).to(x.dtype)))
        return self.out(told).view(-1, *[1] * (x.ndim - 1)) * x[:, : self.channels]


class Patched(torch.nn.Module):
    """A U-Net on squares of ``patch`` × ``patch`` pixels, each one position with as many more channels.

    It may be given ``views`` images of ``channels`` each, and returns one.
    """

    def __init__(
        self, channels: int, size: int, widths: tuple[int, ...], periodic: bool, views: int = 1, patch: int = 2
    ) -> None:
        super().__init__()
        self.patch = patch
        self.unet: UNet2DModel = unet2d(
            (channels * patch**2, size // patch, size // patch), widths=widths, layers=1, attention=(len(widths) - 1,)
        )
        self.unet.conv_in = torch.nn.Conv2d(views * channels * patch**2, widths[0], 3, padding=1)
        self.skip = Skip(channels)
        for module in self.unet.modules():
            if periodic and isinstance(module, torch.nn.Conv2d) and module.padding != (0, 0):
                module.padding_mode = "circular"

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        squares = torch.nn.functional.pixel_unshuffle(x, self.patch)
        return torch.nn.functional.pixel_shuffle(self.unet(squares, label).sample, self.patch) + self.skip(x, label)


class Plain(torch.nn.Module):
    """The U-Net of the demo."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet2d((1, 8, 8), layers=1)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.unet(x, label).sample
