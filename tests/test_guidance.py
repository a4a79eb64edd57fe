"""Conditions and classifier-free guidance, with exact denoisers in place of a network."""

import json
import math

import pytest
import torch
from problems import Mixture, refused
from scipy.integrate import quad

import nidiff
from nidiff.diffusion.condition import as_conditions
from nidiff.diffusion.scaling import Scaling
from nidiff.testing.problems import output_law, uniform_in_logsnr

COV = nidiff.gaussian_free_field((2, 3), gamma=1.5)
LABELS = {"class_labels": nidiff.Condition(classes=2, null=-1, dropout=0.1)}


class ExactMixture(torch.nn.Module):
    """The exact x̂0 of a mixture: of one of its parts for a class, of all for the class -1."""

    def __init__(self, problem, schedule):
        super().__init__()
        self.problem, self.schedule, self.calls = problem, schedule, 0

    def forward(self, x, label, class_labels):
        self.calls += 1
        level = self.schedule.level(float(label[0]))
        answers = torch.stack([every.denoise(x, level) for every in (*self.problem.parts, self.problem)])
        return answers[class_labels, torch.arange(len(x))]


def mixture_model(num_levels=40):
    problem, schedule = Mixture(COV), uniform_in_logsnr(num_levels, "variance")
    process = nidiff.Process(schedule, COV)
    return problem, nidiff.Denoiser(ExactMixture(problem, schedule), process, "x0", conditions=LABELS)


def moments(denoiser, count=4000):
    x = nidiff.sample(denoiser, (count, 2, 3), sampler="heun", num_steps=40, generator=0, dtype=torch.float64)
    return x.flatten(1).mean(0), x.flatten(1).T.cov()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_scale_1_is_the_conditional_law_and_0_the_unconditional_one(scale):
    problem, denoiser = mixture_model()
    mean, covariance = moments(denoiser.given(class_labels=1).guided(scale))
    parts = {0.0: problem.moments(), 1.0: (problem.parts[1].mean, problem.parts[1].matrix)}
    error = 4 * parts[scale][1].diagonal().max().sqrt() / 4000**0.5
    assert (mean - parts[scale][0]).abs().max() < error + 0.01
    assert (covariance - parts[scale][1]).norm() / parts[scale][1].norm() < 0.08
    assert (mean - parts[1 - scale][0]).abs().max() > 4 * error  # and it is not the other one


class Shifted(torch.nn.Module):
    """x0 = c · a + N(0, C) with c ~ N(0, 1) in every mode: C and T = C + a² are its variances with and without c."""

    def __init__(self, process, conditional, total, shift):
        super().__init__()
        self.process, self.conditional, self.total, self.shift = process, conditional, total, shift

    def forward(self, x, label, c):
        level = self.process.schedule.level(float(label[0]))
        known = c.isfinite().to(x).reshape(-1, 1, 1)
        variance = known * self.conditional + (1 - known) * self.total
        mean = c.nan_to_num().reshape(-1, 1, 1) * self.shift
        cov = self.process.covariance
        gain = level.signal * variance / (level.signal**2 * variance + level.sigma**2 * cov.eigenvalues)
        return (x - level.signal * mean) * gain + mean  # the modes of a diagonal Σ are pixels


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_larger_scales_tilt_as_derived(scale):
    """With Gaussian data the guided flow is linear in every mode. Its equation by v, the variance of the noise,

        dx/dv = ½ (1 − w) x / (v + T) + ½ w (x − c a) / (v + C)

    is solved by φ(v) = (v + T)^((1−w)/2) (v + C)^(w/2): samples have the variance T^(1−w) C^w, whatever Σ. (The law
    p(x) p(c | x)^w has another one, 1 / ((1 − w)/T + w/C).)
    """
    cov = nidiff.Diagonal(torch.tensor([[0.2, 1.0, 1.8], [0.5, 0.7, 1.8]]))
    schedule = uniform_in_logsnr(300, "signal", -18.0, 18.0)
    process = nidiff.Process(schedule, cov)
    own = torch.tensor([[0.3, 0.5, 1.0], [0.1, 0.2, 0.4]], dtype=torch.float64)
    shift = torch.tensor([[1.0, 0.5, 1.0], [0.3, 0.2, 0.5]], dtype=torch.float64)
    total, c = own + shift**2, 1.5
    kind = {"c": nidiff.Condition(dropout=0.1)}
    denoiser = nidiff.Denoiser(Shifted(process, own, total, shift), process, "x0", conditions=kind)
    denoiser = denoiser.given(c=torch.tensor([c], dtype=torch.float64)).guided(scale)
    start = schedule.level(299)
    initial = torch.stack([torch.zeros_like(own), start.sigma * cov.eigenvalues.sqrt()])  # where the mean and 1 σ go
    x = nidiff.sample(denoiser, (2, 2, 3), sampler="heun", num_steps=300, start=initial, dtype=torch.float64)
    torch.testing.assert_close((x[1] - x[0]).square(), total ** (1 - scale) * own**scale, rtol=5e-3, atol=0)

    def mean(C, T, a):
        def phi(v):
            return (v + T) ** ((1 - scale) / 2) * (v + C) ** (scale / 2)

        # v = exp(u): the integral goes over many decades
        value, _ = quad(lambda u: 0.5 * scale * c * a / (math.exp(u) + C) / phi(math.exp(u)) * math.exp(u), -40, 40)
        return phi(0) * value

    expected = [mean(*each) for each in zip(own.flatten(), total.flatten(), shift.flatten(), strict=True)]
    torch.testing.assert_close(x[0].flatten(), torch.tensor(expected, dtype=torch.float64), rtol=5e-3, atol=1e-3)


