"""diffusers' LoRA training loop for Stable Diffusion, three lines changed: python examples/lora_training.py

The scheduler has the configuration of Stable Diffusion 1.5, and its latents come in two shapes, as from a bucketed data
set. U-Net and text are tiny: a network of digits on grey paper, and an embedding for each name of a digit. The LoRA
learns paper of any tone, with offset noise in training and in sampling.
"""

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import Attention

import nidiff
from nidiff.interop import NonIsotropicScheduler

STABLE = {"_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
STABLE |= {"num_train_timesteps": 1000, "skip_prk_steps": True, "steps_offset": 1, "clip_sample": False}
DIGITS = nidiff.load_dataset("digits")
TEXT = torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(0))  # "a zero", "a one", …
BUCKETS = (0, 2)  # columns of paper on both sides of 8×8


def batch(count: int, tone: float, margin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits in faint ink on paper of any tone up to ``tone``, and the embeddings of their names."""
    index = torch.randint(len(DIGITS), (count,))
    ink = F.pad(DIGITS.batch(index), (margin, margin), value=-1.0)
    return tone * (2 * torch.rand(count, 1, 1, 1) - 1) + 0.3 * ink, TEXT[DIGITS.labels[index]]


class LoRA(torch.nn.Module):
    """A linear layer that stays, and a change of low rank that is learnt."""

    def __init__(self, layer: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def add_lora(unet: UNet2DConditionModel, rank: int = 16) -> list[torch.nn.Parameter]:
    """LoRA on the projections of every attention, and its parameters."""
    unet.requires_grad_(False)
    for attention in [each for each in unet.modules() if isinstance(each, Attention)]:
        for name in ("to_q", "to_k", "to_v"):
            setattr(attention, name, LoRA(getattr(attention, name), rank))
        attention.to_out[0] = LoRA(attention.to_out[0], rank)
    return [each for each in unet.parameters() if each.requires_grad]


def train(unet, noise_scheduler, parameters, steps: int, tone: float) -> None:
    """The loop of diffusers' scripts."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for step in range(steps):
        latents, encoder_hidden_states = batch(64, tone, BUCKETS[step % 2])
        noise = torch.randn_like(latents)  # changed: without noise += 0.8 * torch.randn(len(noise), 1, 1, 1)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),))
        noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
        model_pred = unet(noisy_latents, timesteps, encoder_hidden_states, return_dict=False)[0]
        loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")
        loss.backward()
        optimizer.step()
        decay.step()
        optimizer.zero_grad()


@torch.no_grad()
def sample(unet, scheduler, latents: torch.Tensor) -> torch.Tensor:
    """The loop of a pipeline, 20 steps."""
    prompt_embeds = TEXT[torch.arange(len(latents)) % 10]
    scheduler.set_timesteps(20)
    for t in scheduler.timesteps:
        noise_pred = unet(scheduler.scale_model_input(latents, t), t, prompt_embeds).sample
        latents = scheduler.step(noise_pred, t, latents, return_dict=False)[0]
    return latents


def main(steps: int = 300, lora_steps: int = 400, count: int = 300) -> dict[str, float]:
    """The standard deviation of brightness over images, at both shapes: of the data and of what is sampled."""
    torch.manual_seed(0)
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 16}
    down, up = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
    unet = UNet2DConditionModel(8, 1, 1, down_block_types=down, up_block_types=up, attention_head_dim=4, **sizes)
    train(unet, DDPMScheduler.from_config(STABLE), unet.parameters(), steps, tone=0.0)  # "Stable Diffusion"

    # noise_scheduler = DDPMScheduler.from_config(STABLE)
    offset = nidiff.offset((8, 8), strength=0.8, normalize=False)
    noise_scheduler = NonIsotropicScheduler.from_config(STABLE, covariance=offset, algorithm="dpmsolver++")  # changed
    train(unet, noise_scheduler, add_lora(unet), lora_steps, tone=0.7)

    spreads = {}
    for margin in BUCKETS:
        shape = (count, 1, 8, 8 + 2 * margin)
        white = torch.randn(shape)
        latents = noise_scheduler.init_noise(shape)  # changed: torch.randn(shape)
        made = {"data": batch(count, 0.7, margin)[0], "own Σ": sample(unet, noise_scheduler, latents)}
        made["white start"] = sample(unet, noise_scheduler, white)  # which warns, the first time
        spreads |= {f"{name}, {shape[-2]}×{shape[-1]}": x.mean((1, 2, 3)).std().item() for name, x in made.items()}
    for name, spread in spreads.items():
        print(f"{name}: standard deviation of brightness {spread:.3f}")
    return spreads


if __name__ == "__main__":
    main()
