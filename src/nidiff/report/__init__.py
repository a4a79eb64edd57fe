"""Figures of what nidiff computes."""
