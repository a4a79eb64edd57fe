"""The model card: README.md of a model folder, with the front matter the Hub reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nidiff.covariance.operator import Covariance
from nidiff.covariance.summary import summary
from nidiff.training.experiment import Experiment, read_experiment

FRONT = """---
library_name: nidiff
pipeline_tag: unconditional-image-generation
tags:
- diffusers
- unconditional-image-generation
- nidiff
- non-isotropic-noise
---
"""

COLOURED = """# A diffusion model with non-isotropic noise

x = signal · x0 + sigma · Σ^½ · eps: the noise of this model is not white. Sampling has to start from N(0, Σ) and to add
N(0, Σ), which `NonIsotropicPipeline` of the Python package nidiff does. A plain `DDPMPipeline` starts from white noise
and does not sample this model.
"""
WHITE = """# A diffusion model

x = signal · x0 + sigma · eps with white noise, the case Σ = I of the Python package nidiff.
"""


def model_card(
    covariance: Covariance,
    scheduler: Mapping[str, Any],
    experiment: Experiment | None = None,
    metrics: str = "",
    name: str = "PATH_OR_REPOSITORY",
) -> str:
    """Σ, data, schedule, prediction, metrics and how to sample; ``scheduler`` is the configuration of the scheduler,
    ``metrics`` the table of its results in Markdown and ``name`` what to open the model by."""
    numbers = summary(covariance)
    length = "beyond the image" if numbers.correlation_length is None else f"{numbers.correlation_length:.3g} pixels"
    facts = {
        "noise": f"N(0, Σ), Σ = `{covariance!r}` over {' × '.join(map(str, covariance.event_shape))}",
        "condition number of Σ": f"{numbers.condition_number:.4g}",
        "effective rank of Σ": f"{numbers.effective_rank:.4g} of {covariance.size}",
        "correlation length": length,
        "schedule": f"`{scheduler['schedule']}`",
        "prediction": f"`{scheduler['prediction_type']}`",
    }
    if experiment is not None:
        facts["data"] = f"{data_name(experiment.data)}{', mirrored at random' if experiment.flip else ''}"
        facts["training"] = f"{experiment.steps} steps of {experiment.batch_size} images, seed {experiment.seed}"
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""{FRONT}
{WHITE if numbers.condition_number == 1 else COLOURED}
| | |
|---|---|
{rows}

## How to sample

```python
from nidiff.interop import NonIsotropicPipeline

pipeline = NonIsotropicPipeline.from_pretrained("{name}")
images = pipeline(batch_size=4, num_inference_steps=50, seeds=range(4)).images
```

## Σ

```json
{json.dumps(covariance.to_config(), indent=2)}
```
{f"{chr(10)}## Metrics{chr(10)}{chr(10)}{metrics}" if metrics else ""}"""


def run_card(run: Path, covariance: Covariance, scheduler: Mapping[str, Any], metrics: str, name: str) -> str | None:
    """The card of the model in a run directory; None if ``run`` is not one."""
    if not (run / "experiment.json").is_file():
        return None
    return model_card(covariance, scheduler, read_experiment(run), metrics, name)


def data_name(data: str) -> str:
    """What to call the data in public: a path is somebody's, its last part is a name."""
    return data if data.startswith("hf:") else Path(data).name
