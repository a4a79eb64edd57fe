"""Posterior samples of Lévy processes, whose posterior is known: the gap to the least error, and coverage.

    python benchmarks/posterior_levy.py              # with the exact denoiser: about ten minutes
    python benchmarks/posterior_levy.py --train      # with networks, three trainings each

The benchmark of Zach, Dong, Bohra and Unser (ICLR 2026), written anew. A signal is the running sum of 64 independent
increments (Gauss, Laplace, Student, or Bernoulli–Laplace: mostly 0), of mean variance 1; it is seen as it is, through a
blur, at every fourth place, or by a quarter of its cosines, with noise. All four laws are mixtures of Gaussians over
a variance v, here at 80 values, so that a Gibbs sampler that draws one v after the other, with the signal integrated
out, is the gold standard; the exact denoiser has the same v.

Under Σ ∝ C, noise that is a random walk too, the increments of x are independent: E[x0 | x] is a function of one number
per increment, a table. Under white noise it is not, so there are trained networks for both.
"""

import argparse
import math
import warnings
from functools import cache

import torch
from stories.results import Results, markdown, mean_and_spread
from torch import Tensor

import nidiff
from nidiff import operators as op
from nidiff.inverse.scores import covered
from nidiff.sampling.particles import sample_particles
from nidiff.testing.problems import uniform_in_logsnr

SIZE, SIGNALS, SAMPLES, STEPS, NOISE = 64, 48, 39, 40, 0.1
SWEEPS, BURN = 240, 60
LAWS = ("gauss", "laplace", "student", "bernoulli-laplace")
TASKS = ("identity", "convolution", "subsampling", "fourier")
SETTINGS = {
    "gaussian": ("gaussian",),
    "mmps": ("mmps:iterations=5", "mmps:iterations=20"),
    "tmpd": ("tmpd",),
    "pigdm": tuple(f"pigdm:scale={scale}" for scale in (0.1, 0.3, 1.0, 3.0, 10.0)),
    "dps": tuple(f"dps:scale={scale}" for scale in (0.01, 0.03, 0.1, 0.3, 1.0)),
    "diffpir": tuple(f"diffpir:weight={weight}" for weight in (0.3, 1.0, 3.0, 10.0, 30.0)),
    "particles": ("particles",),
}
SAMPLER = {
    "dps": "ancestral",
    "pigdm": "ancestral",
    "diffpir": "diffpir:zeta=0.3",
}  # others: ancestral:variance=gaussian


def variances(law: str) -> tuple[Tensor, Tensor]:
    """Values of v and their probabilities: u ~ N(0, v) has the law of an increment, of variance 1."""
    if law == "gauss":
        return torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    share = (torch.arange(80, dtype=torch.float64) + 0.5) / 80
    if law == "student":  # 3 degrees of freedom: v = 3/χ²_3, at quantiles that are denser in the tail
        share = 1 - (1 - share) ** 3
        edges = 1 - (1 - torch.linspace(0, 1, 81, dtype=torch.float64)) ** 3
        grid = torch.linspace(1e-4, 60, 600_000, dtype=torch.float64)
        chi = (grid.sqrt() * (-grid / 2).exp()).cumsum(0)
        quantile = grid[torch.searchsorted(chi / chi[-1], 1 - share).clamp(max=len(grid) - 1)]
        values, weights = 3 / quantile, edges.diff()
    else:  # Laplace: v is exponential; of Bernoulli–Laplace 0 with probability 0.9
        edges = 1 - (1 - torch.linspace(0, 1, 81, dtype=torch.float64)) ** 2
        values, weights = -(1 - (1 - (1 - share) ** 2)).log(), edges.diff()
        if law == "bernoulli-laplace":
            values = torch.cat([torch.tensor([1e-6], dtype=torch.float64), values])
            weights = torch.cat([torch.tensor([0.9], dtype=torch.float64), 0.1 * weights])
    weights = weights / weights.sum()
    return values / (values * weights).sum(), weights


# A signal is x = L u: the running sum, of mean variance 1.
WALK = torch.ones(SIZE, SIZE, dtype=torch.float64).tril()
WALK = WALK / (WALK @ WALK.T).diagonal().mean().sqrt()