def test_with_fresh_noise_larger_scales_have_another_variance():
    """The reverse SDE by v, the variance of the noise, has dP/dv = 2 (log ψ)' P − 1 for the variance P of its samples,
    ψ = (v + T)^(1−w) (v + C)^w, which is solved by ψ(v)² ∫ from v of 1/ψ². At w = 2, and v = 0, it is
    1 + (T − C)²/(3TC) times that of the ODE, whatever Σ; at w = 1 the same."""
    cov = nidiff.Diagonal(torch.tensor([[0.2, 1.0, 1.8]]))
    own, shift = (torch.tensor([values], dtype=torch.float64) for values in ([0.3, 0.5, 0.1], [1.0, 0.5, 1.0]))
    total, ratios = own + shift**2, {}
    process = nidiff.Process(uniform_in_logsnr(400, "signal", -14.0, 14.0), cov)
    kind = {"c": nidiff.Condition(dropout=0.1)}
    denoiser = nidiff.Denoiser(Shifted(process, own, total, shift), process, "x0", conditions=kind)
    for scale in (1.0, 2.0):
        guided = denoiser.given(c=torch.tensor([1.5], dtype=torch.float64)).guided(scale)
        variance = output_law(guided, "ancestral")[1].diagonal().reshape(1, 3)
        ratios[scale] = variance / (total ** (1 - scale) * own**scale)
    assert (ratios[1.0] - 1).abs().max() < 0.05
    expected = 1 + (total - own).square() / (3 * total * own)
    torch.testing.assert_close(ratios[2.0], expected, rtol=0.05, atol=0)
    assert expected.max() > 3


def test_guidance_is_the_same_in_eps_and_in_x0():
    """The rule of Ho and Salimans, (1 − w) eps(none) + w eps(c), with coloured noise."""
    _, denoiser = mixture_model()
    x, level = torch.randn(3, 2, 3, dtype=torch.float64), denoiser.process.schedule.level(20)
    of_class = denoiser.given(class_labels=0)
    expected = 3 * of_class.eps(x, level) - 2 * denoiser.eps(x, level)
    torch.testing.assert_close(of_class.guided(3.0).eps(x, level), expected)


