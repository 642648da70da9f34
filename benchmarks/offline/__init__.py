"""Throughput of offline generation on a CPU beside transformers and llama.cpp."""
