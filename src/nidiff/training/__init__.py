"""Training: the loop, checkpoints, resuming."""
