"""Several hosts as one engine: a leader plans, and every host launches the same steps on its
devices.

And several servers that hand prompts to each other: transfer/.
"""
