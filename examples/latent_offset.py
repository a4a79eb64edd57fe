"""Offset noise in the latents of a text-to-image model, in training and in sampling: python examples/latent_offset.py

Stable Diffusion is often fine-tuned with offset noise, randn(4, H, W) + s · randn(4, 1, 1), so that it can make dark
and bright images. Its pipeline then starts from randn alone. But the noise of training has a covariance, Σ = I + s² 11ᵀ
per channel: the mean of a latent channel of N numbers has the variance (1 + s² N) / N in training, and 1/N where
sampling starts. For Gaussian latents the deterministic samplers are linear maps, so that the mean of a channel then
varies too little by √(1 + s² N): 6.5 for s = 0.1 and the 64×64 latents of Stable Diffusion; here, too, for s = 0.8.

With Σ = nidiff.offset(…) in the loss and in the scheduler, training and sampling agree. All parts are tiny: a VAE, a
U-Net with cross-attention, and random embeddings in the place of a text encoder; replace them by those of your model.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

import nidiff
from nidiff.interop import NonIsotropicPipeline
from nidiff.report.contact import save_panels

DIGITS, TONE = nidiff.load_dataset("digits"), 0.7
SIGMA = nidiff.offset((8, 8), strength=0.8, normalize=False)  # over the latent grid
PROMPTS = torch.randn(10, 2, 16, generator=torch.Generator().manual_seed(0))  # "a zero", "a one", … as embeddings
TEXT = nidiff.Condition(shape=(2, 16), null=0, dropout=0.1)  # null is the embedding of no text: zeros


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits in faint ink on 16×16 paper of any tone, and the embeddings of their names."""
    index = torch.randint(len(DIGITS), (count,))
    paper = TONE * (2 * torch.rand(count, 1, 1, 1) - 1) + (1 - TONE) * DIGITS.batch(index)
    return torch.nn.functional.interpolate(paper, scale_factor=2), PROMPTS[DIGITS.labels[index]]


def minimize(loss, parameters, steps: int) -> None:
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        decay.step()


def train_vae(steps: int) -> AutoencoderKL:
    """Images [1, 16, 16] to latents [4, 8, 8], of variance 1 after ``scaling_factor``."""
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    vae = AutoencoderKL(1, 1, **blocks, block_out_channels=(16, 16), norm_num_groups=4, mid_block_add_attention=False)

    def loss() -> torch.Tensor:
        images, law = (x := batch(32)[0]), vae.encode(x).latent_dist
        return (vae.decode(law.sample()).sample - images).square().mean() + 1e-5 * law.kl().mean()

    minimize(loss, vae.parameters(), steps)
    vae.register_to_config(scaling_factor=1 / encode(vae, batch(256)[0]).std().item() * vae.config.scaling_factor)
    return vae.eval()


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    return vae.encode(images).latent_dist.sample() * vae.config.scaling_factor


def train_unet(vae: AutoencoderKL, steps: int) -> nidiff.Denoiser:
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    sizes = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 16}
    net = UNet2DConditionModel(8, 4, 4, down_block_types=down, up_block_types=up, attention_head_dim=4, **sizes)
    conditions = {"encoder_hidden_states": TEXT}
    denoiser = nidiff.Denoiser(net, nidiff.Process("ddpm_linear", SIGMA), "v", conditions=conditions)

    def loss() -> torch.Tensor:
        images, text = batch(64)
        text = torch.where(torch.rand(64, 1, 1) < TEXT.dropout, 0.0, text)
        conditional = denoiser.given(encoder_hidden_states=text)
        return nidiff.denoising_loss(conditional, encode(vae, images), weighting="target").mean()

    minimize(loss, net.parameters(), steps)
    net.eval()
    return denoiser


@torch.no_grad()
def main(out: Path = Path("out"), vae_steps: int = 300, steps: int = 400, count: int = 300) -> dict[str, float]:
    """The standard deviation of brightness over images: of the data, and sampled from N(0, Σ) and from N(0, I); in the
    last two rows with the exact denoiser of Gaussian latents in place of the network."""
    torch.manual_seed(0)
    with torch.enable_grad():
        vae = train_vae(vae_steps)
        denoiser = train_unet(vae, steps)
    nidiff.save_model(denoiser, out / "latent_offset")  # Σ and the conditions are saved with the network
    pipeline = NonIsotropicPipeline.from_pretrained(out / "latent_offset")
    pipeline.set_progress_bar_config(disable=True)
    images, text = batch(count)
    samples = pipeline(seeds=range(count), encoder_hidden_states=text, guidance_scale=2.0, output_type="latent").images
    white = torch.randn(samples.shape)  # what StableDiffusionPipeline draws without latents=
    guided = denoiser.given(encoder_hidden_states=text).guided(2.0)
    exact = nidiff.fit_gaussian(encode(vae, batch(2000)[0]), channels="cross").denoiser(denoiser.process)
    latents = {
        "data": encode(vae, images),
        "its own Σ": samples,
        "white start": nidiff.sample(guided, samples.shape, start=white),
        "Gaussian, its own Σ": nidiff.sample(exact, samples.shape),
        "Gaussian, white start": nidiff.sample(exact, samples.shape, start=white),
    }
    panels = {name: vae.decode(x / vae.config.scaling_factor).sample.clamp(-1, 1) for name, x in latents.items()}
    spreads = {name: x.mean((1, 2, 3)).std().item() for name, x in panels.items()}
    for name, spread in spreads.items():
        print(f"{name}: standard deviation of brightness {spread:.3f}")
    save_panels(out / "latent_offset.png", panels)
    return spreads


if __name__ == "__main__":
    main()
