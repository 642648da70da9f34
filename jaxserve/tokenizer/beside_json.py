"""Applies the files beside a tokenizer.json to it, as transformers 5 does."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import tokenizers

from jaxserve.tokenizer.declared import DeclaredToken
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.settings import JSON_FILE, SETTINGS_FILE, TokenizerSettings

TOKEN_FIELDS: Final = frozenset(
    ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
)


def apply_settings(
    library: tokenizers.Tokenizer, fields: Mapping[str, Any], settings: TokenizerSettings
) -> frozenset[str]:
    """Add the declared tokens to a tokenizer; return the names of those that are special.

    `fields` is the parsed tokenizer.json. A token that the tokenizer has already keeps its id and
    takes the declared properties. A new one gets the id after the last.

    Raises:
        TokenizerError: A token would get another id than declared, or the files contradict each
            other.
    """
    _check_own_tokens(fields)
    _check_prefix_space(library, settings)
    _add_declared(library, fields, settings)
    special = _add_listed(library, settings)
    _check_forms(library)
    return special.union(token.name for token in settings.declared if token.special)


def _add_declared(
    library: tokenizers.Tokenizer, fields: Mapping[str, Any], settings: TokenizerSettings
) -> None:
    """Add the tokens that are declared with an id."""
    own = {token["id"] for token in fields.get("added_tokens", [])}
    declared = settings.declared
    _add(library, (token for token in declared if settings.overrides or token.id not in own))
    for token in declared:
        token.require_id(library.token_to_id(token.name), JSON_FILE)


def _add_listed(library: tokenizers.Tokenizer, settings: TokenizerSettings) -> frozenset[str]:
    """Add the tokens that are only named; return the names of all of them that are special."""
    added = {token.content: token for token in library.get_added_tokens_decoder().values()}
    listed = [t for t in settings.listed if settings.adds(t.name, _has(library, t.name))]
    new = [token for token in listed if token.name not in added]
    _add(library, new)
    named = [added[name] for name in settings.names.values() if name in added and len(name) > 1]
    if changed := [as_special(token) for token in named if not token.special]:
        library.add_tokens(changed)
    special = {token.name for token in new if token.special}
    return frozenset(special.union(token.content for token in named))


def _has(library: tokenizers.Tokenizer, name: str) -> bool:
    return library.token_to_id(name) is not None


def _add(library: tokenizers.Tokenizer, tokens: Iterable[DeclaredToken]) -> None:
    tokens = list(tokens)
    if not tokens:
        return  # the library would build its search anew
    new = [token.name for token in tokens if not _has(library, token.name)]
    taken = set(library.get_vocab().values()) if new else set[int]()
    library.add_tokens([_added_token(token, token.name, token.special) for token in tokens])
    for name in new:  # the library counts tokens, also where ids are left out
        if library.token_to_id(name) in taken:
            raise TokenizerError(
                f"{JSON_FILE}: its ids have gaps, so that there is none for {name!r}, which a "
                f"file beside it declares; add the token to {JSON_FILE}"
            )


def as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """Return a token with the same flags that is special."""
    return _added_token(token, token.content, special=True)


def _added_token(
    token: DeclaredToken | tokenizers.AddedToken, name: str, special: bool
) -> tokenizers.AddedToken:
    """Return a token for the library, with the flags of another."""
    return tokenizers.AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=special,
    )


def _check_own_tokens(fields: Mapping[str, Any]) -> None:
    """Raise TokenizerError for a field of tokenizer.json's added tokens that nobody reads."""
    for token in fields.get("added_tokens", []):
        unknown = sorted(set(token) - TOKEN_FIELDS)
        if unknown:
            raise TokenizerError(
                f"{JSON_FILE}: the added token {token['content']!r} has the field {unknown[0]!r}, "
                f"which is not understood; remove it if it does not count"
            )


def _check_forms(library: tokenizers.Tokenizer) -> None:
    """Raise TokenizerError for a token that would be found everywhere in normalized text."""
    if library.normalizer is None:
        return
    for token in library.get_added_tokens_decoder().values():
        if token.normalized and not library.normalizer.normalize_str(token.content):
            raise TokenizerError(
                f"{JSON_FILE}: the normalizer leaves nothing of the added token {token.content!r}; "
                f"set its field normalized to false"
            )


def _check_prefix_space(library: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Raise TokenizerError where add_prefix_space and tokenizer.json say different things."""
    wanted = settings.add_prefix_space
    if wanted is None or wanted == _adds_space(library):
        return
    does = "adds no space" if wanted else "adds a space"
    raise TokenizerError(
        f"{SETTINGS_FILE}: add_prefix_space is {str(wanted).lower()}, but {JSON_FILE} {does} "
        f"before a text; remove the setting, or copy both files again"
    )


def _adds_space(library: tokenizers.Tokenizer) -> bool:
    text = "a"
    if library.normalizer:
        text = library.normalizer.normalize_str(text)
    if library.pre_tokenizer:
        text = "".join(piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)[:1])
    return text != "a"
