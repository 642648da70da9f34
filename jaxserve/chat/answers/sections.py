"""Sections that have all calls of an answer between two marks."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.chat.answers.events import BegunCall, Content, FoundCall, Parse
from jaxserve.chat.answers.incremental import SPACES, IncomingText

# Reads a call after its first mark. The result is one that was told already, or one that is to be
# told, or None for a malformed one.
type CallReader = Callable[[IncomingText], Parse[BegunCall | FoundCall | None]]


@dataclass(frozen=True)
class Section:
    """Marks of a section: its first and its last one, and the first of each call."""

    begin: str
    end: str
    call_begin: str

    def find(self, text: IncomingText, read_call: CallReader) -> Parse[None]:
        """Find the calls of each section; a section with a malformed call is content as a whole.

        The end of the text closes a section, too: its mark may be a stop string. Calls that are
        certain are told one by one, and what comes in place of another one is dropped.
        """
        while (yield from text.emit_until(Content, self.begin)):
            yield from text.read_while(SPACES)
            find = self._tell if text.certain else self._hold
            if not (yield from find(text, read_call)):
                yield from text.reject()

    def _tell(self, text: IncomingText, read_call: CallReader) -> Parse[bool]:
        """Tell calls as long as they come; the result is false where the first is malformed."""
        told = False
        while (yield from text.read_literal(self.call_begin)):
            call = yield from read_call(text)
            if call is None:
                break
            text.accept()
            if isinstance(call, FoundCall):
                yield call
            told = True
            yield from text.read_while(SPACES)
        if told:
            yield from text.drop_to(self.end)
        return told

    def _hold(self, text: IncomingText, read_call: CallReader) -> Parse[bool]:
        """Tell all calls at the end of the section; the result is false where one is malformed."""
        calls: list[BegunCall | FoundCall] = []
        while (yield from text.read_literal(self.call_begin)):
            call = yield from read_call(text)
            if call is None:
                return False
            calls.append(call)
            yield from text.read_while(SPACES)
        if not calls:
            return False
        if not ((yield from text.read_literal(self.end)) or (yield from text.read_end())):
            return False
        yield from text.read_end()
        text.accept()
        yield from calls
        return True
