"""Grammars that were checked, with a bound on the memory that they take."""

from collections import OrderedDict
from sys import getsizeof
from threading import Lock

from jaxserve.structure.spec import Structure


class CheckedGrammars:
    """llguidance's forms of structures that passed, the least recently used dropped first.

    For use from several threads; none of them waits for longer than a lookup takes.

    Args:
        max_bytes: Bound on the sizes of all structures' texts and forms, of which the last one is
            kept whatever its size.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._bytes = 0
        # Key of the structure -> llguidance's form, the most recently used last
        self._forms: OrderedDict[_Key, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._forms)

    def get(self, structure: Structure) -> str | None:
        """Return llguidance's form of a structure that was added and is still kept."""
        key = _key(structure)
        with self._lock:
            form = self._forms.get(key)
            if form is not None:
                self._forms.move_to_end(key)
            return form

    def add(self, structure: Structure, form: str) -> None:
        """Keep the form of a structure."""
        key = _key(structure)
        with self._lock:
            if before := self._forms.get(key):
                self._bytes -= _size(key, before)
            self._forms[key] = form
            self._bytes += _size(key, form)
            while len(self._forms) > 1 and self._bytes > self._max_bytes:
                self._bytes -= _size(*self._forms.popitem(last=False))


type _Key = tuple[str, str, str]


def _key(structure: Structure) -> _Key:
    return structure.kind, structure.text, structure.frame


def _size(key: _Key, form: str) -> int:
    return sum(map(getsizeof, (*key[1:], form)))
