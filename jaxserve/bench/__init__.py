"""Measurements for users: of a server under load, of offline generation, of a start. python -m
jaxserve.bench.
"""
