"""Products with matrices that give an event the same bits in a batch of any size, wherever it stands in it.

How a matrix product rounds depends on the number of its rows and, where a row is not a whole number of vector registers
long, on the place of a row. So rows are filled up to such a length and multiplied a fixed number at a time.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

ALIGNED = 16  # numbers: the longest vector register in float32, and more than one in float64
FEWEST, MOST, WORK = 32, 2048, 2**19  # rows at a time, and multiplications that are worth one call


def padded(matrix: Tensor) -> Tensor:
    """A matrix with zeros up to multiples of `ALIGNED`, for `row_product`."""
    rows, columns = (-length % ALIGNED for length in matrix.shape)
    return pad(matrix, (0, columns, 0, rows))


def row_product(x: Tensor, matrix: Tensor, width: int | None = None) -> Tensor:
    """x [..., n] times a `padded` matrix of n rows and ``width`` columns, by default n."""
    size, length = x.shape[-1], len(matrix)
    rows = x.reshape(-1, size)
    count = len(rows)
    tile = min(max(WORK // matrix.numel(), FEWEST), MOST)
    if (missing := -count % tile if count else tile) or length != size:  # older versions of torch cannot pad nothing
        rows = pad(rows, (0, length - size, 0, missing))
    product = torch.cat([part @ matrix for part in rows.split(tile)])
    width = size if width is None else width
    return product[:count, :width].reshape(*x.shape[:-1], width)


def channel_product(matrix: Tensor, x: Tensor, axes: int) -> Tensor:
    """``matrix`` [D, C, *1 or event] times the channels of x [..., C, *event], event of ``axes`` axes, term by term:
    numbers that stand alone round alike."""
    parts = (part.unsqueeze(-axes - 1) for part in x.unbind(-axes - 1))
    first, *others = (column * part for column, part in zip(matrix.unbind(1), parts, strict=True))
    return sum(others, first)
