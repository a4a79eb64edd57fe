"""A denoiser is a module: it moves, pickles, compiles, keeps its network's dtype and knows what it predicts."""

import copy
import pickle

import pytest
import torch
from problems import refused

import nidiff
from nidiff.diffusion.scaling import PIXELS
from nidiff.diffusion.target import TARGETS, Target
from nidiff.testing.problems import Gaussian, normal, smooth_net

COV = nidiff.gaussian_free_field((2, 3))
PROCESS = nidiff.Process(nidiff.schedules.vp(20).shifted(0.5), COV)


class Net(torch.nn.Module):
    """A network of (x, label), which can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x, label):
        return self.layer(x.flatten(1)).reshape(x.shape) * (1 + 0.01 * label.reshape(-1, 1, 1).to(x))


class Conditional(Net):
    def forward(self, x, label, class_labels):
        return super().forward(x, label) * class_labels.reshape(-1, 1, 1)


def test_a_denoiser_pickles_and_copies_with_everything_it_has():
    for target in TARGETS:
        gaussian = nidiff.GaussianModel(torch.zeros(2, 3), COV) if target == "residual" else None
        denoiser = nidiff.Denoiser(Net(), PROCESS, target, clip=2.0, scaling=PIXELS, gaussian=gaussian)
        x, level = normal(3, 2, 3).float(), PROCESS.schedule.level(5)
        for other in (pickle.loads(pickle.dumps(denoiser)), copy.deepcopy(denoiser)):
            assert torch.equal(other(x, level), denoiser(x, level))
            assert (other.target_name, other.clip, other.scaling) == (target, 2.0, PIXELS)


def test_it_moves_with_its_network_and_shares_it():
    denoiser = nidiff.Denoiser(Net(), PROCESS)
    assert denoiser.device == torch.device("cpu")
    assert nidiff.Denoiser(smooth_net((2, 3)), PROCESS).device == torch.device("cpu")
    assert nidiff.Denoiser(Net(), PROCESS).to("meta").device == torch.device("meta")
    clipped = denoiser.clipped(0.1)
    assert (clipped.net, clipped.clip, denoiser.clip) == (denoiser.net, 0.1, None)
    other = denoiser.with_net(Net())
    assert other.net is not denoiser.net
    assert [name for name, _ in denoiser.named_parameters()] == ["net.layer.weight", "net.layer.bias"]


def test_tensors_without_numbers_are_refused():
    """Those of torch's meta device, wherever they enter."""
    denoiser, x = nidiff.Denoiser(smooth_net((2, 3)), PROCESS, "x0"), torch.zeros(2, 2, 3, device="meta")
    level = PROCESS.schedule.level(5)
    for argument, call in (
        ("x", lambda: denoiser(x, level)),
        ("x", lambda: denoiser.score(x, level)),
        ("x", lambda: COV.sqrt(x)),
        ("x", lambda: nidiff.log_likelihood(denoiser, x)),
        ("x0", lambda: PROCESS.perturb(x, level, x)),
        ("x0", lambda: nidiff.denoising_loss(denoiser, x)),
        ("data", lambda: nidiff.fit_gaussian(x)),
        ("start", lambda: nidiff.sample(denoiser, (2, 2, 3), start=x)),
        ("device", lambda: nidiff.sample(denoiser, (2, 2, 3), device="meta")),
        ("device", lambda: nidiff.sample(nidiff.Denoiser(Net(), PROCESS).to("meta"), (2, 2, 3))),
    ):
        with refused(argument):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_is_called_in_its_own_dtype(dtype):
    """A half-precision network samples in float32, and only its own arithmetic is rounded."""
    torch.manual_seed(0)
    net = Net()
    exact = nidiff.sample(nidiff.Denoiser(net, PROCESS, "x0"), (4, 2, 3), generator=range(4), num_steps=5)
    own = nidiff.sample(nidiff.Denoiser(net.to(dtype), PROCESS, "x0"), (4, 2, 3), generator=range(4), num_steps=5)
    assert own.dtype == torch.float32
    assert torch.allclose(own, exact, atol=0.05 if dtype == torch.bfloat16 else 1e-5)


