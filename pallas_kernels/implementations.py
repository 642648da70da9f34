"""Implementations of a kernel by name, imported when they are first asked for."""

from collections.abc import Callable, Iterator, Mapping


class Implementations[T](Mapping[str, T]):
    """Mapping from names to implementations.

    What Pallas needs for GPUs and TPUs takes a second to import, and a CPU never uses it.

    Args:
        importers: Functions that import and return an implementation, by its name.
    """

    def __init__(self, importers: Mapping[str, Callable[[], T]]):
        self._importers = importers

    def __getitem__(self, name: str) -> T:
        return self._importers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._importers)

    def __len__(self) -> int:
        return len(self._importers)
