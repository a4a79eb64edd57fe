"""Networks: the default one, and any other in a folder. A file decides its weights, never the code that is run."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from torch.nn import Module

from nidiff.covariance.config import read_arrays
from nidiff.errors import FileError, InputError
from nidiff.model.config import read_json

UNET, OWN = "unet", "network"  # the folder of a diffusers model, and that of any other module
AGAIN = "copy it again from where the model was saved"


def unet(
    image_shape: Sequence[int],
    *,
    widths: Sequence[int] = (32, 64),
    layers: int = 2,
    attention: Sequence[int] = (1,),
    dropout: float = 0.0,
) -> Module:
    """A U-Net for images [C, H, W]: one resolution per width, each half the one before, ``layers`` blocks per
    resolution and self-attention at the resolutions listed in ``attention`` (0 is the full one).

    widths (128, 256, 256, 256), layers 2, attention (1,) is DDPM's CIFAR-10 network (35.7M parameters).
    """
    from diffusers import UNet2DModel

    channels, height, width = image_shape
    halvings = len(widths) - 1
    factor = 2**halvings
    if height % factor or width % factor:
        fits = " × ".join(f"{max(1, n // factor) * factor} or {-(-n // factor) * factor}" for n in (height, width))
        raise InputError(f"size={height}×{width} cannot be halved {halvings} times: use fewer widths, or {fits}.")
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


def save_network(net: Module, folder: Path) -> None:
    """Write a diffusers model to unet/ as diffusers does, and the weights of any other module to network/."""
    from diffusers.models.modeling_utils import ModelMixin
    from safetensors.torch import save_model

    if isinstance(net, ModelMixin):
        with _disk_errors():
            net.save_pretrained(folder / UNET, safe_serialization=True)
        return
    (folder / OWN).mkdir(parents=True)
    try:
        with _disk_errors():
            save_model(net, str(folder / OWN / "weights.safetensors"))
    except (AttributeError, RuntimeError, ValueError) as error:
        reason = first_line(error)
        raise InputError(f"the weights of denoiser.net cannot be saved ({reason}): make them plain tensors.") from error


@contextmanager
def _disk_errors() -> Iterator[None]:
    """What safetensors says of a full disk, as the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(first_line(error)) from error


def load_network(folder: Path, net: Module | None = None) -> Module:
    """The network in a model's folder: rebuilt from its own configuration, or its weights loaded into ``net``."""
    own = folder / OWN
    if net is not None:
        if not isinstance(net, Module):
            raise InputError(f"net={net!r} must be a torch.nn.Module that is built: give Net(), not Net.")
        _fill(net, own if own.is_dir() else folder / UNET)
        return net.eval()
    if own.is_dir():
        raise InputError(f"folder={str(folder)!r} holds only the weights: pass the network itself as net=.")
    return _rebuild(folder / UNET).eval()


def _rebuild(folder: Path) -> Any:
    name = read_json(folder / "config.json").get("_class_name")
    if not isinstance(name, str) or name not in NETWORKS:
        raise InputError(
            f"{str(folder)!r} holds a network of the class {name!r}, which is not one of {', '.join(NETWORKS)}: pass "
            f'the network as net=, or register its class by nidiff.model.network.NETWORKS["{name}"] = {name}.'
        )
    known = NETWORKS[name]
    kind = getattr(import_module(known), name) if isinstance(known, str) else known
    try:
        net, info = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise FileError(f"{str(folder)!r} is damaged ({first_line(error)}): {AGAIN}.") from error
    _refuse_others(folder, info["missing_keys"], info["unexpected_keys"])
    return net


def _fill(net: Module, folder: Path) -> None:
    weights: dict[str, Tensor] = {}
    state = net.state_dict()
    for file in sorted(folder.glob("*.safetensors")):
        weights |= read_arrays(file)
    for name in weights.keys() & state.keys():
        if weights[name].shape != state[name].shape:
            raise InputError(
                f"{str(folder)!r} has {name!r} with shape {tuple(weights[name].shape)}, but in net it has "
                f"{tuple(state[name].shape)}: pass the network that was saved."
            )
    # Of weights that share their memory only one is stored.
    stored = {state[name].data_ptr() for name in weights.keys() & state.keys()}
    missing = [name for name in state if name not in weights and state[name].data_ptr() not in stored]
    _refuse_others(folder, missing, [name for name in weights if name not in state])
    net.load_state_dict(weights, strict=False)


def _refuse_others(folder: Path, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    differences = [f"no weights for {name!r} of the network" for name in missing]
    differences += [f"weights for {name!r}, which the network does not have" for name in unexpected]
    if differences:
        raise FileError(f"{str(folder)!r} has {differences[0]}: {AGAIN}, or pass the network that was saved.")


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# What may be rebuilt from unet/config.json by the name of its class: the class, or the package that has it.
NETWORKS: dict[str, Any] = {"UNet2DModel": "diffusers", "UNet1DModel": "diffusers"}
