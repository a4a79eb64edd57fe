"""Networks: those that have a name, and any other in a folder. A file decides the weights, never what code is run."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.nn import Module

from nidiff.errors import FileError, InputError, first_line, one_of, shown
from nidiff.files import COPY_AGAIN, blaming, read_object, replacing
from nidiff.model.unet import FieldUNet, check_widths, norm_groups
from nidiff.notation import call, parse_call
from nidiff.recipe import check_whole, fits

UNET, OTHER = "unet", "network"  # the folder of a model with a configuration, as diffusers' have, and of any other
WEIGHTS = {UNET: "diffusion_pytorch_model.safetensors", OTHER: "weights.safetensors"}
PARTS = "diffusion_pytorch_model-*-of-*.safetensors"  # of a large one
FORMER = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
# The arguments of a builder that follow from other settings than `network`.
SETTINGS = {"both": "sees", "num_classes": "labels", "num_parameters": "condition", "condition_channels": "condition"}


def build_network(
    text: str,
    shape: Sequence[int],
    *,
    auto: str = "unet",
    boundary: str | Sequence[str] | None = None,
    both: bool = False,
    **sizes: Any,
) -> Module:
    """The network for data [C, *event] that ``text`` names: NAME:key=value,… with a NAME in `BUILDERS`, or "auto" for
    the one called ``auto``.

    ``boundary``, ``both`` and ``sizes`` (widths, layers, attention, dropout) are given to a builder that takes them; a
    key in ``text`` wins. With ``both`` the network must take twice the channels. It must also take what is given of
    num_classes, num_parameters and condition_channels.
    """
    name, options = parse_call("network", text)
    name = auto if name == "auto" else name
    parameters = signature(BUILDERS[one_of("network", name, BUILDERS)]).parameters
    any_key = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    offered = {"boundary": boundary, "both": both or None, **sizes}
    taken = {key: value for key, value in offered.items() if value is not None and (any_key or key in parameters)}
    for key, setting in SETTINGS.items():
        is_set = key in options and (key == "both" or sizes.get(key))
        is_lacking = offered.get(key) and key not in taken
        if is_set or is_lacking:
            problem = f"{'sets' if is_set else 'takes no'} {key}, which follows from `{setting}`"
            raise InputError("network", text, problem, "leave it out" if is_set else "use 'unet'")
    network: Module = call("network", name, taken | options, BUILDERS, tuple(shape))
    return network


def unet(shape: Sequence[int], *, both: bool = False, **options: Any) -> Module:
    """A `FieldUNet` for data [C, *event] with one, two or three event axes, which has the other ``options``.

    With ``both`` it takes twice the channels, for a denoiser whose network sees "both".
    """
    channels, *size = shape
    return FieldUNet(tuple(size), 2 * channels if both else channels, channels, **options)


def unet2d(
    shape: Sequence[int],
    *,
    widths: Sequence[int] = (32, 64),
    layers: int = 2,
    attention: Sequence[int] = (1,),
    dropout: float = 0.0,
    num_classes: int | None = None,
    both: bool = False,
) -> Module:
    """diffusers' UNet2DModel for images [C, H, W]: one resolution per width, each half the one before, ``layers``
    blocks per resolution and self-attention at the resolutions listed in ``attention`` (0 is the full one).

    widths (128, 256, 256, 256), layers 2, attention (1,) is DDPM's CIFAR-10 network (35.7M parameters). With
    ``num_classes`` it needs class_labels, 0 … num_classes − 1, or num_classes for no class. With ``both`` it takes
    twice the channels, for a denoiser whose network sees "both".
    """
    from diffusers import UNet2DModel

    if len(shape) != 3:
        raise InputError("network", "unet2d", "is for images [C, H, W]", "use 'unet'")
    channels, height, width = shape
    widths, attention = check_widths(widths, attention, layers)
    multiple = 2 ** (len(widths) - 1)
    if height % multiple or width % multiple:
        problem = f"needs sides of multiples of {multiple} with {len(widths)} widths, and these are {height}×{width}"
        raise InputError("network", "unet2d", problem, "use 'unet', which takes any size")
    down = tuple("AttnDownBlock2D" if i in attention else "DownBlock2D" for i in range(len(widths)))
    up = tuple("AttnUpBlock2D" if i in attention else "UpBlock2D" for i in reversed(range(len(widths))))
    network: Any = UNet2DModel(
        sample_size=(height, width),
        in_channels=2 * channels if both else channels,
        out_channels=channels,
        block_out_channels=tuple(widths),
        layers_per_block=layers,
        down_block_types=down,
        up_block_types=up,
        norm_num_groups=norm_groups(widths),
        attention_head_dim=None,
        dropout=dropout,
        num_class_embeds=None if num_classes is None else check_whole("num_classes", num_classes) + 1,
    )
    return network


def save_network(net: Module, folder: Path) -> None:
    """Write a network that has a configuration to unet/ as diffusers does, and the weights of any other to network/."""
    save_weights(net, folder / (UNET if hasattr(net, "save_config") else OTHER))


def save_weights(net: Module, folder: Path) -> None:
    """Write the weights to a folder, and the configuration where the network has one."""
    has_config = hasattr(net, "save_config")
    try:
        content = to_bytes(_weights(net), metadata={"format": "pt"})
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        problem = f"has weights that cannot be saved ({first_line(error)})"
        raise InputError("denoiser.net", None, problem, "make it a torch.nn.Module of plain tensors") from error
    if has_config:
        cast(Any, net).save_config(folder)
    with replacing(folder / WEIGHTS[UNET if has_config else OTHER]) as file:
        file.write(content)


def _weights(net: Module) -> dict[str, Tensor]:
    """The weights by name; of those that are one and the same, only the first."""
    found: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in sorted(net.state_dict().items()):
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        found.setdefault(same, (name, tensor))
    # A copy of each: safetensors refuses tensors that share memory or are not contiguous.
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in found.values()
    }


def load_network(folder: Path, net: Module | None = None, weights: Mapping[str, Tensor] | None = None) -> Module:
    """The network in a model's folder: rebuilt from its configuration, or its weights loaded into ``net``.

    ``weights`` are those of a checkpoint, in place of the folder's own.
    """
    place = folder / (OTHER if (folder / OTHER).is_dir() or not (folder / UNET).is_dir() else UNET)
    if net is not None:
        net.load_state_dict(_fitting(net, read_weights(place) if weights is None else weights, place), strict=False)
        return net.eval()
    if place.name == OTHER:
        raise InputError("folder", str(folder), "holds only the weights", "pass the network itself as `net`")
    return rebuild(place, weights).eval()


def rebuild(folder: Path, weights: Mapping[str, Tensor] | None = None) -> Module:
    """The network of a known class, from config.json and weights alone: nothing that they name is fetched, imported or
    run, as diffusers' ``from_pretrained`` would."""
    file = folder / "config.json"
    config = read_object(file)
    name = config.get("_class_name")
    if not isinstance(name, str) or name not in NETWORKS:
        remedy = f"pass the network as `net`, or register its class in nidiff.model.network.NETWORKS ({[*NETWORKS]})"
        raise InputError("folder", str(folder), f"holds a network of the unknown class {shown(name)}", remedy)
    known = NETWORKS[name]
    kind = getattr(import_module(known), name) if isinstance(known, str) else known
    arguments = {key: value for key, value in config.items() if not key.startswith("_")}
    weights = read_weights(folder) if weights is None else weights
    with blaming(file), torch.random.fork_rng(devices=[]):  # building draws weights
        if isinstance(known, str):  # built without memory first, of which a damaged file may ask for any amount
            _check_counts(arguments, len(weights))
            with torch.device("meta"):
                _fitting(kind(**arguments), weights, folder)
        net: Module = kind(**arguments)
    if isinstance(known, str):
        net.float()  # whatever torch's default is now: it must not round the weights
    net.load_state_dict(_fitting(net, weights, folder), strict=False)
    return net


