"""The forward process x = signal · x0 + sigma · Σ^½ eps and what a network learns of it."""

from nidiff.diffusion import family as family  # which adds its schedules to the registry
