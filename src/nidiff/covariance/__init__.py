"""Σ: the covariance of the noise."""
