"""A device that is not the CPU, for machines without one: code is run on it to see where two devices meet."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CPU, Generator = torch.device("cpu"), torch.Generator
# Functions that may see tensors of both devices: some move them, the others look at shapes and types alone.
MOVES = {"to", "type_as", "as_tensor", "tensor", "copy_", "_foreach_copy_", "data.set"}
SHAPES = {"expand_as", "view_as", "reshape_as", "is_same_size", "result_type", "_has_compatible_shallow_copy_type"}
JOINS = {"cat", "stack", "concat", "hstack", "vstack", "dstack"}  # which take no number of the CPU either
# What Python has to wait for: numbers of the device, or how many there are.
READS = {
    "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__format__", "__repr__",
    "__contains__", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "masked_select", "unique",
    "unique_consecutive", "bincount",
}  # fmt: skip
LIBRARIES = (__file__, str(Path(torch.__file__).parent))


class DeviceError(RuntimeError):
    """What a real device refuses, or a read that `Device.no_reads` forbids."""


class DeviceTensor(Tensor):
    """A tensor in the memory of the CPU that is taken as one of a `Device`."""


class _AnyGenerator(type):
    """The type of what stands for `torch.Generator` while a `Device` is in use."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Generator)


class Device(TorchFunctionMode):
    """``with Device() as gpu: …``: inside, ``gpu.device``, by default "cuda:0", is used like that of a real one.

    It computes on the CPU, with the same bits. A `DeviceError` is raised where tensors of both devices meet, numbers of
    the CPU without dimensions excepted; where the device indexes the CPU, draws from a generator of the CPU, or becomes
    a numpy array. Without ``double`` it has no float64 and is called "mps". ``reads`` lists the lines of code that had
    Python wait for its numbers. It is in effect in the thread that entered it.
    """

    def __init__(self, kind: str | None = None, *, double: bool = True) -> None:
        super().__init__()
        self.device, self.double = torch.device(kind or ("cuda" if double else "mps"), 0), double
        self.reads: list[str] = []
        self._forbidden, self._allowed = False, set[str]()
        self._patches: list[ExitStack] = []

    def __enter__(self) -> "Device":
        mine = type("DeviceGenerator", (Generator,), {"device": self.device})
        made = {"__new__": lambda cls, device=CPU: mine(CPU) if self._is_mine(device) else Generator(device)}
        patches: dict[Any, Any] = {(torch, "Generator"): _AnyGenerator("Generator", (), made)}
        for name in ("_wrap_for_grad", "_unwrap_for_grad"):  # of torch.func, which does not ask a mode
            patches[eager_transforms, name] = self._following(getattr(eager_transforms, name))
        self._patches.append(ExitStack())
        for (module, name), replacement in patches.items():
            self._patches[-1].enter_context(patch.object(module, name, replacement))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._patches.pop().close()

    @contextmanager
    def no_reads(self, *allowed: str) -> Iterator[None]:
        """Refuse to wait for the device, as the loop of a sampler should; the functions named ``allowed`` may."""
        before = self._forbidden, self._allowed
        self._forbidden, self._allowed = True, {*allowed}
        try:
            yield
        finally:
            self._forbidden, self._allowed = before

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in ("__get__", "__set__"):  # of an attribute
            name = f"{function.__self__.__name__}.{name.strip('_')}"
        for other in types:
            if not issubclass(other, Tensor):  # such as nidiff's Modes, whose arithmetic is seen here too
                with self:
                    return other.__torch_function__(function, types, args, kwargs)
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        mine = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        kind = self.device.type
        known = {"device.get": self.device, "get_device": 0, "is_cpu.get": False, f"is_{kind}.get": True}
        if mine and name in known:
            return known[name]
        if name in ("device", "_parse_to"):  # torch.device(…), and Module.to, which moves its tensors one by one
            return function(*args, **kwargs)
        if name == kind:  # x.cuda()
            name, function, args = "to", Tensor.to, (args[0], self.device)
        if name == "__format__":  # which a subclass does not have
            function = lambda tensor, spec: format(tensor.as_subclass(Tensor), spec)  # noqa: E731
        if name == "cpu":
            name, function, args = "to", Tensor.to, (args[0], CPU)
        on_device = self._destination(name, args, kwargs, bool(mine))
        self._check(name, args, kwargs, tensors, mine, on_device)
        args, kwargs = ([CPU if self._is_mine(each) else each for each in args],
                        {key: CPU if self._is_mine(each) else each for key, each in kwargs.items()})  # fmt: skip
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
            if name in ("to", "type_as", "as_tensor") and on_device != isinstance(args[0], DeviceTensor):
                result = result.clone()
            if name == "data.set" and mine:  # a parameter stays the same object
                changed, is_parameter = args[0], isinstance(args[0], torch.nn.Parameter)
                changed.__class__ = DeviceTensor if on_device else torch.nn.Parameter if is_parameter else Tensor
                changed._is_param = is_parameter
            if isinstance(result, Tensor):
                return self._labelled(result, on_device, tensors)
            if isinstance(result, torch.Size):
                return result
            return tree_map(lambda each: self._labelled(each, on_device, tensors), result)

    def _following(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its result on the device of its first argument."""
        return lambda tensor, *args: self._labelled(function(tensor, *args), isinstance(tensor, DeviceTensor), [])

    def _is_mine(self, device: Any) -> bool:
        if isinstance(device, str):
            device = torch.device(device) if device.split(":")[0] == self.device.type else None
        return isinstance(device, torch.device) and device.type == self.device.type and not device.index

    def _destination(self, name: str, args: Any, kwargs: Any, mine: bool) -> bool:
        """Whether the result is on this device."""
        place = kwargs.get("device")
        if name in ("to", "type_as", "as_tensor", "data.set"):
            places = [*kwargs.values(), *args[1:]]
            place = next((each for each in places if isinstance(each, str | torch.device | Tensor)), place)
        elif name in SHAPES or (name.endswith("_") and not name.endswith("__")):  # the latter are in place
            place = next(_tensors(args), None)
        if isinstance(place, Tensor):
            return isinstance(place, DeviceTensor)
        return mine if place is None else self._is_mine(place)

    def _check(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], mine: list[DeviceTensor], on_device: bool
    ) -> None:
        """Refuse what the device would, and note what is read from it."""
        generator = kwargs.get("generator")
        if generator is not None and self._is_mine(generator.device) != on_device:
            raise DeviceError(f"{name} draws on another device than that of its generator, {generator.device}")
        if not mine:
            return
        if name in ("numpy", "__array__"):
            raise DeviceError(f"{name}: numpy has no tensors of {self.device}")
        others = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if name in ("__getitem__", "__setitem__"):
            index = [each for each in _tensors(args[1:2]) if each.ndim]
            several = [each for each in _tensors(args[2:]) if each.ndim]  # else a number is filled in
            of_device = [each for each in index if isinstance(each, DeviceTensor)]
            if isinstance(args[0], DeviceTensor):  # the CPU may index the device, not the other way round
                refused = bool(index) and any(not isinstance(each, DeviceTensor) for each in several)
                masks = any(each.dtype in (torch.bool, torch.uint8) for each in of_device)
                reads = masks and (bool(several) or name == "__getitem__")
            else:
                refused, reads = bool(of_device), True
        elif name in MOVES | SHAPES:
            refused, reads = False, name not in SHAPES | {"data.set"} and not on_device
        else:
            strict = name in JOINS or not on_device or any(each is kwargs.get("out") for each in others)
            refused = any(strict or each.ndim for each in others)
            reads = name in READS or (name == "where" and len(tensors) == 1)
        if refused:
            raise DeviceError(f"{name}: tensors of the CPU and of {self.device} meet")
        if reads:
            self._read(name)

    def _read(self, name: str) -> None:
        frame, functions, place = sys._getframe(), set[str](), ""
        while frame is not None:
            functions.add(frame.f_code.co_name)
            if not place and not frame.f_code.co_filename.startswith(LIBRARIES):
                place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back  # type: ignore[assignment]
        self.reads.append(f"{name} at {place}")
        if self._forbidden and not functions & self._allowed:
            raise DeviceError(f"{self.reads[-1]} reads from {self.device}")

    def _labelled(self, value: Any, on_device: bool, given: list[Tensor]) -> Any:
        """A new tensor marked as one of this device, or as one of the CPU."""
        if isinstance(value, Tensor) and not any(value is each for each in given):
            if on_device and not self.double and value.dtype in (torch.float64, torch.complex128):
                raise DeviceError(f"{self.device} has no {value.dtype}")
            if on_device != isinstance(value, DeviceTensor):
                value.__class__ = DeviceTensor if on_device else Tensor
        return value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in the lists and dictionaries that some of these are."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _tensors(value.values() if isinstance(value, dict) else value)
