"""`FieldUNet`: a U-Net for fields over one, two or three axes, whose padding follows the boundary of each axis."""

import math
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nidiff.covariance.waves import boundary_per_axis
from nidiff.errors import InputError
from nidiff.files import replace_json
from nidiff.recipe import check_whole, fits


class Conv3d(nn.Conv3d):
    """torch's, but for two points along the first axis on a processor, where its gradient in bfloat16 is made of
    memory that nobody wrote (torch 2.13): there it is float32."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.shape[2] != 2:
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.weight.dtype))


CONVOLUTIONS: Any = (nn.Conv1d, nn.Conv2d, Conv3d)
MOST_LAYERS = 100
MOST_CONTINUED = 64  # times the points of a field


class NetworkConfig(dict[str, Any]):
    """The arguments that a network was built with, also as attributes, as in diffusers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class FieldUNet(nn.Module):
    """A U-Net of fields [B, C, *event] with one, two or three axes: ``net(x, label)`` is a tensor.

    One resolution per width, each half the one before; ``layers`` residual blocks per resolution on the way down, as
    many on the way up, and two between. The output is 0 before training. It may be called at any size: one that patches
    and halvings do not divide is continued beyond its edges, as the boundary says, and the output is cut back.

    Args:
        sample_size: The grid points along each axis.
        in_channels: Channels of x.
        out_channels: Channels of the output.
        widths: Channels inside, one number per resolution, multiples of 8.
        layers: Residual blocks per resolution and direction.
        attention: Resolutions with self-attention over all positions, 0 the full one.
        patch: p, or one per axis: p neighbours along an axis become channels before the first convolution and
            neighbours again after the last.
        boundary: "periodic" (the field continues at the other end), "reflecting" (it is mirrored at the edge) or
            "fixed" (it is 0 outside), one word or one per axis.
        dropout: Dropout in the blocks.
        num_classes: Makes ``class_labels`` known, 0 … num_classes − 1; −1, like None, is no class.
        num_parameters: P, makes ``parameters`` [B, P] known, numbers of about mean 0 and variance 1; NaN, like None,
            is one that is not known.
        condition_channels: C', makes ``fields`` [B, C', *event] known, on the grid of x; NaN, like None, is not known.
        factorised: For video, whose first axis is time: every convolution is one over space and then one over time,
            and only space is halved.
    """

    def __init__(
        self,
        sample_size: Sequence[int],
        in_channels: int = 1,
        out_channels: int = 1,
        widths: Sequence[int] = (32, 64),
        layers: int = 2,
        attention: Sequence[int] = (1,),
        patch: int | Sequence[int] = 1,
        boundary: str | Sequence[str] = "fixed",
        dropout: float = 0.0,
        num_classes: int | None = None,
        factorised: bool = False,
        num_parameters: int | None = None,
        condition_channels: int = 0,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        # A configuration without conditions is that of earlier versions, and so is its checksum.
        absent = {"num_parameters": None, "condition_channels": 0}
        self.config = NetworkConfig({k: v for k, v in arguments.items() if k not in absent or v != absent[k]})
        size = tuple(check_whole("sample_size", n) for n in _as_tuple(sample_size))
        axes = len(size)
        if not 1 <= axes <= 3:
            raise InputError("sample_size", sample_size, f"has {axes} axes", "give one, two or three")
        if not 0 <= dropout < 1:
            raise InputError("dropout", dropout, "is out of range", "use at least 0 and less than 1")
        for name in ("num_classes", "num_parameters"):
            if arguments[name] is not None:
                check_whole(name, arguments[name])
        check_whole("condition_channels", condition_channels, 0)
        kinds = boundary_per_axis(boundary[0] if len(boundary) == 1 else boundary, axes)  # [word] is for all axes
        widths, attention = check_widths(widths, attention, layers)
        self.patch = tuple(check_whole("patch", p) for p in _per_axis("patch", patch, axes))
        self.strides = (1 if factorised else 2, *(2,) * (axes - 1))
        deepest = len(widths) - 1
        self.multiples = tuple(p * s**deepest for p, s in zip(self.patch, self.strides, strict=True))
        self.kinds = kinds
        longer = [-(-n // m) * m for n, m in zip(size, self.multiples, strict=True)]
        if math.prod(longer) > MOST_CONTINUED * math.prod(size):
            points, grid = ("×".join(map(str, each)) for each in (longer, size))
            problem = f"has {len(widths)} resolutions, for which {grid} points would be continued to {points}"
            raise InputError("widths", None, problem, "give fewer widths, or a smaller patch")
        groups, embedded, volume = norm_groups(widths), 4 * widths[0], math.prod(self.patch)

        def conv(inputs: int, outputs: int) -> nn.Module:
            return _convolution(inputs, outputs, kinds, factorised)

        def block(inputs: int, outputs: int, attends: bool) -> nn.Module:
            return Block(axes, inputs, outputs, embedded, groups, dropout, conv, attends)

        resize = CONVOLUTIONS[axes - 1]
        self.level: Any = _two_layers(widths[0], embedded)
        self.classes: Any = None if num_classes is None else nn.Embedding(num_classes, embedded)
        # Each number with a flag that says whether it is known.
        self.numbers: Any = None if num_parameters is None else _two_layers(2 * num_parameters, embedded)
        inputs = in_channels + condition_channels + (condition_channels > 0)  # and a mask of where they are known
        self.first = conv(inputs * volume, widths[0])
        self.down: Any = nn.ModuleList()
        self.up: Any = nn.ModuleList()
        self.halve, self.enlarge = nn.ModuleList(), nn.ModuleList()
        for depth, width in enumerate(widths):
            attends = depth in attention
            self.down.append(nn.ModuleList([block(width, width, attends) for _ in range(layers)]))
            self.up.append(nn.ModuleList([block(2 * width, width, attends) for _ in range(layers)]))
        for above, below in pairwise(widths):
            self.halve.append(resize(above, below, self.strides, self.strides))
            self.enlarge.append(resize(below, above, 1))
        self.middle = nn.ModuleList(
            [block(widths[-1], widths[-1], attends) for attends in (deepest in attention, False)]
        )
        self.norm = nn.GroupNorm(groups, widths[0])
        self.last = _zeroed(conv(widths[0], out_channels * volume))

    # What diffusers' pipelines ask a model for ---------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def save_config(self, save_directory: str | Path) -> None:
        """Write config.json as diffusers does."""
        config = {"_class_name": type(self).__name__, "_diffusers_version": version("diffusers"), **self.config}
        replace_json(Path(save_directory) / "config.json", dict(sorted(config.items())))

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write config.json and the weights, as safetensors, to a folder."""
        from nidiff.model.network import save_weights

        save_weights(self, Path(save_directory))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, torch_dtype: torch.dtype | None = None, **_: Any) -> Self:
        """The network in a folder that `save_pretrained` wrote."""
        from nidiff.model.network import rebuild

        net: Any = rebuild(Path(folder))
        return net.to(torch_dtype).eval()

    # ----------------------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        label: Tensor | float,
        class_labels: Tensor | None = None,
        parameters: Tensor | None = None,
        fields: Tensor | None = None,
    ) -> Tensor:
        """The output [B, out_channels, *event] for noisy fields ``x`` at the levels ``label``, one for all or one per
        field, given the conditions that the network was built for."""
        conditions = {"num_classes": class_labels, "num_parameters": parameters, "condition_channels": fields}
        for argument, name in zip(conditions, ("class_labels", "parameters", "fields"), strict=True):
            if conditions[argument] is not None and not self.config.get(argument):
                raise InputError(name, None, "is a condition that the network lacks", f"build it with `{argument}`")
        embedding = self._embedding(x, label, class_labels, parameters)
        size = x.shape[2:]
        missing = [-n % multiple for n, multiple in zip(size, self.multiples, strict=True)]
        x = continued(self._with_fields(x, fields), missing, self.kinds)
        x = self.first(to_channels(x, self.patch))
        skips = []
        for depth, blocks in enumerate(self.down):
            if depth:
                x = self.halve[depth - 1](x)
            for block in blocks:
                x = block(x, embedding)
                skips.append(x)
        for block in self.middle:
            x = block(x, embedding)
        for depth in reversed(range(len(self.up))):
            for block in self.up[depth]:
                x = block(torch.cat([x, skips.pop()], 1), embedding)
            if depth:
                x = F.interpolate(self.enlarge[depth - 1](x), scale_factor=self.strides, mode="nearest")
        x = to_neighbours(self.last(F.silu(self.norm(x))), self.patch)
        for axis, (n, more) in enumerate(zip(size, missing, strict=True), 2):
            x = x.narrow(axis, more // 2, n) if more else x
        return x

    def _with_fields(self, x: Tensor, fields: Tensor | None) -> Tensor:
        """x, the fields of the condition, 0 where one of them is NaN, and a mask of where none is, as channels."""
        channels = self.config.get("condition_channels", 0)
        if not channels:
            return x
        fields = x.new_full((), math.nan) if fields is None else fields
        return torch.cat([x, *_without_nan(fields, x, (channels, *x.shape[2:]), together=True)], 1)

    def _embedding(
        self, x: Tensor, label: Tensor | float, class_labels: Tensor | None, parameters: Tensor | None
    ) -> Tensor:
        """The vector [B, 4 · widths[0]] that the blocks see: the sum of those of the level, the class and numbers."""
        labels = torch.as_tensor(label, device=x.device).expand(len(x))
        embedding = self.level(level_waves(labels, self.level[0].in_features).to(x.dtype))
        if class_labels is not None:
            classes = torch.as_tensor(class_labels, device=x.device).expand(len(x))
            embedding = embedding + self.classes(classes.clamp(min=0)) * (classes >= 0)[:, None]
        if self.numbers is not None:
            count = self.numbers[0].in_features // 2
            numbers = x.new_full((), math.nan) if parameters is None else parameters
            embedding = embedding + self.numbers(torch.cat(_without_nan(numbers, x, (count,)), 1))
        return F.silu(embedding)


def level_waves(labels: Tensor, width: int) -> Tensor:
    """Cosines and sines [B, width] of the levels at frequencies from 1 down to 1/10000, as in diffusers' U-Nets."""
    half = width // 2
    exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32, device=labels.device) / half
    phase = labels[:, None].float() * exponent.exp()
    return torch.cat([phase.cos(), phase.sin()], 1)


class Block(nn.Module):
    """x + conv(SiLU(norm(conv(SiLU(norm(x)))) · (1 + scale) + shift)), then attention where it is wanted."""

    def __init__(
        self,
        axes: int,
        inputs: int,
        outputs: int,
        embedded: int,
        groups: int,
        dropout: float,
        conv: Callable[[int, int], nn.Module],
        attends: bool,
    ) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, inputs), conv(inputs, outputs)
        self.modulation = nn.Linear(embedded, 2 * outputs)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outputs), _zeroed(conv(outputs, outputs))
        self.dropout = nn.Dropout(dropout)
        self.skip = nn.Identity() if inputs == outputs else CONVOLUTIONS[axes - 1](inputs, outputs, 1)
        self.attention = Attention(outputs, groups) if attends else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.modulation(embedding)[(...,) + (None,) * (x.ndim - 2)].chunk(2, 1)
        h = self.conv2(self.dropout(F.silu(torch.addcmul(shift, self.norm2(h), 1 + scale))))
        return self.attention(self.skip(x) + h)


