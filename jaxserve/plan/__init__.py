"""Planner: estimates whether a model fits absent devices, and how fast it can be there at best."""
