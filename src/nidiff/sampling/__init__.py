"""From noise to data, and the likelihood of data."""
