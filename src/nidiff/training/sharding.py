"""Networks that are sharded over the processes by FSDP, because they do not fit one device.

``accelerate launch --use_fsdp --fsdp_version 2`` asks for it, and accelerate shards the network and its optimiser. A
checkpoint holds whole tensors, so that it does not matter how many processes wrote it, or read it.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module

from nidiff.errors import InputError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator


def check_sharding() -> None:
    """Refuse version 1 of FSDP, where a process holds parts of a network that have no names or shapes."""
    if _is_asked() and os.environ.get("FSDP_VERSION", "1") != "2":
        problem = "the first version of FSDP cannot be used"
        raise InputError(None, None, problem, "launch with --use_fsdp --fsdp_version 2, with accelerate 1.6 or later")


def shard_on_cpus(accelerator: "Accelerator") -> None:
    """Let accelerate shard on CPUs as it does on GPUs, if the launcher asks for it; it would ignore that there."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = accelerator.state
    if _is_asked() and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            state.fsdp_plugin.set_mixed_precision(accelerator.mixed_precision)


def prepared(accelerator: "Accelerator", net: Any, optimizer: Any) -> tuple[Any, Any]:
    """What accelerate makes of a network and its optimiser. It shards blocks of a network whose classes are named."""
    try:
        return accelerator.prepare(net, optimizer)
    except ValueError as error:
        if not _is_asked():
            raise
        remedy = "name the classes of its blocks, as by --fsdp_transformer_layer_cls_to_wrap ResnetBlock2D"
        raise InputError(None, None, f"FSDP cannot shard the network ({first_line(error)})", remedy) from error


def is_sharded(net: Module) -> bool:
    """Whether each process holds a part of the network."""
    return any(map(_is_part, net.parameters()))


def whole(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same with whole tensors, on the CPU, in place of the parts of this process, and likewise in the mappings that
    it holds. Every process must ask for it."""
    return {
        name: whole(value) if isinstance(value, Mapping) else value.full_tensor().cpu() if _is_part(value) else value
        for name, value in values.items()
    }


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This process' part of a whole tensor, if ``like`` is one."""
    if not _is_part(like) or tensor.shape != like.shape:  # the optimiser has a number of steps for each parameter
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


def parts_of_optimizer(whole: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """The state of an optimiser whose parameters are parts, from that of one whose parameters are whole."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {name: part_of(value, parameters[index]) for name, value in known.items()}
        for index, known in whole["state"].items()
    }
    return {**whole, "state": state}


def _is_asked() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def _is_part(value: Any) -> bool:
    return hasattr(value, "full_tensor")  # a DTensor, which is slow to import