def _check_counts(arguments: Mapping[str, Any], most: int) -> None:
    """A network has no more blocks or layers than weights."""
    for key, value in arguments.items():
        count = len(value) if isinstance(value, list) else value if key in ("layers_per_block", "layers") else 0
        if fits(count, int) and count > most:
            raise ValueError(f"{key} asks for {count} layers, and there are {most} weights")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in the files that we or diffusers write; files of other names are not looked at."""
    files = [file for name in WEIGHTS.values() if (file := folder / name).is_file()][:1] or sorted(folder.glob(PARTS))
    if not files:
        raise FileError("folder", str(folder), "has no weights", COPY_AGAIN)
    with blaming(files[0]):
        return {name: tensor for file in files for name, tensor in load(file.read_bytes()).items()}


def _fitting(net: Module, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights by their names in ``net``, if they are all of it and of its shapes."""
    state = net.state_dict()
    weights = {name if name in state else _renamed(name, weights): tensor for name, tensor in weights.items()}
    shared = {_memory(state[name]) for name in weights.keys() & state.keys()}  # of such weights only one is stored
    for name in sorted(weights.keys() | state.keys()):
        stored, needed = weights.get(name), state.get(name)
        if stored is None and needed is not None and _memory(needed) in shared:
            continue
        if _kind(stored) != _kind(needed):
            problem = f"has {_kind(stored)} as {name!r}, where the network has {_kind(needed)}"
            raise FileError("folder", str(folder), problem, f"{COPY_AGAIN}, or pass the network that was saved")
    return weights


def _kind(tensor: Tensor | None) -> str:
    """What a weight must have in common with the one that takes its place."""
    if tensor is None:
        return "nothing"
    return f"{'floats' if tensor.is_floating_point() else tensor.dtype} of shape {tuple(tensor.shape)}"


def _memory(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_meta else tensor.data_ptr()


def _renamed(name: str, weights: Mapping[str, Tensor]) -> str:
    """The name of a weight of attention, which diffusers once called otherwise."""
    path, _, part = name.rpartition(".")
    path, _, layer = path.rpartition(".")
    now = f"{path}.{FORMER.get(layer)}.{part}"
    return now if layer in FORMER and now not in weights else name


def library(net: Module) -> str | None:
    """The module that a pipeline's index names for the class of ``net``; None if a pipeline cannot open it."""
    name, module = type(net).__name__, type(net).__module__
    return "diffusers" if module.startswith("diffusers.") else module if NETWORKS.get(name) == module else None


# What may be rebuilt from unet/config.json by the name of its class: the class, or the package that has it.
NETWORKS: dict[str, Any] = {
    "FieldUNet": "nidiff.model.unet",
    "UNet2DModel": "diffusers",
    "UNet2DConditionModel": "diffusers",
    "UNet1DModel": "diffusers",
}

# What network=NAME:key=value,… may name: build(shape, **keys) makes the network for data of shape [C, *event].
BUILDERS: dict[str, Callable[..., Module]] = {"unet": unet, "unet2d": unet2d}
