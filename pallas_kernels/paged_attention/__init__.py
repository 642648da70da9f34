"""Attention over keys and values in pages, and writes of pages."""
