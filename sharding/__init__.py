"""Meshes of devices, and how parameters and activations lie on them."""
