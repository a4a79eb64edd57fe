"""A model: a network, and the folder that holds everything needed to sample from it."""
