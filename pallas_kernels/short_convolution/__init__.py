"""Causal convolutions over a few tokens, whose newest inputs are the state of a sequence."""
