"""How good samples are."""
