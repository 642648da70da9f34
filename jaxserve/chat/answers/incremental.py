"""Text that arrives in pieces, for grammars that read it as if it were all there."""

import re

from jaxserve.chat.answers.events import Content, Reasoning, Steps
from jaxserve.chat.answers.json_text import MAX_DEPTH

SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]*")
NEWLINES = re.compile("\n*")
NAME = re.compile(r"[\w.-]*", re.ASCII)  # of a function
STRUCTURE, QUOTED = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class Incoming:
    """What a grammar has read and not settled yet is held: in the end it is accepted, or given back
    as content.

    Every read is a generator that waits, by yielding None, until what it says no longer depends on
    what may come: so the grammar cannot see where one piece ends and the next begins. What is given
    back is not read again: the time is linear in the text, whatever the text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._from = 0  # what comes before was settled
        self._at = 0  # what comes before was read
        self._over = False

    def add(self, piece: str) -> None:
        self._text += piece

    def finish(self) -> None:
        """No more will come."""
        self._over = True

    # ---- what was read

    def accept(self) -> None:
        """It was the form's."""
        self._from = self._at
        if 2 * self._from > len(self._text):  # seldom enough to be cheap
            self._text, self._from, self._at = self._text[self._from :], 0, 0

    def give_back(self) -> Steps[None]:
        """It was no call."""
        held = self._text[self._from : self._at]
        self.accept()
        if held:
            yield Content(held)

    # ---- reads

    def pass_on(self, kind: type[Content] | type[Reasoning], mark: str | None) -> Steps[bool]:
        """Hand on what comes up to the mark, which is then read with the white space before it.

        False at the end of the text. None: all of it.
        """
        while True:
            start = -1 if mark is None else self._text.find(mark, self._from)
            settled = self._text[self._from : start if start >= 0 else None]
            if mark is not None and start < 0 and not self._over:
                settled = settled[: len(settled) - _longest_head(settled, mark)]
            if mark is not None and (start >= 0 or not self._over):
                settled = settled.rstrip(SPACE)
            self._from += len(settled)
            if settled:
                yield kind(settled)
            if start >= 0:
                self._at = start + len(mark or "")
                return True
            self._at = self._from
            self.accept()
            if self._over:
                return False
            yield None

    def peek(self) -> Steps[str]:
        """The next letter; nothing at the end of the text."""
        while self._at == len(self._text) and not self._over:
            yield None
        return self._text[self._at : self._at + 1]

    def run(self, letters: re.Pattern[str]) -> Steps[str]:
        """The letters that match, as many as there are. letters: of a class of them, any number."""
        start = self._at
        while True:
            found = letters.match(self._text, self._at)
            assert found
            self._at = found.end()
            if self._at < len(self._text) or self._over:
                return self._text[start : self._at]
            yield None

    def literal(self, text: str) -> Steps[bool]:
        """Whether this comes next; it is read then, and nothing otherwise."""
        start = self._at
        for letter in text:
            if (yield from self.peek()) != letter:
                self._at = start
                return False
            self._at += 1
        return True

    def json(self) -> Steps[str]:
        """The text of the object or array that begins here, up to the bracket that closes it.

        Nothing where none begins, where it does not end, or where it is nested too deep. Not
        checked otherwise.
        """
        start, depth, quoted = self._at, 0, False
        if (yield from self.peek()) not in ("{", "["):
            return ""
        while True:
            found = (QUOTED if quoted else STRUCTURE).search(self._text, self._at)
            self._at = found.end() if found else len(self._text)
            match found and found[0]:
                case None if self._over:
                    return ""
                case None:
                    yield None
                case '"':
                    quoted = not quoted
                case "\\":
                    self._at += len((yield from self.peek()))
                case "{" | "[":
                    depth += 1
                    if depth > MAX_DEPTH:
                        return ""
                case _:
                    depth -= 1
                    if not depth:
                        return self._text[start : self._at]

    def ends(self) -> Steps[bool]:
        """Whether nothing but white space comes; it is read then, and nothing otherwise."""
        start = self._at
        yield from self.run(SPACES)
        if (yield from self.peek()):
            self._at = start
            return False
        return True


def _longest_head(text: str, mark: str) -> int:
    """How many letters at the end of the text may be the beginning of the mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
