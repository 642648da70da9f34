"""Writes a vocabulary of byte pairs in the order of their ranks (tiktoken) as tokenizer.json.

A text is split by a pattern, and in each part the pair of neighbours is joined whose joined bytes
have the lowest rank, until there is none (Sennrich et al. 2016). A part that is a token as a whole
is that token.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from jaxserve.tokenizer.json_decoder import bytes_of_letter
from jaxserve.tokenizer.protocol import TokenizerError

MAX_TOKENS: Final = 2**20
# Bytes of a token, and of all tokens together; Kimi's have at most 256, and 1.1 million.
MAX_LENGTH: Final = 2**10
MAX_BYTES: Final = 2**23
MAX_MERGES: Final = 2**22

# Step that spells the bytes of a text with a letter each, and its inverse.
BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}


@dataclass(frozen=True)
class BytePairs:
    """A vocabulary, and the special tokens around it."""

    source: str  # name of the file, for errors
    tokens: Sequence[bytes]  # in the order of their ranks, which are 0, 1 and so on
    pattern: str  # regular expression that splits a text
    special: Mapping[str, int]  # ids of special tokens by their names, which are text
    first_id: int = 0  # id of the token of rank 0
    bos_token: str | None = None  # special token that begins a text


def decoded(source: str, token: str) -> bytes:
    """Return the bytes that a file has in base64; TokenizerError for other text."""
    try:
        return base64.b64decode(token, validate=True)
    except (binascii.Error, ValueError) as error:
        raise TokenizerError(
            f"{source}: {token!r:.40} is no base64 ({error}); copy the file again"
        ) from None


def tokenizer_json(pairs: BytePairs) -> str:
    """Return a tokenizer.json that encodes as the vocabulary does.

    Raises:
        TokenizerError: The vocabulary is too large, lacks a byte, or has a token twice.
    """
    _check(pairs)
    letter_of = {byte: letter for letter, byte in bytes_of_letter().items()}
    spelled = ["".join(letter_of[byte] for byte in token) for token in pairs.tokens]
    vocab = {name: pairs.first_id + rank for rank, name in enumerate(spelled)}
    clash = sorted(vocab.keys() & pairs.special.keys())
    if clash:
        raise TokenizerError(
            f"{pairs.source}: {clash[0]!r} is a special token and a token of text, which "
            "tokenizer.json cannot tell apart"
        )
    before = {name: id for name, id in pairs.special.items() if id < pairs.first_id}
    fields: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(name, id) for name, id in sorted_by_id(pairs.special)],
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(pairs.pattern),
        "post_processor": _post_processor(pairs),
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": before | vocab,
            "merges": _merges(pairs.source, spelled),
        },
    }
    return json.dumps(fields, ensure_ascii=False)


def sorted_by_id(special: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return names and ids in the order of the ids."""
    return sorted(special.items(), key=lambda token: token[1])


def _check(pairs: BytePairs) -> None:
    count = len(pairs.tokens)
    if count > MAX_TOKENS:
        raise TokenizerError(f"{pairs.source}: {count} tokens; at most {MAX_TOKENS} are supported")
    longest = max(map(len, pairs.tokens), default=0)
    total = sum(map(len, pairs.tokens))
    if longest > MAX_LENGTH or total > MAX_BYTES:
        raise TokenizerError(
            f"{pairs.source}: tokens of up to {longest} and of {total} bytes together; at most "
            f"{MAX_LENGTH} and {MAX_BYTES} are supported"
        )
    _check_special(pairs)
    known = set(pairs.tokens)
    if len(known) < count:
        raise TokenizerError(f"{pairs.source}: has a token twice; copy the file again")
    lacking = [byte for byte in range(256) if bytes([byte]) not in known]
    if lacking:
        raise TokenizerError(
            f"{pairs.source}: lacks a token for {len(lacking)} of 256 bytes; copy the file again"
        )


def _merges(source: str, spelled: Sequence[str]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, in the order of the joined one's rank."""
    known = set(spelled)
    merges = list[tuple[str, str]]()
    for name in spelled:
        for at in range(1, len(name)):
            first = name[:at]
            second = name[at:]
            if first in known and second in known:
                merges.append((first, second))
        if len(merges) > MAX_MERGES:
            raise TokenizerError(
                f"{source}: more than {MAX_MERGES} pairs join to a token; copy the file again"
            )
    return merges


def _check_special(pairs: BytePairs) -> None:
    """Raise TokenizerError unless special tokens have all ids before or behind the vocabulary."""
    end = pairs.first_id + len(pairs.tokens)
    ids = sorted(pairs.special.values())
    before = [id for id in ids if id < pairs.first_id]
    behind = [id for id in ids if id >= end]
    wanted = [*range(pairs.first_id), *range(end, end + len(behind))]
    if before + behind != wanted or len(ids) != len(wanted):
        raise TokenizerError(
            f"{pairs.source}: two special tokens have one name or one id; copy the file again"
        )


def _added(name: str, id: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": name, **flags, "special": True}


def _pre_tokenizer(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return {"type": "Sequence", "pretokenizers": [split | {"invert": False}, BYTE_LEVEL]}


def _post_processor(pairs: BytePairs) -> dict[str, Any] | None:
    """Return the step that adds BOS to a text; None for a vocabulary without."""
    name = pairs.bos_token
    if name is None:
        return None
    begin = {"SpecialToken": {"id": name, "type_id": 0}}
    texts = [{"Sequence": {"id": part, "type_id": i}} for i, part in enumerate("AB")]
    token = {"id": name, "ids": [pairs.special[name]], "tokens": [name]}
    return {
        "type": "TemplateProcessing",
        "single": [begin, texts[0]],
        "pair": [begin, *texts],
        "special_tokens": {name: token},
    }
