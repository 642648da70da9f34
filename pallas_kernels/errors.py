"""What a kernel says when it cannot do what it is asked to."""


class KernelError(ValueError):
    """An implementation that is not built in, or that cannot take what it is given."""
