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
        # (kind, text) of the structure -> llguidance's form, the most recently used last
        self._forms: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._forms)

    def get(self, structure: Structure) -> str | None:
        """Return llguidance's form of a structure that was added and is still kept."""
        key = structure.kind, structure.text
        with self._lock:
            form = self._forms.get(key)
            if form is not None:
                self._forms.move_to_end(key)
            return form

    def add(self, structure: Structure, form: str) -> None:
        """Keep the form of a structure."""
        with self._lock:
            if before := self._forms.get((structure.kind, structure.text)):
                self._bytes -= _size(structure.text, before)
            self._forms[structure.kind, structure.text] = form
            self._bytes += _size(structure.text, form)
            while len(self._forms) > 1 and self._bytes > self._max_bytes:
                (_, text), dropped = self._forms.popitem(last=False)
                self._bytes -= _size(text, dropped)


def _size(text: str, form: str) -> int:
    return getsizeof(text) + getsizeof(form)
