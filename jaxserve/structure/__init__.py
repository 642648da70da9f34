"""Structured output: grammars that a text has to follow, and the tokens they allow; no jax."""

from jaxserve.structure.matcher import Grammar, Matcher
from jaxserve.structure.spec import KINDS, Structure, StructureForms

__all__ = ["KINDS", "Grammar", "Matcher", "Structure", "StructureForms"]