def signals(law: str, count: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    values, weights = variances(law)
    chosen = torch.multinomial(weights, count * SIZE, replacement=True, generator=source).reshape(count, SIZE)
    u = values[chosen].sqrt() * torch.randn(count, SIZE, generator=source, dtype=torch.float64)
    return (u @ WALK.T)[:, None]


def operator(task: str) -> op.Operator:
    if task == "identity":
        return op.mask(torch.ones(SIZE))
    if task == "convolution":
        return op.blur(2.0)
    if task == "subsampling":
        return op.subsample(4)
    kept = torch.zeros(SIZE, dtype=torch.bool)
    kept[:6] = True
    kept[6 + torch.randperm(SIZE - 6, generator=torch.Generator().manual_seed(1))[: SIZE // 4 - 6]] = True
    return op.waves(kept, "reflecting")


def observed(law: str, task: str) -> tuple[Tensor, Tensor]:
    x0 = signals(law, SIGNALS, 10_000)
    y = operator(task)(x0)
    return x0, y + NOISE * torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)


def gibbs(law: str, task: str, y: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior mean [B, SIZE], by its expectation given v, and as many draws as others have."""
    source = torch.Generator().manual_seed(3)
    values, weights = variances(law)
    unit = torch.eye(SIZE, dtype=torch.float64)
    rows = operator(task)((unit @ WALK.T)[:, None]).flatten(1)  # of increment k: H_k
    batch, flat = len(y), y.flatten(1)
    chosen = torch.multinomial(weights, batch * SIZE, replacement=True, generator=source)
    v = values[chosen].reshape(batch, SIZE)
    total, draws = torch.zeros(batch, SIZE, dtype=torch.float64), []
    at = torch.linspace(BURN, SWEEPS - 1, SAMPLES).long().tolist()
    for sweep in range(SWEEPS):
        inverse = torch.linalg.inv(
            torch.einsum("km,bk,kn->bmn", rows, v, rows) + NOISE**2 * torch.eye(rows.shape[1], dtype=torch.float64)
        )
        for k in range(SIZE if len(values) > 1 else 0):
            column = inverse @ rows[k]
            inside, along = column @ rows[k], (column * flat).sum(1)
            rest = 1 - v[:, k] * inside  # without k: S⁻¹ + S⁻¹ h hᵀ S⁻¹ v / (1 − v q)
            q, r = inside / rest, along / rest
            loads = 1 + values * q[:, None]
            logs = weights.log() - 0.5 * loads.log() + 0.5 * values * r[:, None] ** 2 / loads
            new = values[torch.multinomial(logs.softmax(1), 1, generator=source)[:, 0]]
            change = new - v[:, k]
            inverse = inverse - (change / (1 + change * inside))[:, None, None] * column[:, :, None] * column[:, None]
            v[:, k] = new
        mean = v * (torch.einsum("bmn,bn->bm", inverse, flat) @ rows.T)
        if sweep >= BURN:
            total += mean
        if sweep in at:
            u = v.sqrt() * torch.randn(v.shape, generator=source, dtype=v.dtype)
            noise = NOISE * torch.randn(flat.shape, generator=source, dtype=v.dtype)
            left = torch.einsum("bmn,bn->bm", inverse, flat - u @ rows - noise)
            draws.append((u + v * (left @ rows.T)) @ WALK.T)
    return total / (SWEEPS - BURN) @ WALK.T, torch.stack(draws)


# Denoisers ----------------------------------------------------------------------------------------------------------

DATA = nidiff.Dense(WALK @ WALK.T)
GAUSSIAN = nidiff.GaussianModel(torch.zeros(1, SIZE), DATA)
SCHEDULE = uniform_in_logsnr(STEPS, "variance", -9.0, 9.0)


class Tables(torch.nn.Module):
    """The exact denoiser under Σ ∝ C: of the increments of x, one function for each level."""

    def __init__(self, law: str) -> None:
        super().__init__()
        values, weights = variances(law)
        self.grid = torch.sinh(torch.linspace(-9, 9, 8001, dtype=torch.float64)) / 50
        self.unwalk = torch.linalg.inv(WALK)
        self.tables = []
        for row in range(len(SCHEDULE)):
            signal, sigma = float(SCHEDULE.level(row).signal), float(SCHEDULE.level(row).sigma)
            total = signal**2 * values + sigma**2
            logs = weights.log() - 0.5 * total.log() - 0.5 * self.grid[:, None] ** 2 / total
            gain = (logs.softmax(1) * (signal * values / total)).sum(1)
            self.tables.append(gain * self.grid)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        u = x.double() @ self.unwalk.T
        table, inside = self.tables[int(label[0])], u.detach().clamp(self.grid[0], self.grid[-1])
        right = (((50 * inside).asinh() + 9) / 18 * (len(self.grid) - 1)).long().clamp(0, len(self.grid) - 2) + 1
        low, high = self.grid[right - 1], self.grid[right]
        slope = (table[right] - table[right - 1]) / (high - low)
        return ((table[right - 1] + slope * (u - low)) @ WALK.T).to(x)


class Network(torch.nn.Module):
    """Convolutions along the signal, as wide as it is."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.time = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.SiLU(), torch.nn.Linear(width, 6 * width))
        self.first = torch.nn.Conv1d(2, width, 5, padding=2)
        self.layers = torch.nn.ModuleList(
            torch.nn.Conv1d(width, width, 5, padding=2 * gap, dilation=gap) for gap in (1, 2, 4, 8, 4, 1)
        )
        self.last = torch.nn.Conv1d(width, 1, 5, padding=2)
        torch.nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        place = torch.linspace(-1, 1, x.shape[-1]).to(x).expand(len(x), 1, -1)
        waves = (label[:, None] / STEPS * math.pi * torch.arange(1, 5).to(x)).to(x)
        shifts = self.time(torch.cat([waves.sin(), waves.cos()], 1)).chunk(6, 1)
        h = self.first(torch.cat([x, place], 1))
        for layer, shift in zip(self.layers, shifts, strict=True):
            h = h + torch.nn.functional.silu(layer(h + shift[:, :, None]))
        return self.last(h)


# Measurements -------------------------------------------------------------------------------------------------------


def scores(draws: Tensor, mean: Tensor, x0: Tensor, best: Tensor, count: float = math.inf) -> dict[str, float]:
    """Of draws [S, B, SIZE]: how far their mean is from the gold standard's, and how often 90 % intervals cover. What
    chance makes of a mean of ``count`` draws is subtracted."""
    least, chance = (best - x0).square().mean(), draws.var(0).mean() / count
    gap = 10 * math.log10(((mean - x0).square().mean() - chance).clamp(min=1e-30) / least)
    missed = (((mean - best).square().mean() - chance) / least).item()
    return {"gap in dB": gap, "excess": missed, "coverage": covered(draws, x0).double().mean().item()}


def measure(denoiser: nidiff.Denoiser, setting: str, law: str, task: str, best: Tensor) -> dict[str, float]:
    x0, y = observed(law, task)
    observation = nidiff.Observation(y, operator(task), NOISE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if setting == "particles":
            found = sample_particles(denoiser, observation, 128, generator=0, dtype=torch.float64)
            draws = found.resampled(1).transpose(0, 1)[:SAMPLES, :, 0]
            mean = torch.einsum("bp,bpcn->bn", found.weights, found.x)
            effective = {"effective": found.effective.mean().item() / 128}
            count = (1 / found.weights.square().sum(1)).mean().item()
        else:
            rows = torch.arange(SIGNALS).repeat(SAMPLES)
            given = nidiff.posterior(denoiser, observation.for_images(rows), setting)
            sampler = SAMPLER.get(setting.partition(":")[0], "ancestral:variance=gaussian")
            try:
                draws = nidiff.sample(
                    given, (len(rows), 1, SIZE), sampler=sampler, num_steps=STEPS, generator=0, dtype=torch.float64
                )
            except nidiff.InputError:  # it diverged
                return {"gap in dB": math.inf, "excess": math.inf, "coverage": 0.0}
            draws, effective = draws.reshape(SAMPLES, SIGNALS, SIZE), {}
            mean, count = draws.mean(0), SAMPLES
    return {**scores(draws, mean, x0[:, 0], best, count), **effective}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", nargs="+", default=LAWS, choices=LAWS)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--train", action="store_true", help="measure networks, of both kinds of noise")
    parser.add_argument("--steps", type=int, default=1500, help="of training")
    parser.add_argument("--table", action="store_true", help="print what is measured, and measure nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("posterior_levy")
    for law in arguments.laws:
        for task in () if arguments.table else arguments.tasks:
            compare(results, law, task, arguments.steps if arguments.train else None)
    print(table(results))


def compare(results: Results, law: str, task: str, steps: int | None) -> None:
    """Measure what is not known of one problem: with the exact denoiser, or with networks trained for so many steps."""
    key = f"{law}, {task}"
    if steps is None:
        cases = [(f"{key}, exact, {setting}", None, setting) for each in SETTINGS.values() for setting in each]
    else:
        nets = [(noise, seed) for noise in ("white", "matched") for seed in range(3)]
        cases = [(f"{key}, {noise} {seed}, gaussian", (noise, seed), "gaussian") for noise, seed in nets]
    if f"{key}, gold" in results.values and all(name in results.values for name, *_ in cases):
        return
    x0, y = observed(law, task)
    best, draws = gibbs(law, task, y)
    results.measured(f"{key}, gold", lambda: scores(draws, best, x0[:, 0], best))
    for name, net, setting in cases:

        def found(net=net, setting=setting) -> dict[str, float]:
            denoiser = exact(law) if net is None else trained(law, *net, steps or 1)
            return measure(denoiser, setting, law, task, best)

        print(name, results.measured(name, found), flush=True)


@cache
def trained(law: str, noise: str, seed: int, steps: int) -> nidiff.Denoiser:
    torch.manual_seed(seed)
    process = nidiff.Process(SCHEDULE, nidiff.Identity((SIZE,)) if noise == "white" else DATA)
    net = Network()
    denoiser = nidiff.Denoiser(net, process, "residual", gaussian=GAUSSIAN)
    optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for step in range(steps):
        x0 = signals(law, 128, 1_000_000 * (seed + 1) + step).float()
        loss = nidiff.denoising_loss(denoiser, x0).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
    return denoiser.eval().requires_grad_(False)


@cache
def exact(law: str) -> nidiff.Denoiser:
    return nidiff.Denoiser(Tables(law), nidiff.Process(SCHEDULE, DATA), "x0", gaussian=GAUSSIAN)


def table(results: Results) -> str:
    """The gap in dB and the coverage in per cent, of every method at the setting of least error."""
    rows = []
    for law in LAWS:
        gold = [results.values.get(f"{law}, {task}, gold") for task in TASKS]
        cells = [f"0 / {100 * each['coverage']:.1f}" if each else "–" for each in gold]
        rows.append(["Gibbs sampling", law, *cells])
    for method, settings in SETTINGS.items():
        for law in LAWS:
            cells = []
            for task in TASKS:
                found = [results.values.get(f"{law}, {task}, exact, {setting}") for setting in settings]
                if all(each is not None for each in found):
                    best = min(found, key=lambda each: abs(each["excess"]))  # type: ignore[index, return-value]
                    cells.append(f"{best['gap in dB']:.2f} / {100 * best['coverage']:.1f}")  # type: ignore[index]
                else:
                    cells.append("–")
            rows.append([method, law, *cells])
    for noise in ("white", "matched"):
        for law in LAWS:
            cells = []
            for task in TASKS:
                found = [results.values.get(f"{law}, {task}, {noise} {seed}, gaussian") for seed in range(3)]
                each = [one for one in found if one is not None]
                gap = mean_and_spread([one["gap in dB"] for one in each], 2) if each else "–"
                share = mean_and_spread([100 * one["coverage"] for one in each], 1) if each else ""
                cells.append(f"{gap} / {share}" if each else "–")
            if set(cells) != {"–"}:
                rows.append([f"gaussian, trained, {noise} noise", law, *cells])
    return markdown(["method", "increments", *TASKS], rows)


if __name__ == "__main__":
    main()