class Attention(nn.Module):
    """x + what each position takes from all: one head of softmax(q kᵀ / √width) v over the flattened axes."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(groups, width), nn.Linear(width, 3 * width)
        self.out = _zeroed(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x).flatten(2).mT).unsqueeze(1)  # four axes: with three, torch keeps all of q kᵀ
        taken = self.out(F.scaled_dot_product_attention(*heads.chunk(3, 3))[:, 0])
        return x + taken.mT.reshape(x.shape)


class Padded(nn.Module):
    """Continue x by one along each of the ``axes`` that are not fixed: from the other end, or with its own last value.

    For a kernel of three the latter is the reflection at the edge, between two grid points, that the cosine basis has:
    x[−1] = x[0]. torch's "reflect" mirrors at the grid point instead, x[−1] = x[1].
    """

    def __init__(self, axes: Mapping[int, str]) -> None:
        super().__init__()
        self.axes = {axis: kind for axis, kind in axes.items() if kind != "fixed"}

    def forward(self, x: Tensor) -> Tensor:
        for axis, kind in self.axes.items():  # F.pad is slower
            start, end = x.narrow(axis, 0, 1), x.narrow(axis, -1, 1)
            x = torch.cat([end, x, start] if kind == "periodic" else [start, x, end], axis)
        return x


def continued(x: Tensor, missing: Sequence[int], kinds: Sequence[str]) -> Tensor:
    """x [B, C, *event] with so many more points along each axis, half of them at either end: those of the other end,
    those of x mirrored at its edge (x[−1] = x[0]), or zeros."""
    for axis, (more, kind) in enumerate(zip(missing, kinds, strict=True), 2):
        if not more:
            continue
        n, before = x.shape[axis], more // 2
        if kind == "fixed":
            x = F.pad(x, (0, 0) * (x.ndim - 1 - axis) + (before, more - before))
            continue
        beyond = x if kind == "periodic" else x.flip(axis)
        copies = -(-(more - before) // n)  # at either end, in turn as it continues and as it is
        parts = [beyond if copy % 2 else x for copy in range(-copies, copies + 1)]
        x = torch.cat(parts, axis).narrow(axis, copies * n - before, n + more)
    return x


def _without_nan(values: Tensor, x: Tensor, shape: Sequence[int], together: bool = False) -> tuple[Tensor, Tensor]:
    """A condition [B, *shape] of x with 0 for NaN, and 1 where it is not NaN; ``together``: where no channel is."""
    values = torch.as_tensor(values, device=x.device).to(x.dtype)
    if values.ndim < 2:
        values = values.reshape(-1, *[1] * len(shape))  # one number for a whole item, as NaN for none
    values = values.expand(len(x), *shape)
    known = ~values.isnan()
    known = known.all(1, keepdim=True) if together else known
    return torch.where(known, values, 0.0), known.to(x.dtype)


def _convolution(inputs: int, outputs: int, kinds: Sequence[str], factorised: bool) -> nn.Module:
    """A convolution of kernel three along all axes; ``factorised``: along all but the first, then along that one."""
    axes = range(len(kinds))
    steps = [[*axes][1:], [0]] if factorised else [[*axes]]
    layers: list[nn.Module] = []
    for along in steps:
        kernel, zeros = [3 if a in along else 1 for a in axes], [int(a in along and kinds[a] == "fixed") for a in axes]
        layers.append(Padded({a - len(kinds): kinds[a] for a in along}))
        layers.append(CONVOLUTIONS[len(kinds) - 1](inputs, outputs, kernel, padding=zeros))
        inputs = outputs
    return nn.Sequential(*layers)


def _two_layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU(), nn.Linear(outputs, outputs))


def _zeroed(module: nn.Module) -> nn.Module:
    """The module with a last layer that says 0: each residual, and the network itself, begins there."""
    for parameter in [*module.modules()][-1].parameters():
        nn.init.zeros_(parameter)
    return module


def to_channels(x: Tensor, patch: Sequence[int]) -> Tensor:
    """[B, C, n₁, …] as [B, C · p₁ ⋯, n₁ / p₁, …]: the p neighbours along each axis become channels."""
    if max(patch) == 1:
        return x
    axes = range(len(patch))
    split = x.reshape(*x.shape[:2], *(part for n, p in zip(x.shape[2:], patch, strict=True) for part in (n // p, p)))
    inner, outer = [3 + 2 * a for a in axes], [2 + 2 * a for a in axes]
    return split.permute(0, 1, *inner, *outer).flatten(1, 1 + len(patch))


def to_neighbours(x: Tensor, patch: Sequence[int]) -> Tensor:
    """The inverse of `to_channels`."""
    if max(patch) == 1:
        return x
    axes = range(len(patch))
    split = x.unflatten(1, (-1, *patch))
    pairs = [part for a in axes for part in (2 + len(patch) + a, 2 + a)]
    sizes = [n * p for n, p in zip(x.shape[2:], patch, strict=True)]
    return split.permute(0, 1, *pairs).reshape(len(x), -1, *sizes)


def check_widths(widths: Any, attention: Any, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The widths, and the resolutions with attention, as tuples; "none" are no resolutions."""
    check_whole("layers", layers, most=MOST_LAYERS)
    wide, depths = _as_tuple(widths), () if attention == "none" else _as_tuple(attention)
    if not wide or any(not fits(w, int) or w < 8 or w % 8 for w in wide):
        raise InputError("widths", widths, "cannot be used", "give multiples of 8")
    if any(not fits(depth, int) or not 0 <= depth < len(wide) for depth in depths):
        raise InputError("attention", attention, "cannot be used", f"list resolutions from 0 to {len(wide) - 1}")
    return wide, depths


def norm_groups(widths: Sequence[int]) -> int:
    """The number of groups of the norms: at most 32, of four channels or more, and a divisor of every width."""
    common = math.gcd(*widths)
    return next(count for count in range(min(32, common // 4), 0, -1) if common % count == 0)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _per_axis(argument: str, value: Any, axes: int) -> tuple[Any, ...]:
    values = _as_tuple(value)
    if len(values) not in (1, axes):
        raise InputError(argument, value, f"is for {len(values)} axes", f"give one for all {axes}, or one for each")
    return values * axes if len(values) == 1 else values
