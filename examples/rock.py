"""Blocks of a segmented rock for docs/rock.md, from a micro-CT image of two values.

wget https://github.com/LukasMosser/PorousMediaGan/raw/master/data/berea/original/raw/berea.zip && unzip berea.zip
python examples/rock.py berea.tif berea.nc        of Ketton limestone: … ketton.tif ketton.nc 0
"""

import sys
from pathlib import Path

import numpy as np
import xarray
from PIL import Image, ImageSequence


def main(image: str, out: str, size: int = 32, pores: int = 255) -> None:
    """Means over 2 x 2 x 2 voxels, cut into blocks: overlapping ones from the upper 72 %, to train on, and some from
    the rest. `start` is the plane where a block begins. block.npy is the first of the rest, slab.npy a mask for it."""
    with Image.open(image) as stack:
        rock = np.stack([np.array(plane) == pores for plane in ImageSequence.Iterator(stack)])
    half = tuple(n // 2 for n in rock.shape)
    rock = rock.reshape(half[0], 2, half[1], 2, half[2], 2).mean((1, 3, 5), dtype=np.float32)
    border = round(0.72 * half[0])
    blocks, starts = [], []
    for first, last, down, across in ((0, border, 8, 14), (border, half[0], size * 3 // 4, size * 7 // 8)):
        for z in range(first, last - size + 1, down * size // 32 or 1):
            for y in range(0, half[1] - size + 1, across):
                for x in range(0, half[2] - size + 1, across):
                    blocks.append(rock[z : z + size, y : y + size, x : x + size])
                    starts.append(z)
    pore, about = np.stack(blocks), {"units": "1"}
    table = {"pore": (("start", "z", "y", "x"), pore, about), "porosity": ("start", pore.mean((1, 2, 3)), about)}
    data = xarray.Dataset(table, {"start": np.array(starts)})
    data.to_netcdf(out, engine="h5netcdf", encoding={"pore": {"compression": "gzip", "compression_opts": 4}})
    slab = np.ones((size,) * 3, bool)
    slab[3 * size // 8 : 5 * size // 8] = False
    np.save(Path(out).with_name("block.npy"), pore[starts.index(border)])
    np.save(Path(out).with_name("slab.npy"), slab)


if __name__ == "__main__":
    main(*sys.argv[1:3], pores=int(sys.argv[3]) if len(sys.argv) > 3 else 255)
