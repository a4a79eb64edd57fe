"""The measurements of docs/speech.md: python benchmarks/stories/speech.py out/fsdd runs

``out/fsdd`` is what examples/speech.py wrote, and ``runs`` has the trainings fit-0, white-0, fit-1, … as far as they
are there. Every measurement is stored in benchmarks/results/speech.json; what is there is not measured again.
"""

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import Results, ended, markdown, mean_and_spread
from torch import Tensor, nn

import nidiff
from nidiff.covariance.waves import Waves
from nidiff.data.dataset import Dataset
from nidiff.metrics import compare_fields

LENGTH, TAKES, NOISES, SEEDS = 4096, 2, ("fit", "white"), range(3)
SAMPLERS = ("dpmpp_2m:spacing=logsnr", "angle_2m:spacing=trailing", "ancestral:variance=gaussian")
STEPS, NOISE = (20,), 0.07  # the standard deviation of the noise to remove, as examples/speech.py adds it
FIGURES = Path(__file__).parents[2] / "docs/figures"
METRICS = ("spectrum", "values", "increments")
WORDS = ("7_jackson", "3_theo", "6_nicolas", "9_george")
NOBODY = -1  # the class of a clip of whose word nothing is known


def load(folder: Path) -> tuple[Dataset, Dataset, Tensor]:
    """The clips to train on, those to test with, and the first take of every word in babble."""
    train, test = (
        nidiff.load_dataset(folder / part, size=LENGTH, labels="data", scaling="standard") for part in ("train", "test")
    )
    assert train.class_names == test.class_names
    return train, test, nidiff.load_dataset(folder / "noisy", scaling="none").all()


# Which digit, and whose voice ---------------------------------------------------------------------------------------


class Listener(nn.Module):
    """A small convolutional network on log-spectrograms, with ten digits and the speakers as outputs."""

    def __init__(self, speakers: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(part for a, b in ((1, 16), (16, 32), (32, 64)) for part in layer(a, b)), nn.AdaptiveAvgPool2d((4, 4))
        )
        self.digit, self.speaker = nn.Linear(1024, 10), nn.Linear(1024, speakers)

    def forward(self, clips: Tensor) -> tuple[Tensor, Tensor]:
        """The scores [N, …] of clips [N, 1, L] in the units of the data."""
        waves = torch.stft(clips[:, 0], 256, 128, window=torch.hann_window(256), return_complex=True)
        power = nn.functional.avg_pool2d(waves[:, None, 1:].abs().square(), (4, 1))
        features = self.body(torch.log(0.01 + power) / 4).flatten(1)
        return self.digit(features), self.speaker(features)


def layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def answers(labels: Tensor, data: Dataset) -> tuple[Tensor, Tensor]:
    """The digit and the speaker of every label."""
    words = [data.class_names[label].split("_") for label in labels.tolist()]
    names = sorted({word.split("_")[1] for word in data.class_names})
    return torch.tensor([int(digit) for digit, _ in words]), torch.tensor([names.index(name) for _, name in words])


