"""The forward process x = signal · x0 + sigma · Σ^½ eps and what a network learns of it."""
