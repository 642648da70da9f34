"""Transfer of prompts' keys and values between servers: one computes them, another decodes.

The computing server puts segments on offer (offers.py) and sends a ticket for each (prefill.py);
the other fetches each segment by its ticket (fetch.py). Everything runs on the event loop's
thread, and a deadline is a time of that loop's clock.
"""
