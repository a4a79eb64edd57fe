"""For diffusers: a scheduler and a pipeline with N(0, Σ), and any other scheduler in whitened coordinates."""

from nidiff.interop.flow import FlowNetwork as FlowNetwork
from nidiff.interop.flow import flow_scheduler as flow_scheduler
from nidiff.interop.flow import packed as packed
from nidiff.interop.pipeline import NonIsotropicPipeline as NonIsotropicPipeline
from nidiff.interop.scheduler import NonIsotropicScheduler as NonIsotropicScheduler
from nidiff.interop.whitened import Whitened as Whitened
