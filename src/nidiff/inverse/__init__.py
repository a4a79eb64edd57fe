"""Inverse problems: data seen through an operator, with noise; the posterior of a model is again a denoiser."""

from nidiff.inverse import operators as operators
