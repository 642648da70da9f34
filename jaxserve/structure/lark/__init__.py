"""Lark grammars without nesting, as regular expressions.

The text of a grammar is read by tokens.py, its rules by parser.py into the nodes of nodes.py, and
expression.py writes them as one expression.
"""

from jaxserve.structure.lark.errors import LarkError
from jaxserve.structure.lark.expression import expression_of
from jaxserve.structure.lark.parts import check_ends, check_part, with_unicode_classes

__all__ = ["LarkError", "check_ends", "check_part", "expression_of", "with_unicode_classes"]
