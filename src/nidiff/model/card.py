"""The model card: README.md of a model folder, with the front matter the Hub reads."""

import re
from collections.abc import Mapping, Sequence

from nidiff.covariance.summary import summary
from nidiff.diffusion.choice import choices_text
from nidiff.diffusion.denoiser import Denoiser
from nidiff.diffusion.scaling import PIXELS
from nidiff.model.config import WORDS

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
    denoiser: Denoiser,
    shape: Sequence[int] | None,
    about: Mapping[str, str] | None = None,
    name: str = "PATH_OR_REPOSITORY",
) -> str:
    """The card of a model opened by ``name`` for items of ``shape`` [C, *event]; None: only the network knows it."""
    pictures = shape is not None and len(shape) == 3 and denoiser.scaling in (None, PIXELS)
    how = OWN if shape is None else PIPELINE if pictures else FIELDS
    tuned = {"samplers for few evaluations": choices_text(denoiser.choices)} if denoiser.choices else {}
    return f"""{FRONT}
{WHITE if denoiser.process.covariance.condition_number == 1 else COLOURED}
| | |
|---|---|
{model_facts(denoiser)}{_rows({key: escaped(value) for key, value in {**tuned, **(about or {})}.items()})}
## How to sample

```python
{how.format(name=python_text(name), shape=(4, *(shape or ())))}
```
"""


def model_facts(denoiser: Denoiser) -> str:
    """What every card says of its model: Σ in numbers, the schedule and the prediction."""
    covariance, target = denoiser.process.covariance, str(denoiser.target_name)
    numbers = summary(covariance)
    length = "beyond the image" if numbers.correlation_length is None else f"{numbers.correlation_length:.3g} pixels"
    return _rows(
        {
            "noise": f"N(0, Σ), Σ = {_code(repr(covariance))} over {' × '.join(map(str, covariance.event_shape))}",
            "condition number of Σ": f"{numbers.condition_number:.4g}",
            "effective rank of Σ": f"{numbers.effective_rank:.4g} of {covariance.size}",
            "correlation length": length,
            "schedule": _code(repr(denoiser.process.schedule)),
            "prediction": _code(WORDS.get(target, target)),
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
    shown = ("�" if not (letter.isprintable() or letter.isspace()) else letter for letter in str(words))
    return " ".join("".join(shown).split())


def _rows(facts: Mapping[str, str]) -> str:
    return "".join(f"| {escaped(key)} | {value} |\n" for key, value in facts.items())
