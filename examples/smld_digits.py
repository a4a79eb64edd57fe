"""NI-SMLD on the embedded digits: calibrate, train for about two minutes, sample by CAS and ALS, and look.

python examples/smld_digits.py --out out/smld
"""

import argparse
import dataclasses
from pathlib import Path

import torch

import nidiff
from nidiff.commands.train import Train
from nidiff.evaluation.classifier import recognised, train_classifier
from nidiff.report.contact import save_panels
from nidiff.training.experiment import PRESETS


def main(out: Path, steps: int, count: int) -> dict[str, float]:
    """Train, or resume, the run in ``out``; the share of digits that a classifier recognises, per sampler."""
    digits = nidiff.load_dataset("digits")
    scales = nidiff.design.calibrate(digits.values, nidiff.gaussian_free_field((8, 8)))
    print(
        f"calibrate asks for sigma_max {scales.sigma_max:.2f} and {scales.num_levels} levels; the preset has 10 and 100"
    )
    experiment = dataclasses.replace(PRESETS["digits-smld"], steps=steps, cooldown=steps // 2)
    Train(experiment, out=out / "run", resume=(out / "run" / "experiment.json").exists()).train()
    denoiser = nidiff.load_model(out / "run")
    real = digits.batch(torch.arange(len(digits)))
    classifier = train_classifier(real, digits.labels)
    panels, named = {"real": real}, {}
    for sampler, options in {"cas": {}, "als": {"steps_per_level": 2}}.items():
        images = nidiff.sample(denoiser, (count, 1, 8, 8), sampler=sampler, generator=range(count), **options)
        panels[f"NI-SMLD: {sampler.upper()}"] = images
        named[sampler] = recognised(classifier, images)
        print(f"{sampler}: {named[sampler]:.1%} of {count} digits recognised with probability above 0.9")
    save_panels(out / "smld_digits.png", panels)
    return named


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/smld"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--count", type=int, default=300)
    main(**vars(parser.parse_args()))
