"""diffusers' unconditional training example with two lines changed: python examples/diffusers_training.py"""

from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.optimization import get_scheduler
from torch.utils.data import DataLoader

import nidiff
from nidiff.evaluation.classifier import recognised, train_classifier
from nidiff.interop import NonIsotropicPipeline, NonIsotropicScheduler
from nidiff.model.network import unet2d


def main(out: Path = Path("out/diffusers"), epochs: int = 60, count: int = 300) -> float:
    """Train, save and sample; the share of images that a classifier of digits names with a probability above 0.9."""
    torch.manual_seed(0)
    digits = nidiff.load_dataset("digits")
    images = digits.batch(torch.arange(len(digits)))
    dataloader = DataLoader(images, batch_size=128, shuffle=True)

    model = unet2d((1, 8, 8), layers=1)  # a diffusers UNet2DModel
    # noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    noise_scheduler = NonIsotropicScheduler(nidiff.gaussian_free_field((8, 8)))  # changed
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=len(dataloader) * epochs)

    for _ in range(epochs):
        for clean_images in dataloader:
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean_images),))
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            loss = F.mse_loss(model(noisy_images, timesteps).sample, noise)
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

    # pipeline = DDPMPipeline(unet=model, scheduler=noise_scheduler)
    pipeline = NonIsotropicPipeline(unet=model, scheduler=noise_scheduler)  # changed
    pipeline.save_pretrained(out)
    samples = pipeline(batch_size=count, num_inference_steps=50, output_type="pt").images
    named = recognised(train_classifier(images, digits.labels), 2 * samples - 1)
    print(f"{named:.1%} of {count} samples are named with a probability above 0.9; the pipeline is in {out}")
    return named


if __name__ == "__main__":
    main()
