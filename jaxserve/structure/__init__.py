"""Structured output: what a text has to follow, and which tokens keep to it. Nothing here imports
jax.
"""

from jaxserve.structure.matcher import Grammar, Matcher
from jaxserve.structure.spec import KINDS, Structure

__all__ = ["KINDS", "Grammar", "Matcher", "Structure"]
