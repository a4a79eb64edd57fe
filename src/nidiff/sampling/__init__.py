"""From noise to data, and the likelihood of data."""

from nidiff.diffusion.spacing import SPACINGS as SPACINGS
from nidiff.sampling.angle import angle_rows as angle_rows
from nidiff.sampling.sampler import SAMPLERS as SAMPLERS
from nidiff.sampling.step import Chain as Chain
from nidiff.sampling.step import Sampler as Sampler
from nidiff.sampling.step import Step as Step
from nidiff.sampling.step import Visit as Visit
