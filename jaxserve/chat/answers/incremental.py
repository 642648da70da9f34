"""Text that arrives in pieces, for parsers that read it as if it were complete."""

import math
import re

from jaxserve.chat.answers.events import BegunCall, Content, MoreArguments, Parse, Reasoning
from jaxserve.chat.bounds import MAX_TEXT_DEPTH

SPACE = " \t\r\n"
SPACES = re.compile(f"[{SPACE}]*")
NEWLINES = re.compile("\n*")
NAME = re.compile(r"[\w.-]*", re.ASCII)  # of a function
STRUCTURE = re.compile(r'["{}\[\]]')  # outside of JSON strings
QUOTED = re.compile(r'["\\]')  # inside of them


class IncomingText:
    """Text of an answer as a parser reads it, with the part that may turn out to be a call.

    What a parser has read is held until the parser accepts it as a part of its format, or rejects
    it, which makes it content. Every read is a generator that yields None until its result no
    longer depends on text to come, so no parser can see where one piece ends and the next begins.
    Rejected text is not read again: the time is linear in the length of any text.

    Args:
        certain_calls: Number of calls, from the first one on, that are well-formed, as a grammar
            sees to that; they are told while they are written.
    """

    def __init__(self, certain_calls: float = 0) -> None:
        self._certain_calls = certain_calls
        self._text = ""
        # Text before _held was emitted or accepted, text from there to _at was read and is held.
        self._held = 0
        self._at = 0
        self._complete = False

    def add(self, piece: str) -> None:
        """Append the next piece."""
        self._text += piece

    def finish(self) -> None:
        """Note that no more text will come."""
        self._complete = True

    # ---- what was read

    def accept(self) -> None:
        """Drop the held text, which belongs to the format."""
        self._held = self._at
        # Cutting copies the rest, so it waits until that is the smaller half: linear in total.
        if 2 * self._held > len(self._text):
            self._text = self._text[self._held :]
            self._held = 0
            self._at = 0

    def reject(self) -> Parse[None]:
        """Emit the held text as content: it was no call."""
        held = self._text[self._held : self._at]
        self.accept()
        if held:
            yield Content(held)

    # ---- calls that are told while they are written

    @property
    def certain(self) -> bool:
        """Return whether the next call is certainly well-formed."""
        return self._certain_calls > 0

    def begin_call(self, name: str, id: str = "") -> Parse[BegunCall]:
        """Tell the head of a call, which was read; its arguments are to be told next."""
        self._certain_calls -= 1
        self.accept()
        call = BegunCall(name, id)
        yield call
        return call

    def tell(self, arguments: str) -> Parse[None]:
        """Tell a piece of the arguments of the call that began; the held text stands for it."""
        self.accept()
        if arguments:
            yield MoreArguments(arguments)

    def tell_object(self) -> Parse[None]:
        """Tell the JSON object that begins here as arguments, all that has arrived of it at once.

        Neither its syntax nor its depth is checked. The end of the text ends it as well.
        """
        for wait in self._read_brackets(0, math.inf):
            yield from self.tell(self._text[self._held : self._at])
            yield wait
        yield from self.tell(self._text[self._held : self._at])

    def drop_to(self, mark: str) -> Parse[None]:
        """Drop the text up to the mark behind a call, the mark, and white space that ends the text.

        All of it is dropped where no mark comes: an answer may be cut inside of the mark.
        """
        yield from self.read_to(mark)
        yield from self.read_end()
        self.accept()

    # ---- reads

    def attempt[T](self, reading: Parse[T]) -> Parse[T]:
        """Return the result of a read, which is taken back where the result is false or empty."""
        start = self._at
        found = yield from reading
        if not found:
            self._at = start
        return found

    def emit_until(self, kind: type[Content] | type[Reasoning], mark: str | None) -> Parse[bool]:
        """Emit text as `kind` up to the mark, and read the mark with the white space before it.

        The result is false at the end of the text. Without a mark all text is emitted.
        """
        ahead = 0  # characters behind what is emitted that were read before: white space alone
        while True:
            begin = self._held + ahead
            overlap = max(self._held, begin - len(mark or "") + 1)
            start = -1 if mark is None else self._text.find(mark, overlap)
            end = start if start >= 0 else len(self._text)
            if mark is not None and start < 0 and not self._complete:
                end -= _longest_head(self._text, mark)
            # White space is kept back as well: it belongs to the mark if the mark comes next.
            keeps = mark is not None and (start >= 0 or not self._complete)
            said = self._text[begin:end].rstrip(SPACE) if keeps else self._text[begin:end]
            settled = self._text[self._held : begin + len(said)] if said or not keeps else ""
            self._held += len(settled)
            ahead = max(0, end - self._held)
            if settled:
                yield kind(settled)
            if start >= 0:
                self._at = start + len(mark or "")
                return True
            self._at = self._held
            self.accept()
            if self._complete:
                return False
            yield None

    def peek(self) -> Parse[str]:
        """Return the next character without reading it; an empty string at the end of the text."""
        while self._at == len(self._text) and not self._complete:
            yield None
        return self._text[self._at : self._at + 1]

    def read_while(self, letters: re.Pattern[str]) -> Parse[str]:
        """Read and return as many characters as match; the pattern is a class, any number of it."""
        start = self._at
        while True:
            found = letters.match(self._text, self._at)
            assert found
            self._at = found.end()
            if self._at < len(self._text) or self._complete:
                return self._text[start : self._at]
            yield None

    def read_until(self, mark: str, most: int) -> Parse[str | None]:
        """Read and return the text up to the mark, and the mark; None without reading anything.

        Args:
            most: Longest text before the mark, in characters.
        """
        start = self._at
        end = start + most + len(mark)
        while (found := self._text.find(mark, start, end)) < 0:
            if self._complete or len(self._text) >= end:
                return None
            yield None
        self._at = found + len(mark)
        return self._text[start:found]

    def read_to(self, mark: str) -> Parse[str]:
        """Read the text up to the mark, and the mark, or all of it; return it without the mark."""
        start = seen = self._at
        while (found := self._text.find(mark, seen)) < 0:
            if self._complete:
                self._at = len(self._text)
                return self._text[start:]
            seen = max(start, len(self._text) - len(mark) + 1)
            yield None
        self._at = found + len(mark)
        return self._text[start:found]

    def read_past(self, mark: str) -> Parse[str | None]:
        """Read the text up to the mark, and the mark; the result is None where no mark comes."""
        start = self._at
        found = yield from self.read_to(mark)
        return found if self._at > start + len(found) else None

    def is_next(self, text: str) -> Parse[bool]:
        """Return whether `text` comes next, without reading it."""
        start = self._at
        found = yield from self.read_literal(text)
        self._at = start
        return found

    def read_literal(self, text: str) -> Parse[bool]:
        """Read `text` and return true if it comes next; otherwise read nothing."""
        start = self._at
        for letter in text:
            if (yield from self.peek()) != letter:
                self._at = start
                return False
            self._at += 1
        return True

    def read_json(self) -> Parse[str]:
        """Read and return the object or array that begins here, up to its closing bracket.

        The result is empty where none begins, where it does not end, or where it is nested more
        than MAX_TEXT_DEPTH deep. Its syntax is not checked otherwise.
        """
        start = self._at
        if (yield from self.peek()) not in ("{", "["):
            return ""
        is_whole = yield from self._read_brackets(0, MAX_TEXT_DEPTH)
        return self._text[start : self._at] if is_whole else ""

    def read_rest_of_object(self) -> Parse[bool]:
        """Read up to the closing bracket of a JSON object whose first members were read."""
        return (yield from self._read_brackets(1, math.inf))

    def _read_brackets(self, depth: int, deepest: float) -> Parse[bool]:
        """Read JSON text to the bracket that closes the first of `depth` open ones.

        Without an open one it is the next bracket's. The result is false where the text ends
        before, or where more than `deepest` are open. What was read may be accepted meanwhile.
        """
        quoted = False
        while True:
            found = (QUOTED if quoted else STRUCTURE).search(self._text, self._at)
            self._at = found.end() if found else len(self._text)
            match found and found[0]:
                case None if self._complete:
                    return False
                case None:
                    yield None
                case '"':
                    quoted = not quoted
                case "\\":  # the next character is escaped: it neither ends nor begins a string
                    escaped = yield from self.peek()
                    self._at += len(escaped)
                case "{" | "[":
                    depth += 1
                    if depth > deepest:
                        return False
                case _:
                    depth -= 1
                    if not depth:
                        return True

    def read_end(self) -> Parse[bool]:
        """Read white space to the end of the text and return true; otherwise read nothing."""
        start = self._at
        yield from self.read_while(SPACES)
        if (yield from self.peek()):
            self._at = start
            return False
        return True


def _longest_head(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that may begin the mark."""
    for size in range(len(mark) - 1, 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
