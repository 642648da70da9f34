"""Kernels of an engine: which are chosen, and whether their numbers are right here."""
