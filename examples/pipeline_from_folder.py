"""From a folder of images to a diffusers pipeline: python examples/pipeline_from_folder.py

The same on the command line: nidiff train --data out/folder/images --covariance from_data --out out/folder/run
"""

import dataclasses
from pathlib import Path

import torch
from PIL import Image

import nidiff
from nidiff.commands.train import Train
from nidiff.data.pictures import save_grid
from nidiff.interop import NonIsotropicPipeline
from nidiff.training.experiment import PRESETS


def write_images(folder: Path) -> None:
    """A folder of PNG files to train on: put your own in its place."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, pixels in enumerate(nidiff.load_dataset("digits").values):
        Image.fromarray(pixels[0].numpy()).save(folder / f"{index:04d}.png")


def main(out: Path = Path("out/folder"), steps: int = 600, count: int = 64) -> float:
    """Train on the folder, open the model as a pipeline, sample; the error of the samples' spectrum."""
    write_images(out / "images")
    settings = {"data": str(out / "images"), "covariance": "from_data", "steps": steps, "cooldown": steps // 2}
    experiment = dataclasses.replace(PRESETS["digits"], **settings)
    Train(experiment, out=out / "run", resume=(out / "run" / "experiment.json").exists()).train()

    pipeline = NonIsotropicPipeline.from_pretrained(out / "run" / "model")
    print(pipeline.scheduler.covariance)  # Σ came along with the weights
    made = pipeline(batch_size=count, seeds=range(count), num_inference_steps=50, output_type="pt").images
    save_grid(2 * made - 1, out / "samples.png")
    real = nidiff.load_dataset(out / "images")
    error = nidiff.metrics.spectrum_error(real.batch(torch.arange(len(real))), 2 * made - 1)
    print(f"error of log10 of the spectrum of {count} samples: {error:.3f}")
    return error


if __name__ == "__main__":
    main()
