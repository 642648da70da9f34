"""Grammars compiled by llguidance for one model's vocabulary."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from jaxserve.errors import GrammarError, NotBuiltInError, RequestError
from jaxserve.sandbox_process import LineProcess
from jaxserve.structure.checked import CheckedGrammars
from jaxserve.structure.spec import Structure
from jaxserve.structure.vocabulary import Vocabulary
from jaxserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER: Final = Path(__file__).with_name("worker.py")
PACKAGE: Final = "llguidance"
MAX_MEMORY: Final = 1024 * 2**20  # bytes of the worker's address space
MAX_ANSWER_BYTES: Final = 16 * 2**20
EMPTY_MASK: Final = "NoExtensionBias"  # the library's name of an empty mask inside of a text
EMPTY: Final = "no text can follow, or no tokens of the model spell it"
# Bounds on the work for one grammar and for the mask of one token. The library's own defaults are
# generous for a server, where other requests wait for the same step.
PARSER_LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 60_000,  # a text with a maxLength takes nine per character
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


@dataclass(frozen=True)
class Bounds:
    """Limits on structured output."""

    max_bytes: int = 64 * 1024  # size of a grammar's text
    seconds: float = 2.0  # clock time to check one grammar
    cache_bytes: int = 64 * 2**20  # size of the checked grammars that are kept, with their texts


DEFAULT_BOUNDS: Final = Bounds()


class Grammars:
    """Compiler of grammars that remembers which are valid; for use from several threads.

    A separate process compiles a grammar first, under bounds of time, memory and stack. A grammar
    that passes is compiled again here for every request, without the interpreter's lock. Requests
    do not share a compiled grammar, because its matchers share a lexer that grows with what each of
    them reads, and the bound on that lexer. `vocab_size` is the model's, which has all ids of the
    tokenizer and may have more.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self.bounds = bounds
        limits = [str(bounds.seconds), str(MAX_MEMORY), json.dumps(PARSER_LIMITS)]
        command = [sys.executable, "-P", str(WORKER), *limits]
        self._worker = LineProcess(command, bounds.seconds, MAX_ANSWER_BYTES)
        self._checking = Lock()  # held while the worker checks a grammar: up to bounds.seconds
        self._checked = CheckedGrammars(bounds.cache_bytes)
        self._reading = Lock()  # held while the vocabulary is read
        self._read: LLTokenizer | None = None

    def compile(self, structure: Structure) -> "LLGrammar":
        """Compile a structure, after the worker has checked it.

        Raises GrammarError where the grammar is wrong or takes too much time or memory,
        RequestError where its text is too long, NotBuiltInError without the library.
        """
        if find_spec(PACKAGE) is None:
            raise NotBuiltInError(
                f"structured output needs the package {PACKAGE}, which is not installed here"
            )
        size = structure.size
        limit = self.bounds.max_bytes
        if size > limit:
            problem = f"has {size} bytes; the limit is {limit} (--max-grammar-bytes)"
            raise RequestError(structure.field, problem)
        found = self._checked.get(structure)
        if found is None:
            with self._checking:
                # Looked up again: another thread may have checked the same one in the meantime.
                found = self._checked.get(structure) or self._check(structure)
        try:
            return LLGrammar(self._library, found, self._vocab_size)
        except ValueError as error:
            raise GrammarError(structure.field, f"cannot be used: {error}") from None

    def warm_up(self) -> None:
        """Read the vocabulary ahead of the first request, if the library is installed.

        Reading holds the interpreter's lock for up to a second.
        """
        if find_spec(PACKAGE):
            _ = self._library

    def knows(self, structure: Structure) -> bool:
        """Return whether the structure was checked before, without waiting for a check."""
        return self._checked.get(structure) is not None

    def close(self) -> None:
        """End the process; a later use starts another."""
        self._worker.close()

    def _check(self, structure: Structure) -> str:
        """Return llguidance's form of a structure that the worker checks now, and remember it."""
        try:
            asked = {"kind": structure.kind, "text": structure.text, "frame": structure.frame}
            answer = self._worker.ask(json.dumps(asked))
        except ChildProcessError:
            raise NotBuiltInError(
                f"the process that checks grammars does not start (does {PACKAGE} work?)"
            ) from None
        if answer is None:
            seconds = f"{self.bounds.seconds:g} s (--grammar-seconds)"
            problem = f"takes more than {seconds} or too much memory to compile, or nests too deep"
            raise GrammarError(structure.field, problem)
        if "error" in answer:
            raise GrammarError(structure.field, f"cannot be used: {answer['error']}")
        self._checked.add(structure, answer["grammar"])
        return answer["grammar"]

    @property
    def _library(self) -> "LLTokenizer":
        with self._reading:
            if self._read is None:
                self._read = self._read_vocabulary()
            return self._read

    def _read_vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        vocabulary = Vocabulary(self._tokenizer, self._eos_ids, self._vocab_size)
        ends = list(self._eos_ids) or vocabulary.eos_token_id
        return LLTokenizer(vocabulary, eos_token=ends, slices=LLTokenizer.json_slices())  # type: ignore[arg-type]


class LLGrammar:
    """Grammar of llguidance; raises ValueError with the library's words where that refuses it."""

    def __init__(self, library: "LLTokenizer", grammar: str, vocab_size: int) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits: Any = PARSER_LIMITS
        self._first = LLMatcher(library, grammar, log_level=0, limits=LLParserLimits(**limits))
        if not self._first.is_error():
            # The first mask is the most expensive one, as most of the lexer is built with it: here
            # a bound that it exceeds fails the request, and the work is not done in a step.
            self._first.compute_bitmask()
        if self._first.is_error():
            raise ValueError(_in_words(self._first.get_error()))
        self._eos_ids = frozenset(library.eos_tokens)
        self._mask_bytes = -(-vocab_size // 32) * 4  # whole words of 32 bits

    def matcher(self) -> "LLFollower":
        return LLFollower(self._first.deep_copy(), self._eos_ids, self._mask_bytes)


class LLFollower:
    """Matcher of llguidance; see structure.Matcher for its methods."""

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int], mask_bytes: int) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._mask_bytes = mask_bytes

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        found = [self._matcher.compute_bitmask()[: self._mask_bytes]]
        if not drafted:
            return found
        ahead = self._matcher.deep_copy()
        for token in drafted:
            if (
                ahead.validate_tokens([token]) == 0
                or not ahead.consume_token(token)
                or ahead.is_stopped()
            ):
                break
            found.append(ahead.compute_bitmask()[: self._mask_bytes])
        return found

    def fits(self, tokens: Sequence[int], free: bool = False) -> int:
        if not free:
            return self._matcher.validate_tokens(list(tokens))
        ahead = self._matcher.deep_copy()
        for n, token in enumerate(tokens):
            if ahead.validate_tokens([token]) == 0 or not ahead.consume_token(token):
                return n
            if ahead.is_stopped():
                return n + 1
            if ahead.compute_ff_tokens():
                return n
        return len(tokens)

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        tokens = self._matcher.compute_ff_tokens()
        for i, token in enumerate(tokens):
            if token in self._eos_ids:
                return tokens[:i]
        return tokens

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        return _in_words(self._matcher.get_error()) if self._matcher.is_error() else ""


def _in_words(text: str) -> str:
    """Return the first line of the library's message, at most 300 characters, or words for it."""
    line = text.strip().partition("\n")[0][:300]
    return EMPTY if line == EMPTY_MASK else line
