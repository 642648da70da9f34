"""Tokens and certificates of the server, and the files that they are read from."""
