"""Check an install without extras: Σ and a model that ships are sampled, the diffusers classes import, and a command
names its extra."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

import nidiff
from nidiff.extras import EXTRAS
from nidiff.model.zoo import zoo_models

present = [module for module in EXTRAS if find_spec(module)]
assert not present, f"this is not a light install: it has {present}"

covariance = nidiff.gaussian_free_field((8, 8))
process = nidiff.Process(nidiff.schedules.ddpm_linear(50), covariance)
denoiser = nidiff.Denoiser(lambda x, label: torch.zeros_like(x), process, clip=1.0)
assert nidiff.sample(denoiser, (2, 1, 8, 8), num_steps=5, generator=[0, 1]).shape == (2, 1, 8, 8)
scheduler = nidiff.NonIsotropicScheduler(covariance=covariance)
assert scheduler.add_noise(torch.zeros(1, 1, 8, 8), torch.ones(1, 1, 8, 8), torch.tensor([5])).shape == (1, 1, 8, 8)
assert nidiff.NonIsotropicPipeline is not None

# A model that ships is sampled, and its grid drawn, without extras.
for name in [name for name in ("digits",) if name in zoo_models()]:
    command = [Path(sys.executable).with_name("nidiff"), "sample", name, "--seeds", "0-3"]
    folder = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert (Path(folder) / "grid.png").is_file()

for name, extra in {"noise": "report", "explore": "app"}.items():
    done = subprocess.run([Path(sys.executable).with_name("nidiff"), name], capture_output=True, text=True)
    assert done.returncode == 2, done
    assert f"nidiff[{extra}]" in done.stderr, done.stderr
print("the light install works:", done.stderr.strip())
