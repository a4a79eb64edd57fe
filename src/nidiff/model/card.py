"""The model card: README.md of a model folder, with the front matter the Hub reads."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nidiff.covariance.covariance import Covariance
from nidiff.covariance.summary import summary
from nidiff.model.config import stored_schedule

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
N(0, Σ), as the Python package nidiff does. A plain `DDPMPipeline` starts from white noise, which is wrong here.
"""
WHITE = """# A diffusion model

x = signal · x0 + sigma · eps with white noise, the case Σ = I of the Python package nidiff.
"""
PIPELINE = """from nidiff.interop import NonIsotropicPipeline

pipeline = NonIsotropicPipeline.from_pretrained({name})
images = pipeline(batch_size=4, seeds=range(4)).images"""
OWN = """import nidiff

denoiser = nidiff.load_model({name}, net=YOUR_NETWORK)  # only its weights are stored here
samples = nidiff.sample(denoiser, SHAPE, generator=range(SHAPE[0]))"""
FIELDS = """import nidiff

denoiser = nidiff.load_model({name})
samples = nidiff.sample(denoiser, {shape}, generator=range(4))
fields = denoiser.scaling.to_data(samples)  # in the units of the data"""
METRICS = "\n## Metrics\n\n"


def model_card(
    covariance: Covariance,
    scheduler: Mapping[str, Any],
    about: Mapping[str, str] | None = None,
    name: str = "PATH_OR_REPOSITORY",
    pipeline: bool = True,
    fields: Sequence[int] | None = None,
) -> str:
    """The card of a model that is opened by ``name``, and by `NonIsotropicPipeline` if ``pipeline``; ``fields`` is the
    shape [C, *event] of what it makes if that is no 8-bit picture."""
    how = PIPELINE if pipeline else OWN
    if fields is not None:
        how = FIELDS
    return f"""{FRONT}
{WHITE if covariance.condition_number == 1 else COLOURED}
| | |
|---|---|
{model_facts(covariance, scheduler)}{_rows({key: escaped(value) for key, value in (about or {}).items()})}
## How to sample

```python
{how.format(name=python_text(name), shape=None if fields is None else (4, *fields))}
```
"""


def model_facts(covariance: Covariance, scheduler: Mapping[str, Any]) -> str:
    """What every card says of its model: Σ in numbers, and the schedule and prediction of the scheduler's config."""
    numbers = summary(covariance)
    length = "beyond the image" if numbers.correlation_length is None else f"{numbers.correlation_length:.3g} pixels"
    return _rows(
        {
            "noise": f"N(0, Σ), Σ = {_code(repr(covariance))} over {' × '.join(map(str, covariance.event_shape))}",
            "condition number of Σ": f"{numbers.condition_number:.4g}",
            "effective rank of Σ": f"{numbers.effective_rank:.4g} of {covariance.size}",
            "correlation length": length,
            "schedule": _code(repr(stored_schedule(scheduler["schedule"]))),
            "prediction": _code(scheduler["prediction_type"]),
        }
    )


def escaped(words: object) -> str:
    """Words for a table of Markdown: on one line, and escaped where they would be markup or HTML."""
    return re.sub(r"([\\|*<`\[\]])", r"\\\1", _one_line(words))


def python_text(words: str) -> str:
    """Words as a string literal of Python, escaped where they could end it."""
    return '"' + re.sub(r"[^\w ./:+@,=()~-]", lambda found: f"\\U{ord(found[0]):08x}", words) + '"'


def _code(words: object) -> str:
    return "`" + _one_line(words).replace("`", "'").replace("|", "\\|") + "`"


def _one_line(words: object) -> str:
    """What can be printed, on one line: a byte that is not UTF-8, or a control character, shows as �."""
    letters = [
        letter if letter.isprintable() or letter.isspace() else "\N{REPLACEMENT CHARACTER}" for letter in str(words)
    ]
    return " ".join("".join(letters).split())


def _rows(facts: Mapping[str, str]) -> str:
    return "".join(f"| {escaped(key)} | {value} |\n" for key, value in facts.items())
