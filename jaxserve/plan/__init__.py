"""Will a model fit chips that are not here, and how fast can it be at best? `python -m
jaxserve.plan`.
"""
