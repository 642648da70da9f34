"""Groups the tensors of a checkpoint by module."""

from collections.abc import Mapping

import numpy as np

from jaxserve.checkpoints.errors import CheckpointError

Parts = dict[str, np.ndarray]  # tensors of one module, by the last part of their names


def by_module(
    tensors: Mapping[str, np.ndarray], parts: frozenset[str]
) -> tuple[dict[str, Parts], Parts]:
    """Return the tensors with these last parts of their names by module, and all others by name."""
    modules = dict[str, Parts]()
    others = Parts()
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in parts:
            modules.setdefault(module, {})[part] = tensor
        else:
            others[name] = tensor
    return modules, others


def check_complete(module: str, found: Parts, needed: tuple[str, ...]) -> None:
    """Raise CheckpointError, naming both tensors, when a module lacks a part of its weight."""
    for part in needed:
        if part not in found:
            raise CheckpointError(
                f"tensor {module}.{next(iter(found))} belongs to {module}.{part}, which is missing"
            )
