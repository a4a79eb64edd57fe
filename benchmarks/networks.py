"""What does a training step of `unet` cost beside diffusers' and MONAI's U-Nets of the same widths?

Forward pass, backward pass and AdamW, one thread, widths 32 and 64, one layer, attention at half the resolution.
MONAI's is left out if it is not installed, and where it fails.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import Row, at_shape, compare, interleave, log, parse, report

from nidiff.diffusion.denoiser import as_tensor
from nidiff.model.network import build_network

SIZES: dict[str, Any] = {"widths": (32, 64), "layers": 1, "attention": (1,)}
SHAPES = {(1, 28, 28): 32, (3, 32, 32): 32, (1, 1024): 32, (1, 16, 16, 16): 4}  # and how many at once
OURS = ("unet", "unet:boundary=periodic", "unet:boundary=reflecting", "unet:patch=2")


def monai(shape: tuple[int, ...]) -> torch.nn.Module:
    from monai.networks.nets import DiffusionModelUNet

    channels, *size = shape
    return DiffusionModelUNet(
        spatial_dims=len(size),
        in_channels=channels,
        out_channels=channels,
        channels=SIZES["widths"],
        num_res_blocks=SIZES["layers"],
        attention_levels=(False, True),
        num_head_channels=SIZES["widths"][-1],
        norm_num_groups=8,
        use_flash_attention=False,
    )


def stepping(net: torch.nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        (as_tensor(net(x, labels)) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rows(shape: tuple[int, ...], batch: int, rounds: int) -> list[Row]:
    builders: dict[str, Callable[..., torch.nn.Module]] = {
        name: partial(build_network, name, **SIZES) for name in (*OURS, *(["unet2d"] if len(shape) == 3 else []))
    }
    calls, notes = {}, {}
    for name, build in {**builders, "MONAI": monai}.items():
        try:
            net = build(shape)
            step = stepping(net, torch.randn(batch, *shape), torch.randint(0, 1000, (batch,)))
            step()
        except Exception as error:
            log(f"{name} at {at_shape(shape)} is left out: {type(error).__name__}: {error}")
            continue
        calls[name], notes[name] = step, f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f} M parameters"
    times = interleave(calls, rounds)
    return [compare(times, name, "unet", note=notes[name]) for name in calls]


def main() -> None:
    arguments = parse(argparse.ArgumentParser(description=__doc__), 10, "steps of each network")
    torch.manual_seed(0)
    found = {at_shape((batch, *shape)): rows(shape, batch, arguments.rounds) for shape, batch in SHAPES.items()}
    report(found, as_json=arguments.json)


if __name__ == "__main__":
    main()
