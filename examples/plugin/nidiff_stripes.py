"""A plugin of nidiff: each part is a function or a class, and a line that adds it to a registry."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config

import nidiff
from nidiff.covariance import FIELDS, Waves, remembered
from nidiff.metrics import METRICS, Metric
from nidiff.model.network import BUILDERS, NETWORKS
from nidiff.sampling import SAMPLERS, Sampler


@remembered
def stripes(shape, strength: float = 4.0):
    """Noise with more power along the last axis than along the others: --covariance stripes:strength=8."""
    basis = Waves(shape, "periodic")
    along = torch.fft.fftfreq(shape[-1], dtype=torch.float64).abs().expand(tuple(shape))
    return nidiff.Covariance(1 + strength * torch.exp(-((8 * along) ** 2)), basis, normalize=True)


FIELDS["stripes"] = stripes


def restless(chain, x, x0, here, there, *, rate: float = 0.5):
    """Renews the noise at ``rate`` times the pace of DDPM: --sampler restless:rate=0.2."""
    kept = (here.signal / here.sigma * there.sigma / there.signal) ** rate
    noise = kept * (x - here.signal * x0) / here.sigma + (1 - kept**2) ** 0.5 * chain.noise()
    return there.signal * x0 + there.sigma * noise


SAMPLERS["restless"] = Sampler(restless, spacing="trailing", num_steps=20)


class Tiny(ModelMixin, ConfigMixin):
    """Two convolutions: --network tiny:width=16. Its arguments are written to config.json, so that it is rebuilt."""

    @register_to_config
    def __init__(self, sample_size: tuple[int, ...], in_channels: int, out_channels: int, width: int = 16) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(in_channels + 1, width, 3, padding=1)
        self.last = torch.nn.Conv2d(width, out_channels, 3, padding=1)

    def forward(self, x, label):
        level = torch.as_tensor(label, device=x.device).to(x).reshape(-1, 1, 1, 1).expand_as(x[:, :1]) / 1000
        return self.last(torch.nn.functional.silu(self.first(torch.cat([x, level], 1))))


BUILDERS["tiny"] = lambda shape, width=16: Tiny(tuple(shape[1:]), shape[0], shape[0], width)  # shape is [C, *event]
NETWORKS["Tiny"] = Tiny  # so that a saved one can be opened


def brightness(real, generated):
    """The difference of the means, for `nidiff evaluate`."""
    return abs(generated.items.double().mean() - real.items.double().mean()).item()


METRICS["brightness"] = Metric(brightness, higher_is_better=False)
