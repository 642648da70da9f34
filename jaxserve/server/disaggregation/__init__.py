"""Prompts computed by one server, and decoded by another: roles, and who does what for whom."""
