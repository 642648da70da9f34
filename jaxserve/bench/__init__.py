"""Benchmarks for users: a server under load, offline generation, and the start of a server."""
