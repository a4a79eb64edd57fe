"""Prove a covariance, a schedule or a sampler of your own right, as nidiff's tests do for its own."""

from nidiff.testing.checks import Check, Findings, check_covariance, check_sampler, check_schedule, check_target

__all__ = ["Check", "Findings", "check_covariance", "check_sampler", "check_schedule", "check_target"]
