"""Several hosts as one engine: a leader plans, and every host launches the same steps.

transfer/ connects whole servers, of which some compute prompts for others.
"""
