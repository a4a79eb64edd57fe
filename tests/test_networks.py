"""`FieldUNet` and the networks that can be named: shapes, boundaries, patches, and what a file may say of them."""

import json
import math

import numpy as np
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from problems import refused

import nidiff
from nidiff.data.spec import DataSpec
from nidiff.model.network import BUILDERS, build_network
from nidiff.model.unet import FieldUNet, continued, level_waves, to_channels, to_neighbours
from nidiff.training.build import build
from nidiff.training.experiment import Experiment

SMALL = {"widths": (8, 16), "layers": 1}
SIZES = {1: (16,), 2: (8, 12), 3: (4, 8, 8)}


def lively(net: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The network with weights that are not 0 anywhere, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            scale = 1 / math.sqrt(max(1, parameter[0].numel()))
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return net.eval()


def field(size, channels: int = 2, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(1))


def network(size, channels: int = 2, **options) -> torch.nn.Module:
    return lively(FieldUNet(size, channels, channels, **{**SMALL, **options}))


def shifted(net: torch.nn.Module, x: torch.Tensor, by: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The network of the shifted field, and the shifted output."""
    axes = [*range(2, x.ndim)]
    return net(x.roll(by, axes), 3), net(x, 3).roll(by, axes)


# Shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "options"), [(1, {"patch": 2}), (2, {}), (2, {"attention": ()}), (3, {"boundary": "reflecting"})]
)
def test_it_takes_one_two_and_three_axes_and_other_sizes_than_its_own(axes, options):
    size = SIZES[axes]
    net = network(size, **options)
    larger = tuple(2 * n for n in size)
    for each in (size, larger):
        x = field(each)
        out = net(x, torch.tensor([3, 700]))
        assert out.shape == x.shape
        assert out.isfinite().all()
    assert net(field(size, batch=1), 2.5).shape == (1, 2, *size)  # a level between two rows


def test_it_says_nothing_before_training_and_every_parameter_learns():
    net = FieldUNet((8, 8), 4, 2, num_classes=3, patch=2, boundary=("periodic", "reflecting"), **SMALL)
    x, classes = field((8, 8), channels=4), torch.tensor([0, 2])
    assert torch.equal(net(x, 3, classes), torch.zeros(2, 2, 8, 8))
    lively(net)(x, torch.tensor([3, 9]), classes).square().sum().backward()
    idle = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []


def test_the_output_depends_on_the_level_as_a_number_and_on_classes_only_where_they_are_given():
    net, x = network((8, 8), num_classes=3), field((8, 8))
    without = net(x, 3)
    assert torch.equal(without, net(x, torch.tensor([3.0, 3.0])))
    assert (without - net(x, 3.5)).abs().max() > 1e-3
    assert torch.allclose(net(x, torch.tensor([3, 8]))[1:], net(x[1:], 8), atol=1e-5)
    with_one = net(x, 3, torch.tensor([-1, 2]))
    assert torch.allclose(with_one[0], without[0], atol=1e-6)
    assert (with_one[1] - without[1]).abs().max() > 1e-3
    assert (net(x, 3, torch.tensor([1, 1])) - net(x, 3, torch.tensor([2, 2]))).abs().max() > 1e-3


@pytest.mark.parametrize("size, patch", [((6,), (3,)), ((4, 6), (2, 3)), ((4, 4, 8), (1, 2, 4))])
def test_patches_are_exact(size, patch):
    x = field(size)
    inside = to_channels(x, patch)
    assert inside.shape == (2, 2 * math.prod(patch), *(n // p for n, p in zip(size, patch, strict=True)))
    assert torch.equal(to_neighbours(inside, patch), x)
    if len(size) == 2:  # each channel is one place in the patch
        assert torch.equal(inside[:, 1], x[:, 0, ::2, 1::3])


def test_outputs_have_at_most_the_first_width_of_numbers_for_each_patch():
    """So white noise has a part that no weights can repeat; where training may meet it, it is said."""

    def rank(patch: int) -> int:
        net = network((8, 8), 1, patch=patch)
        with torch.no_grad():
            outputs = net(field((8, 8), 1, batch=200), 10).flatten(1).double()
        return int(torch.linalg.matrix_rank(outputs - outputs.mean(0), rtol=1e-5))

    assert rank(4) == 8 * 4  # 8 channels for each of 4 patches
    assert rank(2) == 64  # the control: all numbers

    def said(**settings) -> list[str]:
        given = {"covariance": "white", "target": "v", "network": "unet:patch=4", "widths": (8,), "attention": ()}
        trainer = build(Experiment(data=DataSpec("digits"), **given | settings))
        return [note for note in trainer.notes if "patch" in note]

    assert len(said()) == 1
    for other in ({"network": "unet:patch=2"}, {"target": "x0"}, {"covariance": "gff"}, {"widths": (16,)}):
        assert said(**other) == []


def test_a_factorised_network_halves_space_and_mixes_frames_one_apart():
    """A convolution over time reaches as far as there are convolutions; without one, frames are independent."""
    net = network((5, 8, 8), channels=1, factorised=True, attention=(), layers=1, widths=(8, 16))  # 5 cannot be halved
    x = field((5, 8, 8), channels=1, batch=1)
    assert net(x, 3).shape == x.shape
    kernels = {tuple(m.kernel_size) for m in net.modules() if isinstance(m, torch.nn.Conv3d)}
    assert kernels == {(1, 3, 3), (3, 1, 1), (1, 2, 2), (1, 1, 1)}
    moved = x.clone()
    moved[:, :, 0] += 1
    changed = (net.first(moved) - net.first(x)).abs().amax((0, 1, 3, 4))
    assert (changed[:2] > 1e-4).all()
    assert (changed[2:] == 0).all()


# Boundaries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "patch"), [(1, 2), (2, 1), (3, 1)])
def test_a_periodic_network_commutes_with_shifts(axes, patch):
    size = tuple(2 * n for n in SIZES[axes])
    net, x, by = network(size, patch=patch, boundary="periodic"), field(size), [2 * patch] * axes
    inside, outside = shifted(net, x, by)
    assert torch.allclose(inside, outside, atol=2e-5)
    for boundary in ("fixed", "reflecting"):  # these know where the edge is
        inside, outside = shifted(network(size, patch=patch, boundary=boundary), x, by)
        assert (inside - outside).abs().max() > 1e-2


def test_each_axis_has_its_own_boundary():
    net, x = network((8, 12), boundary="reflecting/periodic"), field((8, 12))
    assert torch.equal(network((8, 12), boundary=("reflecting", "periodic"))(x, 3), net(x, 3))
    torch.testing.assert_close(*shifted(net, x, [0, 2]), rtol=0, atol=2e-5)
    inside, outside = shifted(net, x, [2, 0])
    assert (inside - outside).abs().max() > 1e-2


@pytest.mark.parametrize("axes", SIZES)
def test_only_a_fixed_boundary_is_seen_in_a_constant_field(axes):
    """What is mirrored or continued at the edge shows none: a constant stays constant."""
    for boundary, seen in (("periodic", False), ("reflecting", False), ("fixed", True)):
        out = network(SIZES[axes], boundary=boundary)(torch.ones(1, 2, *SIZES[axes]), 3)
        spread = out.flatten(2).std(2).max()
        assert (spread > 1e-2) == seen
        assert seen or spread < 1e-4


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "fixed"])
def test_no_side_is_preferred(boundary):
    """Mirroring the field and every kernel mirrors the output; diffusers' halving pads one side only."""
    net, x = network((8, 12), boundary=boundary), field((8, 12))
    expected = net(x, 3).flip(2, 3)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight.copy_(module.weight.flip(2, 3))
    assert torch.allclose(net(x.flip(2, 3), 3), expected, atol=2e-5)
    assert (net(x, 3) - expected.flip(2, 3)).abs().max() > 1e-2  # the kernels are not symmetric


def test_reflecting_is_the_reflection_of_the_cosine_basis():
    """One convolution of a mirrored field of twice the size: x[−1] = x[0], not x[1]."""
    net, doubled, x = network((8,), boundary="reflecting"), network((16,), boundary="periodic"), field((8,))
    whole = doubled.first(torch.cat([x, x.flip(2)], 2))
    assert torch.allclose(net.first(x), whole[..., :8], atol=1e-6)


# Any size --------------------------------------------------------------------------------------------------------

DEEP = {"widths": (8, 8, 16), "layers": 1, "attention": (2,)}  # sides are multiples of 4, or are continued to them


def by_hand(x: torch.Tensor, before: int, after: int, axis: int, boundary: str) -> torch.Tensor:
    """x with more points at either end of an axis, by numpy."""
    mode = {"periodic": "wrap", "reflecting": "symmetric", "fixed": "constant"}[boundary]
    widths = [(before, after) if each == axis else (0, 0) for each in range(x.ndim)]
    return torch.from_numpy(np.pad(x.numpy(), widths, mode))


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "fixed"])
@pytest.mark.parametrize("size", [(73,), (9, 8), (1, 7), (3, 5, 6), (2, 2, 2)])
def test_a_size_that_does_not_fit_is_continued_by_its_boundary_and_cut_back(size, boundary):
    """The output is that of the field which was continued by hand, half at either end, where the field is. Also where
    more is missing than there is."""
    options = {**DEEP, "patch": 3 if len(size) == 1 else 1}
    net, fitting = (network(each, boundary=boundary, **options) for each in (size, [12] * len(size)))
    assert net.state_dict().keys() == fitting.state_dict().keys()
    x = longer = field(size)
    where = [slice(None)] * 2
    for axis, n in enumerate(size, 2):
        missing = -n % (4 * options["patch"])
        longer = by_hand(longer, missing // 2, missing - missing // 2, axis, boundary)
        where.append(slice(missing // 2, missing // 2 + n))
    assert longer.shape != x.shape
    out = net(x, 3)
    assert out.shape == x.shape
    assert torch.equal(out, fitting(longer, 3)[tuple(where)])
    if max(size) > 7:  # elsewhere it is another function
        assert (out - fitting(longer, 3)[tuple(slice(n) for n in x.shape)]).abs().max() > 1e-3


def test_a_size_that_fits_is_not_touched(monkeypatch):
    monkeypatch.setattr("nidiff.model.unet.torch.cat", lambda *_: pytest.fail("something was put together"))
    monkeypatch.setattr("nidiff.model.unet.F.pad", lambda *_: pytest.fail("something was continued"))
    x = field((8, 12))
    for boundary in ("periodic", "reflecting", "fixed"):
        assert continued(x, [0, 0], [boundary, boundary]) is x


def test_an_axis_that_fits_keeps_its_shifts_while_another_is_continued():
    net, x = network((9, 12), boundary="reflecting/periodic", **DEEP), field((9, 12))
    torch.testing.assert_close(*shifted(net, x, [0, 4]), rtol=0, atol=2e-5)
    inside, outside = shifted(network((9, 13), boundary="periodic", **DEEP), field((9, 13)), [0, 4])
    assert (inside - outside).abs().max() > 1e-2  # of an axis that is continued itself, that is lost


@pytest.mark.parametrize("boundary", ["periodic", "reflecting", "fixed"])
def test_no_side_is_preferred_where_an_even_number_of_points_is_missing(boundary):
    def error(size: tuple[int, int]) -> float:
        net, x = network(size, boundary=boundary, **DEEP), field(size)
        expected = net(x, 3).flip(2, 3)
        with torch.no_grad():
            for module in net.modules():
                if isinstance(module, torch.nn.Conv2d):
                    module.weight.copy_(module.weight.flip(2, 3))
        return (net(x.flip(2, 3), 3) - expected).abs().max().item()

    assert error((6, 10)) < 2e-5
    assert error((7, 9)) > 1e-3  # of an odd number one side has one more


@pytest.mark.parametrize("boundary", ["periodic", "reflecting"])
def test_a_constant_field_of_any_size_stays_constant(boundary):
    out = network((9, 7), boundary=boundary, **DEEP)(torch.ones(1, 2, 9, 7), 3)
    assert out.flatten(2).std(2).max() < 1e-4


def test_the_fields_of_a_condition_are_continued_with_x():
    """And where they are not known, they are known nowhere beyond."""
    options = {"boundary": "reflecting", "condition_channels": 1, **DEEP}
    net, x, known = network((9, 6), **options), field((9, 6)), field((9, 6), 1)
    known[1, :, 8] = math.nan
    longer = [by_hand(by_hand(each, 1, 2, 2, "reflecting"), 1, 1, 3, "reflecting") for each in (x, known)]
    assert torch.equal(net(x, 3, fields=known), net(longer[0], 3, fields=longer[1])[:, :, 1:10, 1:7])
    assert not torch.allclose(net(x, 3, fields=known), net(x, 3), atol=1e-3)


def test_gradients_reach_every_point_and_weight_of_an_odd_grid():
    net, x = network((9, 7), boundary="reflecting/periodic", **DEEP).double(), field((9, 7)).double().requires_grad_()
    net(x, 3).square().sum().backward()
    assert (x.grad != 0).all()
    assert all(weight.grad is not None and weight.grad.any() for weight in net.parameters())
    step = 1e-6 * field((9, 7)).double()
    with torch.no_grad():
        change = net(x + step, 3).square().sum() - net(x - step, 3).square().sum()
    assert float(change) == pytest.approx(float(2 * (x.grad * step).sum()), rel=1e-5)


def test_an_odd_grid_is_compiled_as_one_graph():
    net, x = network((9, 7), boundary="reflecting/periodic", **DEEP), field((9, 7))
    torch.testing.assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x, torch.tensor(3)), net(x, 3))


# Files -----------------------------------------------------------------------------------------------------------


def denoiser(net: torch.nn.Module, size) -> nidiff.Denoiser:
    return nidiff.Denoiser(net, nidiff.Process(nidiff.schedules.ddpm_linear(9), nidiff.Identity(size)), "v")


@pytest.mark.parametrize(
    "size, options",
    [
        ((16,), {"boundary": "periodic", "patch": 2}),
        ((8, 12), {"boundary": ("reflecting", "periodic"), "patch": (1, 3), "num_classes": 2, "attention": ()}),
        ((3, 4, 8), {"factorised": True, "dropout": 0.1}),
    ],
)
def test_a_saved_network_is_the_same_bit_for_bit(size, options, tmp_path):
    first, x = denoiser(network(size, **options), size), field(size)
    nidiff.save_model(first, tmp_path / "m")
    level = first.process.schedule.level(4)
    for _ in range(2):  # also of a model that was loaded
        again = nidiff.load_model(tmp_path / "m")
        assert isinstance(again.net, FieldUNet)
        assert torch.equal(again(x, level), first(x, level))
        nidiff.save_model(again, tmp_path / "m")


VALUES = [None, -1, 10**18, "x", [[]], {}, [10**18, 4], [8] * 40]


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_configuration_is_refused_or_builds_the_same_weights(tmp_path):
    nidiff.save_model(denoiser(network((4, 4), channels=1, widths=(8,), attention=(0,)), (4, 4)), tmp_path / "m")
    (tmp_path / "m" / "manifest.json").unlink()
    file = tmp_path / "m" / "unet" / "config.json"
    config = json.loads(file.read_text())
    keys = [key for key in config if not key.startswith("_")]
    assert {"sample_size", "patch", "boundary", "layers", "num_classes"} <= {*keys}
    refused = 0
    for key in keys:
        for value in VALUES:
            file.write_text(json.dumps(config | {key: value}))
            try:
                nidiff.sample(nidiff.load_model(tmp_path / "m"), (1, 1, 4, 4), num_steps=2, generator=[0])
            except nidiff.InputError:
                refused += 1
    assert refused > 0.8 * len(keys) * len(VALUES)


# Names -----------------------------------------------------------------------------------------------------------


def test_a_network_is_named_in_one_line():
    net = build_network(
        "unet:widths=8/16,patch=2,attention=none", (1, 8, 8), boundary="periodic", layers=1, widths=(64,)
    )
    assert isinstance(net, FieldUNet)
    assert net.config["widths"] == (8, 16)  # a key of the text wins
    assert (net.config["patch"], net.config["layers"], net.config["boundary"]) == (2, 1, "periodic")
    assert build_network("unet:widths=8,attention=0", (1, 8, 8)).config["attention"] == 0
    assert not [m for m in net.modules() if type(m).__name__ == "Attention"]
    assert build_network("auto", (1, 4, 8, 8), **SMALL).config["sample_size"] == (4, 8, 8)
    images = build_network("auto", (1, 8, 8), auto="unet2d", boundary="periodic", widths=(8,), attention=(), both=True)
    assert (type(images).__name__, images.config["in_channels"]) == ("UNet2DModel", 2)
    assert build_network("unet", (1, 8, 8), both=True, **SMALL).config["in_channels"] == 2


def test_a_builder_of_your_own_is_known_everywhere(monkeypatch):
    monkeypatch.setitem(BUILDERS, "mine", lambda shape, kernel=3: torch.nn.Conv2d(shape[0], shape[0], kernel))
    assert build_network("mine:kernel=5", (3, 8, 8), widths=(8,), dropout=0.1).kernel_size == (5, 5)
    for text, options in (("mine:widths=8", {}), ("mine:kernel", {}), ("mine", {"both": True})):
        with refused("network"):
            build_network(text, (3, 8, 8), **options)


BAD = {
    "size": (lambda: FieldUNet((28, 0)), "sample_size"),
    "depth": (lambda: FieldUNet((8, 8), widths=(8,) * 8), "widths"),
    "large patch": (lambda: FieldUNet((1000,), patch=10**6), "widths"),
    "axes": (lambda: FieldUNet((4, 4, 4, 4)), "sample_size"),
    "widths": (lambda: FieldUNet((8, 8), widths=(10,)), "widths"),
    "attention": (lambda: FieldUNet((8, 8), widths=(8,), attention=(1,)), "attention"),
    "patch": (lambda: FieldUNet((8, 8), patch=(2, 2, 2)), "patch"),
    "boundary": (lambda: FieldUNet((8, 8), boundary="circular"), "boundary"),
    "many layers": (lambda: build_network("unet:layers=1000000000", (1, 8, 8)), "layers"),
    "layers of unet2d": (lambda: build_network("unet2d:layers=1000000000", (1, 8, 8)), "layers"),
    "dropout": (lambda: FieldUNet((8, 8), dropout=1.0), "dropout"),
    "classes": (lambda: FieldUNet((8, 8), num_classes=0), "num_classes"),
    "no classes": (lambda: network((8, 8))(field((8, 8)), 0, torch.tensor([0, 1])), "class_labels"),
    "unet2d": (lambda: build_network("unet2d", (1, 8)), "network"),
    "size of unet2d": (lambda: build_network("unet2d:widths=8/8", (1, 7, 8)), "network"),
    "name": (lambda: build_network("unett", (1, 8, 8)), "network"),
    "key": (lambda: build_network("unet:wide=8", (1, 8, 8)), "network"),
}


def test_bad_arguments_are_named():
    for act, argument in BAD.values():
        with refused(argument):
            act()


def test_any_widths_that_are_multiples_of_eight_have_norms():
    for name in ("unet", "unet2d"):
        net = build_network(f"{name}:widths=144/288,layers=1,attention=none", (1, 4, 4))
        assert {each.num_groups for each in net.modules() if isinstance(each, torch.nn.GroupNorm)} == {24}


def test_levels_are_embedded_as_in_diffusers():
    labels = torch.tensor([0, 3, 17.5, 999])
    assert torch.equal(level_waves(labels, 24), get_timestep_embedding(labels, 24, True, 0))


def test_gradients_in_bfloat16_are_those_of_float32_with_two_points_along_the_first_axis():
    """torch's own convolution has NaN and other rubbish there, on some processors."""
    torch.manual_seed(0)
    net = nidiff.FieldUNet((2, 4, 4), widths=(16,), layers=1, attention=())
    for weight in net.parameters():  # some layers are 0 before training
        torch.nn.init.normal_(weight, std=0.1)
    x, found = torch.randn(4, 1, 2, 4, 4), []
    for enabled in (False, True, True, True):
        torch.full((200_000,), float("nan"))  # what is left in memory
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            answer = net(x, torch.zeros(4))
        answer.float().square().mean().backward()
        found.append(torch.cat([weight.grad.flatten() for weight in net.parameters() if weight.grad is not None]))
    for gradient in found[1:]:
        assert (gradient - found[0]).norm() < 0.1 * found[0].norm()