def test_a_target_is_a_name_or_an_object(monkeypatch):
    """Half the clean image: x̂0 = 2 · output, of a family that no name has yet."""
    half = Target(lambda x0, eps, level, cov: x0 / 2, lambda signal, sigma: (0.0 * signal, 2.0 + 0.0 * signal), 0.0)
    problem = Gaussian(COV)
    process = nidiff.Process(nidiff.schedules.ddpm_linear(50), COV)
    level = process.schedule.level(20)

    def net(x, label):
        return problem.denoise(x, level) / 2

    x = normal(4, 2, 3)
    denoiser = nidiff.Denoiser(net, process, target=half)
    assert torch.allclose(denoiser(x, level), problem.denoise(x, level))
    assert denoiser.target_name is None
    monkeypatch.setitem(TARGETS, "half", half)
    assert denoiser.target_name == "half"
    assert torch.equal(nidiff.Denoiser(net, process, target="half")(x, level), denoiser(x, level))
    with refused("clip"):
        nidiff.Denoiser(net, process, clip=-1.0)
    with refused("target"):
        nidiff.Denoiser(net, process, target="quarter")


def test_another_network_of_a_copy_is_not_one_of_the_original():
    net, other = Conditional(), Conditional()
    denoiser = nidiff.Denoiser(net, PROCESS)
    copy_of_it = denoiser.given(class_labels=1)
    copy_of_it.net = other
    assert denoiser.net is net
    assert copy_of_it.net is other
    assert denoiser.condition_values == {}


def test_a_denoiser_is_in_the_mode_of_its_network():
    """As after load_model, whose networks are in evaluation mode."""
    assert nidiff.Denoiser(Net(), PROCESS).training
    evaluated = nidiff.Denoiser(Net().eval(), PROCESS)
    assert not evaluated.training
    assert not evaluated.clipped(1.0).training
    assert evaluated.train().net.training


def test_the_loss_compiles_to_one_graph():
    net, x0 = Net(), torch.randn(5, 2, 3)
    denoiser = nidiff.Denoiser(net, PROCESS)
    compiled = torch.compile(
        lambda x0: nidiff.denoising_loss(denoiser, x0).mean(), backend="aot_eager", fullgraph=True, dynamic=False
    )
    torch.manual_seed(3)
    loss = compiled(x0)
    loss.backward()
    gradient = net.layer.weight.grad.clone()
    net.zero_grad()
    torch.manual_seed(3)
    expected = nidiff.denoising_loss(denoiser, x0).mean()
    expected.backward()
    assert torch.allclose(loss, expected, rtol=1e-4)
    assert torch.allclose(gradient, net.layer.weight.grad, rtol=1e-3, atol=1e-6)


def test_scaling_is_undone():
    data = torch.stack([280 + 15 * torch.randn(4, 8), 1e-3 * torch.randn(4, 8)], 1)
    scaling = nidiff.Scaling(scale=(15.0, 1e-3), shift=(280.0, 0.0))
    x = scaling.to_model(data)
    assert x.std((0, 2)).sub(1).abs().max() < 0.5
    assert torch.allclose(scaling.to_data(x), data, rtol=1e-5, atol=1e-6)
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    assert PIXELS.to_model(pixels).flatten()[[0, -1]].tolist() == [-1.0, 1.0]
    assert torch.equal(PIXELS.to_data(PIXELS.to_model(pixels)).round().to(torch.uint8), pixels)
    assert nidiff.Scaling(torch.tensor([15.0, 0.5]), data.numpy()[0, 0, 0]) == nidiff.Scaling(
        (15.0, 0.5), data[0, 0, 0].item()
    )
    with refused("data"):
        scaling.to_model(pixels)
    for bad in ({"scale": 0.0}, {"scale": ()}, {"scale": 1.0, "shift": float("nan")}, {"scale": "big"}):
        with refused("scale", "shift"):
            nidiff.Scaling(**bad)


def test_a_scaling_is_for_one_number_of_channels():
    for move in (nidiff.Scaling(1.0, 0.0, (True, False)).to_data, nidiff.Scaling(1.0, 0.0, (True, False)).to_model):
        with refused("data"):
            move(torch.ones(2, 1, 4))
    with refused("shift"):
        nidiff.Scaling((1.0, 2.0), (0.0, 1.0, 2.0))
