"""Noise scales from data: distances between images, the levels of SMLD, the Langevin step."""
