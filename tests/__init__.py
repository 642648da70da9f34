"""Tests, and the helpers that benchmarks share with them: a package, so that no other of the name
is taken for it.
"""
