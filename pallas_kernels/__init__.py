"""Kernels for TPUs and GPUs, each with a contract and a reference that XLA compiles."""
