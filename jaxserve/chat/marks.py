"""Marks of turns that a chat template writes, compared with what the tokenizer makes of them."""

import re
from collections.abc import Mapping
from typing import Final

from jaxserve.chat.source import ChatTemplate
from jaxserve.tokenizer import Tokenizer, TokenizerError
from jaxserve.tokenizer.special import NO_WORD

# Text that looks like a mark: <|user|>, <｜User｜>, <<SYS>>, [INST], <start_of_turn>.
MARK_LIKE: Final = re.compile(
    r"<\|[^<>|\s'\"~+{}]+\|>|<｜[^<>｜\s'\"~+{}]+｜>|<</?\w+>>|\[/?[A-Z][A-Z_]+\]|<(?:start|end)_of_\w+>"
)
ROLE: Final = re.compile(r"(?<!\w)(?:system|developer|user|assistant|tool)(?!\w)", re.IGNORECASE)


def is_mark_like(name: str) -> bool:
    """Return whether a token looks like a mark of a template: <|user|>, [INST], <role:user>."""
    if MARK_LIKE.fullmatch(name):
        return True
    return bool(ROLE.search(name) and NO_WORD.search(name))


def notes_on_marks(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a line for each kind of mark in a template's source that is not read as its token.

    A mark that is no token at all is text: what a client writes is then not told from what the
    template writes.
    """
    source = template.source
    ignored = template.ignored
    missing = {name: i for name, i in tokenizer.missing_tokens.items() if NO_WORD.search(name)}
    known = {**ignored, **tokenizer.special_tokens, **tokenizer.added_tokens}
    marks = {name for name in known if name in source and NO_WORD.search(name)}
    marks |= set(MARK_LIKE.findall(source))
    marks -= missing.keys()
    ids = {mark: ignored.get(mark, tokenizer.token_id(mark)) for mark in marks}
    tokens = {mark: id for mark, id in ids.items() if id is not None}
    spelled = {mark: id for mark, id in tokens.items() if not _is_read(tokenizer, mark, id)}
    text = [mark for mark, id in ids.items() if id is None]
    named = _named(template)
    refused = {name: id for name, id in missing.items() if name in named or name in source}
    notes = list[str]()
    if spelled:
        notes.append(
            f"the template writes {_with_ids(spelled)}, which the files of the tokenizer declare "
            "as tokens, but inside a conversation they are read as text, which a client can imitate"
        )
    if text:
        names = ", ".join(map(repr, sorted(text)))
        notes.append(
            f"the template writes {names}, which are no tokens of this tokenizer but text, which a "
            f"client can imitate"
        )
    if refused:
        notes.append(
            f"the template has {_with_ids(refused)}, which the model does not have: conversations "
            f"in which it writes them are refused"
        )
    return tuple(notes)


def _named(template: ChatTemplate) -> set[str]:
    """Return the names of tokens that a template's variables stand for, of those that it has."""
    names = set[str]()
    for variable, tokens in template.tokens.items():
        if variable in template.source:
            names.update([tokens] if isinstance(tokens, str) else tokens)
    return names


def _with_ids(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{name!r} ({tokens[name]})" for name in sorted(tokens))


def _is_read(tokenizer: Tokenizer, mark: str, id: int) -> bool:
    """Return whether a mark is read as the token, on a line of its own in a conversation."""
    try:
        return id in tokenizer.encode_special(f"a\n{mark}\na")
    except TokenizerError:  # the vocabulary itself spells another token's name
        return False
