"""The tensors of a checkpoint by the module that they belong to."""

from collections.abc import Mapping

import numpy as np

from checkpoints.errors import CheckpointError

Parts = dict[str, np.ndarray]  # of one module, by the last part of their names


def by_module(
    tensors: Mapping[str, np.ndarray], parts: frozenset[str]
) -> tuple[dict[str, Parts], Parts]:
    """The tensors whose names end in one of these parts, by module; and all others, under their
    whole names.
    """
    modules, others = dict[str, Parts](), Parts()
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in parts:
            modules.setdefault(module, {})[part] = tensor
        else:
            others[name] = tensor
    return modules, others


def check_complete(module: str, found: Parts, needed: tuple[str, ...]) -> None:
    """CheckpointError, naming both tensors, when a module has some of what its weight is made of,
    but not all.
    """
    for part in needed:
        if part not in found:
            raise CheckpointError(
                f"tensor {module}.{next(iter(found))} belongs to {module}.{part}, which is missing"
            )
