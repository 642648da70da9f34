"""A conversation turn by turn: its history, where turns come from, and what Ctrl-C ends."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Event
from typing import Protocol

from jaxserve.chat.messages import Message
from jaxserve.completion import Completion, Delta
from jaxserve.errors import RequestError

RESET = "/reset"
HINT = f"Ctrl-C ends the answer, {RESET} forgets the conversation, Ctrl-D ends it"


class Printer(Protocol):
    def show(self, number: int, delta: Delta) -> None:
        """News of the answer to turn `number`, from 0 on."""
        ...

    def cut(self) -> None:
        """The answer ends here."""
        ...


class Conversation:
    """Asks every turn with what was said before it. A turn that is /reset forgets all but the
    system's message.
    """

    def __init__(
        self,
        stream: Callable[[list[Message]], Iterator[Delta]],
        printer: Printer,
        complain: Callable[[Exception], object],
        system: str | None = None,
        interactive: bool = False,
    ) -> None:
        """stream: answers messages. complain: told why a turn has no answer. interactive: Ctrl-C
        ends an answer.
        """
        self._stream, self._printer, self._complain, self._interactive = (
            stream,
            printer,
            complain,
            interactive,
        )
        self._opening: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self.done: list[Completion] = []
        self.failed = False

    def hold(self, turns: Iterable[str]) -> None:
        """Answer the turns, each before the next is read. One without an answer is forgotten."""
        history, number = self._opening, 0
        for turn in turns:
            if turn.strip() == RESET:
                history = self._opening
                continue
            asked = [*history, {"role": "user", "content": turn}]
            answer = self._answer(number, asked)
            if answer is not None:
                history = [*asked, {"role": "assistant", "content": answer}]
            number += 1

    def _answer(self, number: int, messages: list[Message]) -> str | None:
        """What was said, up to a Ctrl-C; None for nothing."""
        try:
            with interruptible() if self._interactive else nullcontext(Event()) as interrupted:
                return self._listen(number, self._stream(messages), interrupted)
        except RequestError as error:
            return self._fail(error)

    def _listen(self, number: int, deltas: Iterator[Delta], interrupted: Event) -> str | None:
        text = ""
        for delta in deltas:
            self._printer.show(number, delta)
            text += delta.text
            if delta.completion:
                self.done.append(delta.completion)
                return self._fail(delta.completion.error) if delta.completion.error else text
            if interrupted.is_set():
                break  # the iterator goes, and with it the request
        self._printer.cut()
        return text or None

    def _fail(self, error: Exception) -> None:
        self._complain(error)
        self.failed = True


def lines_of(standard_input: Iterable[bytes]) -> Iterator[str]:
    """One turn per line as it comes, without the empty ones; RequestError for what is not UTF-8."""
    for number, line in enumerate(standard_input, start=1):
        try:
            turn = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            problem = f"line {number} is not UTF-8 text (byte {error.start}: {error.reason})"
            raise RequestError("standard input", problem) from None
        if turn.strip():
            yield turn


def typed_turns(prompt: str) -> Iterator[str]:
    """Turns that a person types, with line editing where Python has it; Ctrl-C drops a line, Ctrl-D
    ends.
    """
    print(HINT, file=sys.stderr)
    with suppress(ImportError):
        import readline  # noqa: F401 (input() uses it once it is imported)
    while True:
        try:
            turn = input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if turn.strip():
            yield turn


@contextmanager
def interruptible() -> Iterator[Event]:
    """While this is open the first Ctrl-C is an event and interrupts nothing: a step of the engine
    runs to its end.

    The second is a KeyboardInterrupt, as ever.
    """
    pressed = Event()

    def note(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
