"""Grammars compiled by llguidance, for one model's vocabulary."""

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from jaxserve.errors import GrammarError, NotBuiltInError, RequestError
from jaxserve.line_process import LineProcess
from jaxserve.structure.spec import Structure
from jaxserve.tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WORKER: Final = Path(__file__).with_name("worker.py")
PACKAGE: Final = "llguidance"
MAX_MEMORY: Final = 1024 * 2**20  # of the worker
MAX_ANSWER_BYTES: Final = 16 * 2**20
# Work that one grammar, and the mask of one token, may take: the library's own defaults are generous for a server.
PARSER_LIMITS: Final = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
ENTRY_BYTES: Final = 64 * 1024  # of a compiled grammar, however short its text
BYTES_PER_LETTER: Final = 128  # and for each byte of its text: more than was measured


@dataclass(frozen=True)
class Bounds:
    """max_bytes: of a grammar's text. seconds: to check it. cache_bytes: of compiled grammars that are kept."""

    max_bytes: int = 64 * 1024
    seconds: float = 2.0
    cache_bytes: int = 64 * 2**20


DEFAULT_BOUNDS: Final = Bounds()


class Grammars:
    """Compiles grammars, and keeps those that were used last. For use from several threads.

    A process of its own compiles a grammar first, under bounds of time and memory; what ends well there is compiled
    here, without the interpreter's lock. vocab_size: of the model, which may be more than the tokenizer's.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: tuple[int, ...], vocab_size: int, bounds: Bounds = DEFAULT_BOUNDS
    ) -> None:
        self._tokenizer, self._eos_ids, self._vocab_size = tokenizer, eos_ids, vocab_size
        self.bounds = bounds
        seconds = str(self.bounds.seconds)
        command = [sys.executable, "-P", str(WORKER), seconds, str(MAX_MEMORY), json.dumps(PARSER_LIMITS)]
        self._worker = LineProcess(command, self.bounds.seconds, MAX_ANSWER_BYTES)
        self._compiling, self._lock = Lock(), Lock()
        self._kept: OrderedDict[tuple[str, str], LLGrammar] = OrderedDict()

    def compile(self, structure: Structure) -> "LLGrammar":
        """GrammarError says what is wrong with it, or that it takes too much; NotBuiltInError: without the library."""
        if find_spec(PACKAGE) is None:
            raise NotBuiltInError(f"structured output needs the package {PACKAGE}, which is not installed here")
        size = len(structure.text.encode())
        if size > self.bounds.max_bytes:
            limit = self.bounds.max_bytes
            raise RequestError(structure.field, f"has {size} bytes; the limit is {limit} (--max-grammar-bytes)")
        with self._compiling:  # one after the other: whoever asks for the same one waits for it
            if found := self.kept(structure):
                return found
            made = self._compiled(structure)
            with self._lock:
                self._kept[structure.kind, structure.text] = made
                self._evict()
            return made

    def kept(self, structure: Structure) -> "LLGrammar | None":
        """One that was compiled before; waits for nobody."""
        with self._lock:
            found = self._kept.get((structure.kind, structure.text))
            if found:
                self._kept.move_to_end((structure.kind, structure.text))
            return found

    def close(self) -> None:
        """End the process; a later use starts another."""
        self._worker.close()

    def _compiled(self, structure: Structure) -> "LLGrammar":
        try:
            answer = self._worker.ask(json.dumps({"kind": structure.kind, "text": structure.text}))
        except ChildProcessError:
            raise NotBuiltInError(f"the process that checks grammars does not start (does {PACKAGE} work?)") from None
        if answer is None:
            problem = f"takes more than {self.bounds.seconds:g} s or too much memory to compile (--grammar-seconds)"
            raise GrammarError(structure.field, problem)
        if "error" in answer:
            raise GrammarError(structure.field, f"cannot be used: {answer['error']}")
        try:
            return LLGrammar(self._library, answer["grammar"], self._vocab_size, len(structure.text.encode()))
        except ValueError as error:
            raise GrammarError(structure.field, f"cannot be used: {error}") from None

    @cached_property
    def _library(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        vocabulary = _Vocabulary(self._tokenizer, self._eos_ids, self._vocab_size)
        ends = list(self._eos_ids) or vocabulary.eos_token_id
        return LLTokenizer(vocabulary, eos_token=ends, slices=LLTokenizer.json_slices())  # type: ignore[arg-type]

    def _evict(self) -> None:
        """The newest one stays, whatever it takes."""
        while len(self._kept) > 1 and sum(grammar.bytes for grammar in self._kept.values()) > self.bounds.cache_bytes:
            self._kept.popitem(last=False)


class _Vocabulary:
    """A tokenizer as llguidance wants it: what TokenizerWrapper of its Python package has."""

    is_tokenizer_wrapper = True
    bos_token_id = None  # no text begins with it

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token)[0] for token in range(size)]
        for name, token in tokenizer.special_tokens.items():
            self.tokens[token] = name.encode()
        self.special_token_ids = sorted(tokenizer.special_tokens.values())
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        if not eos_ids:  # the library insists on one: behind all words of the mask
            self.tokens += [b""] * (-size % 32)
            self.eos_token_id = len(self.tokens)
            self.special_token_ids.append(self.eos_token_id)
            self.tokens.append(b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        """How a text goes on; nothing for what the vocabulary cannot spell."""
        try:
            return self._tokenizer.encode_inner(text if isinstance(text, str) else text.decode())
        except (TokenizerError, UnicodeDecodeError):
            return []


class LLGrammar:
    """A structure.Grammar. bytes: about so many of memory. ValueError with the library's words when it refuses."""

    def __init__(self, library: "LLTokenizer", grammar: str, vocab_size: int, letters: int) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits: Any = PARSER_LIMITS
        self._first = LLMatcher(library, grammar, log_level=0, limits=LLParserLimits(**limits))
        if not self._first.is_error():
            self._first.compute_bitmask()  # the dearest of all masks: most of the lexer is built with it
        if self._first.is_error():
            raise ValueError(_first_line(self._first.get_error()))
        self.bytes = ENTRY_BYTES + BYTES_PER_LETTER * letters
        self._eos_ids, self._mask_bytes = frozenset(library.eos_tokens), -(-vocab_size // 32) * 4

    def matcher(self) -> "LLFollower":
        return LLFollower(self._first.deep_copy(), self._eos_ids, self._mask_bytes)


class LLFollower:
    """A structure.Matcher."""

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int], mask_bytes: int) -> None:
        self._matcher, self._eos_ids, self._mask_bytes = matcher, eos_ids, mask_bytes

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        found = [self._matcher.compute_bitmask()[: self._mask_bytes]]
        if not drafted:
            return found
        ahead = self._matcher.deep_copy()
        for token in drafted:
            if ahead.validate_tokens([token]) == 0 or not ahead.consume_token(token) or ahead.is_stopped():
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
        end = next((i for i, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        return tokens[:end]

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