def test_a_guided_step_is_two_calls_of_the_network_and_only_between_two_rows():
    _, denoiser = mixture_model()
    of_class, x = denoiser.given(class_labels=0), torch.randn(3, 2, 3, dtype=torch.float64)
    for scale, calls in ((0.0, 1), (1.0, 1), (2.0, 2)):
        denoiser.net.calls = 0
        of_class.guided(scale)(x, denoiser.process.schedule.level(5))
        assert denoiser.net.calls == calls
    limited, guided = of_class.guided(3.0, interval=(10, 20)), of_class.guided(3.0)
    for row, expected in ((9, of_class), (10, guided), (20, guided), (21, of_class)):
        level = denoiser.process.schedule.level(row)
        torch.testing.assert_close(limited(x, level), expected(x, level))


def test_the_sum_is_clipped_and_not_its_parts():
    _, denoiser = mixture_model()
    x, level = torch.randn(3, 2, 3, dtype=torch.float64), denoiser.process.schedule.level(20)
    of_class = denoiser.given(class_labels=0)
    clipped = of_class.clipped(0.2).guided(3.0)(x, level)
    torch.testing.assert_close(clipped, of_class.guided(3.0)(x, level).clamp(-0.2, 0.2))
    parts = 3 * of_class.clipped(0.2)(x, level) - 2 * denoiser.clipped(0.2)(x, level)
    assert not torch.allclose(clipped, parts)


def test_conditions_reach_the_network_as_they_are():
    """Text embeddings, with the words of diffusers; a network in half precision gets floats of its dtype."""
    seen = {}

    class Text(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, sample, timestep, encoder_hidden_states, class_labels=None, return_dict=True):
            seen.update(text=encoder_hidden_states, labels=class_labels, return_dict=return_dict)
            return sample * encoder_hidden_states.mean((1, 2))[:, None, None]

    process = nidiff.Process(nidiff.schedules.ddpm_cosine(10), COV)
    text = torch.randn(2, 5, 4)
    denoiser = nidiff.Denoiser(Text(), process, "v").given(
        encoder_hidden_states=text, class_labels=3, return_dict=False
    )
    nidiff.sample(denoiser.guided(2.0, null={"encoder_hidden_states": torch.zeros(1, 5, 4)}), (2, 2, 3), num_steps=3)
    assert seen["text"].shape == (2, 5, 4)
    assert seen["text"].dtype == torch.bfloat16
    assert seen["labels"].tolist() == [3, 3]
    assert seen["return_dict"] is False


def of_classes():
    net = nidiff.FieldUNet((8, 8), widths=(8,), layers=1, attention=(), num_classes=10)
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(20), nidiff.gaussian_free_field((8, 8)))
    return nidiff.Denoiser(net, process, "v", conditions={"class_labels": nidiff.Condition(10, (), -1, 0.1)})


def test_images_in_tiles_have_their_own_classes():
    denoiser = of_classes()
    for weight in denoiser.parameters():  # some layers are 0 before training
        torch.nn.init.normal_(weight, std=0.1)
    labels, arguments, shape = torch.tensor([3, 1, 4]), {"num_steps": 2, "tile": 2}, (3, 1, 8, 8)
    together = nidiff.sample(denoiser.given(class_labels=labels).guided(2.0), shape, generator=range(3), **arguments)
    assert (together.requires_grad, together.dtype) == (False, torch.float32)
    for image in range(3):
        alone = denoiser.given(class_labels=labels).for_images(torch.tensor([image])).guided(2.0)
        x = nidiff.sample(alone, (1, 1, 8, 8), generator=[image], **arguments)
        assert torch.equal(x[0], together[image])
    other = nidiff.sample(denoiser.given(class_labels=labels.flip(0)), shape, generator=range(3), **arguments)
    assert not torch.equal(other, together)


def test_conditions_are_stored_with_their_scaling_and_those_of_version_0_2_open():
    """Version 0.2 stored scale and shift flat, and empty ones where there was no scaling."""
    flat = {"classes": None, "shape": [2], "null": None, "dropout": 0.1, "scale": [3.0, 4.0], "shift": [1.0, 0.0]}
    expected = nidiff.Condition(shape=(2,), dropout=0.1, scaling=Scaling((3.0, 4.0), (1.0, 0.0)))
    assert as_conditions({"parameters": flat}) == {"parameters": expected}
    plain = as_conditions({"class_labels": {"classes": 10, "null": -1, "scale": [], "shift": []}})
    assert plain == {"class_labels": nidiff.Condition(classes=10, null=-1)}
    for condition in (expected, plain["class_labels"]):
        assert as_conditions({"c": json.loads(json.dumps(condition.to_json()))}) == {"c": condition}


