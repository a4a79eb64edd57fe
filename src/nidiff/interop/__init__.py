"""For diffusers: a scheduler and a pipeline with N(0, Σ), and any other scheduler in whitened coordinates."""

from nidiff.interop.flow import FlowNetwork, flow_scheduler
from nidiff.interop.pipeline import NonIsotropicPipeline
from nidiff.interop.scheduler import NonIsotropicScheduler
from nidiff.interop.whitened import Whitened, whitened

__all__ = [
    "FlowNetwork",
    "NonIsotropicPipeline",
    "NonIsotropicScheduler",
    "Whitened",
    "flow_scheduler",
    "whitened",
]
