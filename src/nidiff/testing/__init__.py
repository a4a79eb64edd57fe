"""Prove a covariance, a schedule or a sampler of your own right, as nidiff's tests do for its own."""

from nidiff.testing.checks import Check, Findings, check_covariance, check_sampler, check_schedule, check_target
from nidiff.testing.device import Device, DeviceError

__all__ = [
    "Check",
    "Device",
    "DeviceError",
    "Findings",
    "check_covariance",
    "check_sampler",
    "check_schedule",
    "check_target",
]
