"""Kernels for a CPU, written in C++, which XLA calls by its foreign function interface."""