def listener(train: Dataset, epochs: int = 15) -> Listener:
    """Trained on real clips, moved in time, quieter or louder, and with a little noise."""
    torch.manual_seed(0)
    clips, (digits, speakers) = train.stored(torch.arange(len(train))), answers(train.labels, train)
    net = Listener(int(speakers.max()) + 1)
    steps = epochs * -(-len(clips) // 64)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        rows = torch.randint(len(clips), (64,))
        batch = torch.stack(
            [clip.roll(int(shift)) for clip, shift in zip(clips[rows], torch.randint(-600, 600, (64,)), strict=True)]
        )
        batch = batch * 2 ** torch.empty(64, 1, 1).uniform_(-1, 1)
        batch += 0.08 * 10 ** torch.empty(64, 1, 1).uniform_(-3, -1) * torch.randn_like(batch)
        scores = net(batch)
        loss = sum(nn.functional.cross_entropy(s, a[rows]) for s, a in zip(scores, (digits, speakers), strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net.eval()


@torch.no_grad()
def heard(net: Listener, clips: Tensor, labels: Tensor, data: Dataset) -> dict[str, float]:
    """The shares of clips whose digit and whose speaker are recognised."""
    return {
        name: (scores.argmax(1) == answer).double().mean().item()
        for name, scores, answer in zip(("digit", "speaker"), net(clips), answers(labels, data), strict=True)
    }


# Samples ------------------------------------------------------------------------------------------------------------


def drawn(
    denoiser: nidiff.Denoiser, train: Dataset, labels: Tensor, sampler: str, steps: int, guidance: float
) -> Tensor:
    """A clip of each label, in the units of the data."""
    parts = []
    for rows in torch.arange(len(labels)).split(100):
        bound = denoiser.given(class_labels=labels[rows])
        bound = bound if guidance == 1 else bound.guided(guidance)
        shape, seeds = (len(rows), 1, LENGTH), rows.tolist()
        parts.append(nidiff.sample(bound, shape, sampler=sampler, num_steps=steps, generator=seeds))
    return train.scaling.to_data(torch.cat(parts))


def quality(net: Listener, clips: Tensor, labels: Tensor, test: Dataset) -> dict[str, float]:
    real = test.stored(torch.arange(len(test)))
    errors = compare_fields(real, clips, grid=test.grid, boundary="reflecting", bootstrap=0)
    return heard(net, clips, labels, test) | {name: errors[name].value for name in METRICS}


def real_quality(net: Listener, train: Dataset, test: Dataset) -> dict[str, float]:
    """Of training clips, as many of each word, in place of samples; and what the classifier hears in the test clips."""
    rows = torch.cat([torch.nonzero(train.labels == label)[:TAKES, 0] for label in test.labels.unique()])
    errors = quality(net, train.stored(rows), train.labels[rows], test)
    return errors | heard(net, test.stored(torch.arange(len(test))), test.labels, test)


# Noise removed ------------------------------------------------------------------------------------------------------


def si_sdr(estimate: Tensor, truth: Tensor) -> Tensor:
    """10 log10 |α s|² / |α s − ŝ|² with α = ŝ·s / |s|², of every clip, in dB: no gain for a change of loudness."""
    target = truth * ((estimate * truth).sum(-1, keepdim=True) / truth.square().sum(-1, keepdim=True))
    return 10 * (target.square().sum(-1) / (target - estimate).square().sum(-1)).log10().flatten()


def short_time_wiener(y: Tensor, noise_power: Tensor, smoothing: float = 0.98) -> Tensor:
    """The filter of hearing aids (Ephraim and Malah 1984): Wiener's gain in windows of 32 ms, whose ratio of signal to
    noise follows the last window; ``noise_power`` [frequencies] of the windows is known."""
    window = torch.hann_window(256)
    waves = torch.stft(y[:, 0], 256, 64, window=window, return_complex=True)
    ratio = waves.abs().square() / noise_power[:, None]
    gains, last = [], torch.ones_like(ratio[..., 0])
    for now in ratio.unbind(-1):
        prior = (smoothing * last + (1 - smoothing) * (now - 1).clamp(min=0)).clamp(min=10**-2.5)
        gain = prior / (1 + prior)
        last = gain.square() * now
        gains.append(gain)
    return torch.istft(waves * torch.stack(gains, -1), 256, 64, window=window, length=y.shape[-1])[:, None]


def window_power(noise: Tensor) -> Tensor:
    waves = torch.stft(noise[:, 0], 256, 64, window=torch.hann_window(256), return_complex=True)
    return waves.abs().square().mean((0, 2))


def word_wiener(train: Dataset, labels: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """Wiener's filter where the spectrum of the word, as this speaker says it, is known, and that of the noise."""
    basis = nidiff.power_law((LENGTH,), exponent=1.0, boundary="reflecting").basis
    noise_power, gains = smooth_power(basis, noise), {}
    for label in labels.unique().tolist():
        power = smooth_power(basis, train.batch(torch.nonzero(train.labels == label)[:, 0]))
        gains[label] = power / (power + noise_power)
    return basis.synthesise(
        torch.stack([gains[label] for label in labels.tolist()])[:, None] * basis.analyse(y)
    ).float()


def smooth_power(basis: Waves, clips: Tensor) -> Tensor:
    """The mean power of the modes [L] of clips, and over 33 neighbours, 32 Hz."""
    power = basis.power(clips.double()).mean((0, 1))
    return nn.functional.avg_pool1d(power[None], 33, 1, 16, count_include_pad=False)[0]


@torch.no_grad()
def denoised(run: Path, train: Dataset, test: Dataset, noisy: Tensor | None) -> dict[str, float]:
    """SI-SDR in dB of every way to remove the noise of ``noisy`` or, without it, Gaussian noise of the model's Σ: means
    over the first take of every word."""
    rows = torch.tensor([int(torch.nonzero(test.labels == label)[0]) for label in test.labels.unique()])
    labels = test.labels[rows]
    denoiser = nidiff.load_model(run)
    covariance, gaussian = denoiser.process.covariance, denoiser.gaussian
    x0 = train.scaling.to_model(test.stored(rows))
    generator = torch.Generator().manual_seed(1)
    gaussian_noise = covariance.sample((500, 1, LENGTH), generator)
    size = NOISE / train.scaling.scale[0]
    y = x0 + size * gaussian_noise[: len(rows)] if noisy is None else train.scaling.to_model(noisy)
    level = denoiser.process.schedule.level_with_noise(size)
    x = level.signal * y
    found = {
        "noisy": y,
        "wiener": gaussian.denoiser(denoiser.process)(x, level),
        "wiener of the word": word_wiener(train, labels, y.double(), size * gaussian_noise),
        "short-time wiener": short_time_wiener(y, size**2 * window_power(gaussian_noise)),
    }
    nobody = torch.full_like(labels, NOBODY)
    for name, classes in (("", nobody), (" of the word", labels)):
        found[f"network{name}"] = denoiser.given(class_labels=classes)(x, level)
    samples = nidiff.sample(
        denoiser.given(class_labels=nobody.repeat_interleave(4)),
        (4 * len(rows), 1, LENGTH),
        sampler="ancestral:variance=gaussian",
        num_steps=10,
        start=y.repeat_interleave(4, 0),
        level=level,
        generator=range(4 * len(rows)),
    ).unflatten(0, (-1, 4))
    found |= {"mean of 4 samples": samples.mean(1), "sample": samples[:, 0]}
    return {name: si_sdr(estimate, x0).mean().item() for name, estimate in found.items()}


@torch.no_grad()
def shown(runs: Path, train: Dataset, test: Dataset, noisy: Tensor, results: Results) -> dict[str, Any]:
    """The clips of the figure as 16-bit numbers: recordings and samples of four words, and one clip in babble."""
    labels = torch.tensor([test.class_names.index(word) for word in WORDS])
    takes = torch.tensor([int(torch.nonzero(test.labels == label)[1]) for label in labels])
    rows = [test.stored(takes)]
    for noise in NOISES:
        denoiser, sampler = nidiff.load_model(runs / f"{noise}-0"), best(results, noise, STEPS[0])
        rows.append(drawn(denoiser, train, labels, sampler, STEPS[0], 2))
    denoiser, size, word = nidiff.load_model(runs / "fit-0"), NOISE / train.scaling.scale[0], int(labels[0])
    level = denoiser.process.schedule.level_with_noise(size)
    y = train.scaling.to_model(noisy[word : word + 1])
    clean = test.stored(torch.nonzero(test.labels == word)[:1, 0])
    network = denoiser.given(class_labels=NOBODY)(level.signal * y, level)
    power = window_power(denoiser.process.covariance.sample((500, 1, LENGTH), torch.Generator().manual_seed(1)))
    filtered = [train.scaling.to_data(x) for x in (short_time_wiener(y, size**2 * power), network)]
    rows.append(torch.cat([noisy[word : word + 1], *filtered, clean]))
    clips = (torch.stack(rows)[:, :, 0].clamp(-1, 1) * 32767).round().to(torch.int16)
    return {"clips": clips.numpy(), "words": WORDS}


# All of it ----------------------------------------------------------------------------------------------------------


def measure(runs: Path, train: Dataset, test: Dataset, noisy: Tensor, results: Results) -> None:
    file = runs / "listener.pt"
    if not file.exists():
        torch.save(listener(train).state_dict(), file)
    net = Listener(len(set(answers(train.labels, train)[1].tolist())))
    net.load_state_dict(torch.load(file, weights_only=True))
    net.eval()
    results.measured("real", lambda: real_quality(net, train, test))
    for seed in SEEDS:
        for noise in NOISES:
            if ended(runs / f"{noise}-{seed}"):
                measure_run(runs, noise, seed, net, train, test, noisy, results)


def measure_run(
    runs: Path, noise: str, seed: int, net: Listener, train: Dataset, test: Dataset, noisy: Tensor, results: Results
) -> None:
    run, labels = runs / f"{noise}-{seed}", torch.arange(len(test.class_names)).repeat(TAKES)
    denoiser = nidiff.load_model(run)

    def trial(sampler: str, steps: int, guidance: float) -> dict[str, float]:
        return quality(net, drawn(denoiser, train, labels, sampler, steps, guidance), labels, test)

    def trials(sampler: str, steps: int, guidance: float) -> None:
        name = f"{noise}-{seed} {sampler} {steps} guidance {guidance:g}"
        results.measured(name, partial(trial, sampler, steps, guidance))

    for steps in STEPS:
        for sampler in SAMPLERS if seed == 0 else [best(results, noise, steps)]:
            trials(sampler, steps, 1)
    trials(best(results, noise, STEPS[-1]), STEPS[-1], 2)
    for kind, clips in {"babble": noisy, "gaussian": None}.items():
        if noise == "fit" or kind == "gaussian":
            results.measured(f"{noise}-{seed} denoise {kind}", partial(denoised, run, train, test, clips))


def best(results: Results, noise: str, steps: int) -> str:
    """The sampler of seed 0 whose words are recognised most often; of a tie, the one with the better spectrum."""

    def rank(sampler: str) -> tuple[float, float]:
        found: Mapping[str, float] = results.values.get(f"{noise}-0 {sampler} {steps} guidance 1", {})
        return found.get("digit", -1.0), -found.get("spectrum", 0.0)

    return max(SAMPLERS, key=rank)


def tables(results: Results) -> str:
    """The tables of the page: means over trainings."""
    keys = ("digit", "speaker", *METRICS)
    rows = [["real clips", *(f"{results.values['real'][key]:.3f}" for key in keys)]]
    for noise in NOISES:
        for steps, guidance in ((STEPS[0], 1), (STEPS[0], 2)):
            sampler = best(results, noise, steps)
            names = [f"{noise}-{seed} {sampler} {steps} guidance {guidance}" for seed in SEEDS]
            found = [results.values[name] for name in names if name in results.values]
            if found:
                about = f"{noise}, {steps} steps of {sampler}, guidance {guidance}"
                rows.append([about, *(mean_and_spread([one[key] for one in found]) for key in keys)])
    text = markdown(["", *keys], rows)
    columns = ("fit {} denoise babble", "fit {} denoise gaussian", "white {} denoise gaussian")
    found = {c: [v for s in SEEDS if (v := results.values.get(c.format(s).replace(" ", "-", 1)))] for c in columns}
    ways = list(found[columns[1]][0]) if found[columns[1]] else []
    lines = [
        [way, *(mean_and_spread([v[way] for v in found[c]], 1) if found[c] else "" for c in columns)] for way in ways
    ]
    return text + "\n\n" + markdown(["", *(c.replace(" {} denoise", ",") for c in columns)], lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    stored = Results("speech")
    data = load(Path(sys.argv[1]))
    measure(Path(sys.argv[2]), *data, stored)
    if all(ended(Path(sys.argv[2]) / f"{noise}-0") for noise in NOISES):
        np.savez_compressed(FIGURES / "speech.npz", **shown(Path(sys.argv[2]), *data, stored))
    print(tables(stored))
