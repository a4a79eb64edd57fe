"""What does Σ cost as data grow? Noise and Σ^½ beside torch.randn and beside one pass of a U-Net, to 1024² and 128³.

Operations are counted: the network's by torch's flop counter on tensors without storage, those of a transform by the
usual 5 N log2 N (half of it for real data). Times are medians; ratios are taken within a round.
"""

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from timing import Row, at_shape, compare, interleave, log, parse, report
from torch.utils.flop_counter import FlopCounterMode

import nidiff
from nidiff.model.network import unet2d


class Case(NamedTuple):
    """One kind of data: the shape of one item, the axes Σ is over, and a network for its frames or slices."""

    name: str
    shape: tuple[int, ...]  # channels first
    widths: tuple[int, ...]
    attention: tuple[int, ...]

    @property
    def event(self) -> tuple[int, ...]:
        return self.shape[1:]


SMALL = ((128, 256, 256, 256), (1,))  # DDPM's CIFAR-10 network, 35.7M parameters
LARGE = ((128, 128, 256, 256, 512, 512), (4,))  # DDPM's network for 256² images, 113.7M parameters
CASES = (
    Case("image 32²", (3, 32, 32), *SMALL),
    Case("image 64²", (3, 64, 64), *SMALL),
    Case("image 256²", (3, 256, 256), *LARGE),
    Case("image 1024²", (3, 1024, 1024), *LARGE),
    Case("video 16×256²", (3, 16, 256, 256), *LARGE),
    Case("volume 128³", (1, 128, 128, 128), *LARGE),
)


def network_operations(case: Case) -> int:
    """Of one forward pass, a multiplication and an addition each counting one. Frames and slices go through the 2-D
    network one by one: the least that a network of a video or a volume does."""
    *frames, height, width = case.event
    image = (case.shape[0], height, width)
    with torch.device("meta"):
        net: Any = unet2d(image, widths=case.widths, layers=2, attention=case.attention)
        x, label = torch.empty(1, *image), torch.zeros(1)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        net(x, label)
    return math.prod(frames) * counter.get_total_flops()


def transform_operations(case: Case) -> float:
    """Of one real FFT per channel: 2.5 N log2 N."""
    size = math.prod(case.event)
    return case.shape[0] * 2.5 * size * math.log2(size)


def counted(case: Case) -> dict[str, Any]:
    size, network = math.prod(case.event), network_operations(case)
    draw = transform_operations(case)
    return {
        "case": case.name,
        "size": size,
        "spectrum_bytes": 8 * size,
        "dense_bytes": 8 * size**2,
        "draw_flops": draw,
        "root_flops": 2 * draw,
        "network_flops": network,
        "draw_share": draw / network,
    }


def timed(case: Case, rounds: int) -> list[Row]:
    """A draw of N(0, Σ) and an application of Σ^½, batch 1, beside torch.randn."""
    field, shape = nidiff.gaussian_free_field(case.event), (1, *case.shape)
    generator = torch.Generator().manual_seed(0)
    white = torch.randn(shape, generator=generator)
    times = interleave(
        {
            "torch.randn": lambda: torch.randn(shape, generator=generator),
            "sample": lambda: field.sample(shape, generator),
            "sqrt": lambda: field.sqrt(white),
        },
        rounds,
    )
    white_cost = compare(times, "torch.randn", "torch.randn")
    return [white_cost, *(compare(times, name, "torch.randn") for name in ("sample", "sqrt"))]


def forward(case: Case, rounds: int) -> list[Row]:
    """A draw beside one pass of the network, batch 1, both really run."""
    field, shape = nidiff.gaussian_free_field(case.event), (1, *case.shape)
    generator = torch.Generator().manual_seed(0)
    net: Any = unet2d(case.shape, widths=case.widths, layers=2, attention=case.attention).eval()
    x, label = torch.randn(shape, generator=generator), torch.zeros(1)
    with torch.inference_mode():
        calls = {"sample": lambda: field.sample(shape, generator), "network": lambda: net(x, label)}
        times = interleave(calls, rounds)
    return [compare(times, "sample", "network"), compare(times, "network", "network")]


def counted_table(rows: Sequence[dict[str, Any]]) -> str:
    head = f"{'data':<14} {'N':>9} {'spectrum':>10} {'dense Σ':>10} {'draw':>9} {'Σ^½':>9} {'network':>9} {'share':>8}"
    lines = (
        f"{r['case']:<14} {r['size']:>9} {si(r['spectrum_bytes']):>9}B {si(r['dense_bytes']):>9}B "
        f"{si(r['draw_flops']):>9} {si(r['root_flops']):>9} {si(r['network_flops']):>9} {r['draw_share']:>8.1e}"
        for r in rows
    )
    return "\n".join(("Counted: bytes of Σ, floating-point operations per item", head, *lines))


def si(x: float) -> str:
    for exponent, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if x >= 10**exponent:
            return f"{x / 10**exponent:.3g} {unit}"
    return f"{x:.0f} "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = parse(parser, 20, "rounds of each pair; those with a network get a fifth", least=10)

    counts = [counted(case) for case in CASES]
    sections: dict[str, list[Row]] = {}
    for case in CASES:
        log(f"{case.name}: noise")
        sections[f"Noise of 1×{at_shape(case.shape)}"] = timed(case, arguments.rounds)
    for case in CASES[:3]:
        log(f"{case.name}: network")
        sections[f"Beside one pass of the network, {case.name}"] = forward(case, arguments.rounds // 5)
    if arguments.json:
        found = {title: [row._asdict() for row in rows] for title, rows in sections.items()}
        print(json.dumps({"threads": torch.get_num_threads(), "counted": counts, "sections": found}, indent=2))
    else:
        print(counted_table(counts) + "\n")
        report(sections, as_json=False)


if __name__ == "__main__":
    main()
