"""Keys and values of prompts between servers: one computes them, another goes on from them.

The first offers pieces (shelf.py), and tells the other their tickets (prefill.py); the other
fetches each by its ticket (fetch.py). All of it runs in the event loop's thread, and a deadline is
a time of that loop's clock.
"""
