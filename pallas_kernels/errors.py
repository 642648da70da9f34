"""Error of a kernel that cannot do what it is asked to."""


class KernelError(ValueError):
    """An implementation is not built in, or cannot take the sizes or dtypes it is given."""
