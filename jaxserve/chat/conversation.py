"""Conversations on the command line: turns, their history, and the handling of Ctrl-C."""

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
    """Output of answers as they grow."""

    def show(self, number: int, delta: Delta) -> None:
        """Print the growth of the answer to turn `number`, counted from 0."""
        ...

    def cut(self) -> None:
        """Finish an answer that was interrupted."""
        ...


class Conversation:
    """A conversation: every turn is sent with the turns and answers before it.

    The turn /reset drops the history except for the system's message.
    """

    def __init__(
        self,
        stream: Callable[[list[Message]], Iterator[Delta]],
        printer: Printer,
        complain: Callable[[Exception], object],
        system: str | None = None,
        interactive: bool = False,
    ) -> None:
        """Begin a conversation.

        `stream` answers messages, `complain` is called with the reason why a turn has no answer,
        and with `interactive` Ctrl-C ends the answer only. `done` collects the completions of
        answers, `failed` is set when a turn has none.
        """
        self._stream = stream
        self._printer = printer
        self._complain = complain
        self._interactive = interactive
        self._opening: list[Message] = []
        if system is not None:
            self._opening = [{"role": "system", "content": system}]
        self.done: list[Completion] = []
        self.failed = False

    def run(self, turns: Iterable[str]) -> None:
        """Answer the turns, each before the next is read; forget turns without an answer."""
        history = self._opening
        number = 0
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
        """Return the text of the answer, up to a Ctrl-C; None where there is none."""
        try:
            with interruptible() if self._interactive else nullcontext(Event()) as interrupted:
                return self._listen(number, self._stream(messages), interrupted)
        except RequestError as error:
            return self._fail(error)

    def _listen(self, number: int, deltas: Iterator[Delta], interrupted: Event) -> str | None:
        """Print the answer and return its text.

        None if it failed, or was interrupted before its first text.
        """
        text = ""
        for delta in deltas:
            self._printer.show(number, delta)
            text += delta.text
            if delta.completion:
                self.done.append(delta.completion)
                if delta.completion.error:
                    return self._fail(delta.completion.error)
                return text
            if interrupted.is_set():
                break  # dropping the iterator aborts the request
        self._printer.cut()
        return text or None

    def _fail(self, error: Exception) -> None:
        """Report why a turn has no answer."""
        self._complain(error)
        self.failed = True


def turns_from_lines(standard_input: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that are not empty as turns; raise RequestError for invalid UTF-8."""
    for number, line in enumerate(standard_input, start=1):
        try:
            turn = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            problem = f"is not UTF-8 text in line {number} (byte {error.start}: {error.reason})"
            raise RequestError("standard input", problem) from None
        if turn.strip():
            yield turn


def typed_turns(prompt: str) -> Iterator[str]:
    """Yield the turns that a person types, with line editing where Python has it.

    Ctrl-C drops a line, Ctrl-D ends the iteration.
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
    """Turn the first Ctrl-C inside of the context into an event.

    The answer is cut where it is, and the conversation goes on. The second Ctrl-C is a
    KeyboardInterrupt as usual.
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
