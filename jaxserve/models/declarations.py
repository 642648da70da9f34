"""The leaves of a tree of declared parameters."""

from typing import Any

from jax.tree_util import SequenceKey, tree_leaves_with_path

from jaxserve.models.families.weight_table import ParamPath
from jaxserve.models.quant import Quantized, is_quantized
from jaxserve.models.summed_last import SummedLast, is_summed_last
from jaxserve.sharding.params import ParamSpec, is_param_spec

Declaration = ParamSpec | Quantized | SummedLast


def is_declaration(leaf: object) -> bool:
    """Return whether this is the declaration of a parameter, quantized or not."""
    return is_quantized(leaf) or is_param_spec(leaf) or is_summed_last(leaf)


def declarations(tree: Any) -> list[tuple[ParamPath, Declaration]]:
    """Return the declarations of a tree, each behind its path."""
    leaves = tree_leaves_with_path(tree, is_leaf=is_declaration)
    return [
        (tuple(key.idx if isinstance(key, SequenceKey) else key.key for key in keys), leaf)
        for keys, leaf in leaves
    ]
