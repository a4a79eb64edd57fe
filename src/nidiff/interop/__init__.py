"""For diffusers: a scheduler and a pipeline with N(0, Σ), and any other scheduler in whitened coordinates."""

from nidiff.interop.pipeline import NonIsotropicPipeline
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.interop.whitened import Whitened, whitened

__all__ = ["NonIsotropicPipeline", "NonIsotropicScheduler", "Whitened", "whitened"]
