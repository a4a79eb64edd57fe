"""Images as tensors in [-1, 1]."""
