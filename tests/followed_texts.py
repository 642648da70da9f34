"""Whether a text follows a JSON schema, as the grammar library judges it byte by byte."""

import json
from typing import Any

from jaxserve.structure import Structure
from jaxserve.structure.grammars import Grammars, LLGrammar
from tests.byte_tokenizer import ByteTokenizer

END = 257  # the end token of ByteTokenizer


def byte_grammars() -> Grammars:
    """Return a compiler of grammars for single bytes, which its user closes."""
    return Grammars(ByteTokenizer(), (END,), ByteTokenizer.vocab_size)  # type: ignore[arg-type]


def grammar_of(grammars: Grammars, schema: Any) -> LLGrammar:
    return grammars.compile(Structure.of("json_schema", json.dumps(schema)))


def follows(grammar: LLGrammar, text: str) -> bool:
    """Return whether a text may come out as a whole."""
    matcher = grammar.matcher()
    tokens = list(text.encode())
    return (
        matcher.fits(tokens) == len(tokens)
        and all(map(matcher.accept, tokens))
        and may_end(matcher)
    )


def may_end(matcher: Any) -> bool:
    mask = int.from_bytes(matcher.masks()[0], "little")
    return matcher.ended or bool(mask >> END & 1)
