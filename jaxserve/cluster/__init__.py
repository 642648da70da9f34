"""Several hosts as one engine: a leader plans, and every host launches the same steps on its devices."""