def test_a_model_remembers_its_conditions(tmp_path):
    denoiser = of_classes()
    nidiff.save_model(denoiser, tmp_path / "model")
    assert nidiff.load_model(tmp_path / "model").conditions == denoiser.conditions
    for bound in (denoiser.given(class_labels=1), denoiser.given(class_labels=1).guided(2.0)):
        with pytest.raises(nidiff.InputError, match="bound"):
            nidiff.save_model(bound, tmp_path / "other")


def test_null_rows_go_with_their_images():
    _, denoiser = mixture_model()
    labels, null = torch.tensor([0, 1, 0]), torch.tensor([1, 0, -1])
    guided, index = denoiser.given(class_labels=labels).guided(3.0, null={"class_labels": null}), torch.tensor([2, 0])
    x, level = torch.randn(3, 2, 3, dtype=torch.float64), denoiser.process.schedule.level(20)
    torch.testing.assert_close(guided.for_images(index)(x[index], level), guided(x, level)[index])


def test_fields_of_a_condition_are_on_the_grid_of_x():
    process = nidiff.Process(nidiff.schedules.ddpm_cosine(5), nidiff.gaussian_free_field((4, 4)))
    net = nidiff.FieldUNet((4, 4), widths=(8,), layers=1, attention=(), condition_channels=2)
    condition = nidiff.Condition(shape=(2, 4, 4), dropout=0.1)
    finer = nidiff.Denoiser(net, process, "v", conditions={"fields": condition}).at((8, 8))
    x, level = torch.zeros(1, 1, 8, 8), process.schedule.level(1)
    assert finer.given(fields=torch.zeros(1, 2, 8, 8))(x, level).shape == x.shape
    with refused("fields"):
        finer.given(fields=torch.zeros(1, 2, 4, 4))


BAD = [
    ("colour", lambda d: d.given(colour=1)),
    ("class_labels", lambda d: d.given(class_labels=torch.tensor([0, 2]))),
    ("class_labels", lambda d: d.given(class_labels=0.5)),
    ("class_labels", lambda d: d.given(class_labels=[[0], [1]])),
    ("class_labels", lambda d: d.given(class_labels=[0, 1, 0])(torch.zeros(2, 2, 3), d.process.schedule.level(3))),
    ("class_labels", lambda d: nidiff.Denoiser(lambda x, label: x, d.process).given(class_labels=0)),
    ("interval", lambda d: d.given(class_labels=0).guided(2.0, interval=(0, 1000))),
    ("interval", lambda d: d.given(class_labels=0).guided(2.0, interval=(3, 1))),
    ("guidance", lambda d: d.guided(2.0)),
    ("guidance", lambda d: nidiff.Denoiser(d.net, d.process).given(class_labels=0).guided(2.0)),
    ("conditions", lambda d: nidiff.Denoiser(d.net, d.process, conditions={"a": 3})),
]


def test_bad_input_is_named():
    for argument, ask in BAD:
        with refused(argument):
            ask(mixture_model(10)[1])


def test_what_a_network_never_went_without_must_be_given_and_guidance_of_it_is_warned_of():
    _, denoiser = mixture_model(10)
    kind = {"class_labels": nidiff.Condition(2, (), -1)}
    never = nidiff.Denoiser(denoiser.net, denoiser.process, "x0", conditions=kind)
    with refused("class_labels"):
        nidiff.sample(never, (1, 2, 3))
    assert nidiff.sample(never.given(class_labels=1), (1, 2, 3)).shape == (1, 2, 3)
    with pytest.warns(UserWarning, match="dropout"):
        never.given(class_labels=0).guided(2.0)
    denoiser.given(class_labels=0).guided(2.0)  # no warning, which would be an error here
