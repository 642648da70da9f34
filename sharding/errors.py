"""Errors of meshes, of what is laid out on them, and of chips."""


class ShardingError(ValueError):
    """An array or a mesh that cannot be laid out as asked."""


class ChipError(ValueError):
    """A chip is not known, or its compiler is not installed."""
