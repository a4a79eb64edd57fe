"""Training that can be compared: what step k draws depends on the seed and on k alone, whatever is trained."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

import nidiff
from nidiff.randomness import mixed_seed
from nidiff.training.draws import image_indices

LEARNING_RATE, WARM_UP, EMA, CLIP = 2e-3, 100, 0.995, 1.0
COLOUR = {"v": -0.25, "residual": 0.25}  # the power of Σ on the errors


def train(denoiser: nidiff.Denoiser, data: Tensor, *, steps: int, batch: int, seed: int) -> dict[str, Any]:
    """Train ``denoiser.net`` and leave the moving average of its weights in it; returns what happened.

    AdamW, whose rate rises over 100 steps and falls to 0 over the second half.
    """
    net = denoiser.net.train()
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0, fused=True)
    losses, begin = [], time.process_time()
    for step in tqdm(range(steps), disable=None):
        x0 = data[image_indices(seed, len(data), step * batch, batch)]
        loss = training_loss(denoiser, x0, torch.Generator().manual_seed(mixed_seed(seed, step))).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP, (steps - step) / (steps // 2))
        optimizer.step()
        optimizer.zero_grad()
        decay = min(EMA, (step + 1) / (step + 10))
        torch._foreach_lerp_([*average.parameters()], [*net.parameters()], 1 - decay)
        losses.append(loss.detach())
    net.load_state_dict(average.state_dict())
    net.eval()
    last = torch.stack(losses[-max(1, steps // 10) :])
    return {"loss": last.mean().item(), "processor_seconds": round(time.process_time() - begin, 1)}


def training_loss(denoiser: nidiff.Denoiser, x0: Tensor, generator: torch.Generator) -> Tensor:
    """The mean squared error per image of what the network says, of v and of the residual a little coloured.

    With white Σ it is plain. With coloured Σ the error of v hardly sees fine modes; in that of Σ^-½ v, or of the
    residual, which are about white, each mode counts the same, and the many fine ones, about Gaussian, leave nothing
    for the others. So the errors are those of Σ^-¼ v and of Σ^¼ F.
    """
    process, target = denoiser.process, denoiser.target
    level = process.schedule.draw(len(x0), generator)
    eps = torch.randn(x0.shape, generator=generator)
    output = denoiser.output(process.perturb(x0, level, eps), level)
    told = level if denoiser.target_name == "residual" else level.like(x0)
    error = output - target.encode(x0, eps, told, process.covariance)
    if denoiser.target_name in COLOUR:
        error = process.covariance.power(error, COLOUR[denoiser.target_name])
    return error.square().flatten(1).mean(1)


def trained(denoiser: nidiff.Denoiser, data: Tensor, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The weights and what is told of them from ``folder``; without them there, train and save."""
    weights, told = folder / "weights.safetensors", folder / "training.json"
    if told.is_file():
        found: dict[str, Any] = json.loads(told.read_text())
        if found["settings"] != settings:
            raise SystemExit(f"{folder} was trained with {found['settings']}, not {settings}: remove it.")
        denoiser.net.load_state_dict(load_file(weights))
        denoiser.net.eval()
        return found
    result = {"settings": settings, **train(denoiser, data, **settings)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(denoiser.net.state_dict(), weights)
    told.write_text(json.dumps(result, indent=2) + "\n")
    return result
