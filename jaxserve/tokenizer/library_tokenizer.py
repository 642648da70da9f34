"""JsonTokenizer: a tokenizer.json in the Hugging Face tokenizers library."""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache, cached_property
from itertools import takewhile

import tokenizers

from jaxserve.tokenizer.beside_json import JSON_FILE, apply_settings, as_special
from jaxserve.tokenizer.json_decoder import bytes_of_letter, is_byte_level
from jaxserve.tokenizer.library_text import encoded
from jaxserve.tokenizer.marked_text import MarkedTextEncoder
from jaxserve.tokenizer.model_ids import split_at
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.settings import SETTINGS_FILE, TokenizerSettings, affix
from jaxserve.tokenizer.special import require_text
from jaxserve.tokenizer.utf8 import readable, require_unicode, text_of

# Byte tokens that are no character by themselves.
CHARACTER_PART = re.compile("<0x([89A-Fa-f][0-9A-Fa-f])>")


class JsonTokenizer:
    """A Tokenizer over the tokenizers library.

    Special tokens are the added tokens that the file, or one beside it, marks as special.

    Args:
        library: The library's tokenizer, which is changed here.
        fields: The parsed tokenizer.json.
        settings: What the files beside it say.
        model_ids: Number of ids of the model, see `load_tokenizer`.

    Raises:
        TokenizerError: The settings name tokens that the file lacks, its decoder is not supported,
            or text cannot be spelled with the model's ids.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        fields: dict,
        settings: TokenizerSettings,
        model_ids: int | None,
    ) -> None:
        special = apply_settings(library, fields, settings)
        library.no_truncation()  # some files would shorten prompts silently
        library.no_padding()
        library.encode_special_tokens = True  # names of special tokens in a text are text
        self._library = library
        self._byte_level = is_byte_level(fields.get("decoder"))
        self._bytes_of_letter = bytes_of_letter()
        self._unknown = _unknown_id(library, fields["model"])
        ids = library.get_vocab()
        affixes = _post_processor_affixes(library)
        self._missing = split_at(model_ids, ids, added_names(library), JSON_FILE)
        self._hide_missing(fields["model"])
        self.vocab_size: int = max(ids.values() - self._missing.names.keys(), default=-1) + 1
        self._read_added_tokens(special)
        self._read_affixes(ids, settings, *affixes)
        self._spelled = cache(self._spell)  # called for every token of every stream

    def _hide_missing(self, model: dict) -> None:
        """Make names of missing tokens text; the library reads names of special tokens as text.

        Raises:
            TokenizerError: Text cannot be spelled without one of the tokens.
        """
        names = self._missing.names
        added = self._library.get_added_tokens_decoder()
        found = [token for id, token in added.items() if id in names and not token.special]
        if found:
            self._library.add_tokens([as_special(token) for token in found])
        if self._byte_level or model.get("byte_fallback"):
            return  # any text can be spelled
        if self._unknown in names:
            raise self._missing.needed(names[self._unknown], JSON_FILE)
        for token in found:
            if not self._spells(token.content):
                raise self._missing.needed(token.content, JSON_FILE)

    def _spells(self, name: str) -> bool:
        """Return whether text keeps the name of a missing token, if it is a letter or white space.

        Longer names are spelled by their letters, as any text.
        """
        if len(name) > 1 and not name.isspace():
            return True
        ids = encoded(self._library, name)
        lost = self._missing.names.keys() | {self._unknown}
        return bool(ids) and lost.isdisjoint(ids)

    def _read_added_tokens(self, special: Set[str]) -> None:
        """Tell special tokens, and those whose names are in `special`, from other added tokens."""
        added = {
            token_id: token
            for token_id, token in self._library.get_added_tokens_decoder().items()
            if token_id not in self._missing.names
        }
        self._added = added
        self._special = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special or token.content in special
        }
        self._control = {id: name for id, name in self._special.items() if id != self._unknown}
        self._control |= self._missing.names
        self.special_tokens = {name: token_id for token_id, name in self._special.items()}
        self.added_tokens = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id not in self._special
        }

    def _read_affixes(
        self,
        ids: Mapping[str, int],
        settings: TokenizerSettings,
        prefix: tuple[int, ...],
        suffix: tuple[int, ...],
    ) -> None:
        """Read the tokens that begin and end a text; `ids` has the missing tokens too."""
        bos_id = _special_id(ids, settings.bos_token, prefix[0] if prefix else None)
        eos_id = _special_id(ids, settings.eos_token, None)
        self._prefix = affix(settings.add_bos_token, bos_id, prefix, "add_bos_token")
        self._suffix = affix(settings.add_eos_token, eos_id, suffix, "add_eos_token")
        self._missing.require_absent(self._prefix, "add_bos_token")
        self._missing.require_absent(self._suffix, "add_eos_token")
        self.bos_id = self._missing.of_model(bos_id)
        eos_id = self._missing.of_model(eos_id)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)

    @property
    def missing_tokens(self) -> Mapping[str, int]:
        return self._missing.ids

    def token_id(self, name: str) -> int | None:
        return self._missing.of_model(self._library.token_to_id(name))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        require_unicode(text)
        ids = encoded(self._library, text)
        require_text(ids, self._control)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_special(self, text: str) -> list[int]:
        require_unicode(text)
        self._missing.require_unwritten(text)
        return self._marked.encode(text)

    def encode_inner(self, text: str) -> list[int]:
        require_unicode(text)
        return self._marked.encode_part(text, False)

    @cached_property
    def _marked(self) -> MarkedTextEncoder:
        return MarkedTextEncoder(self._library, self._added, self._control)

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(self, ids)

    def token_text(self, token_id: int) -> str:
        if self._token(token_id) is None:
            return f"<id {token_id}>"
        return self._special.get(token_id) or readable(self.token_bytes(token_id)[0])

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        if not 0 <= token_id < self.vocab_size:
            return b"", opening
        return self._spelled(token_id, opening)

    def _spell(self, token_id: int, opening: bool) -> tuple[bytes, bool]:
        token = self._token(token_id)
        if token is None or token_id in self._special:
            return b"", opening
        if self._byte_level:
            return self._byte_level_bytes(token), False
        part = CHARACTER_PART.fullmatch(token)
        if part:
            return bytes([int(part[1], 16)]), False
        first = self._library.decode([token_id])
        if opening:
            return first.encode("utf-8"), False
        # Supported decoders treat every token by itself and strip only at the beginning of a text:
        # the second copy of the token is whole.
        twice = self._library.decode([token_id, token_id])
        return twice[len(first) :].encode("utf-8"), False

    def _token(self, token_id: int) -> str | None:
        return self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _byte_level_bytes(self, token: str) -> bytes:
        """Return a token's bytes; an added token with letters that stand for no byte is text."""
        if all(letter in self._bytes_of_letter for letter in token):
            return bytes(self._bytes_of_letter[letter] for letter in token)
        return token.encode("utf-8")


def added_names(library: tokenizers.Tokenizer) -> Iterable[str]:
    """Return the names of the added tokens."""
    return (token.content for token in library.get_added_tokens_decoder().values())


def _special_id(ids: Mapping[str, int], name: str | None, default: int | None) -> int | None:
    if name is None:
        return default
    token_id = ids.get(name)
    if token_id is None:
        raise TokenizerError(
            f"{SETTINGS_FILE}: {name!r} is not in {JSON_FILE}; correct it or copy both files again"
        )
    return token_id


def _unknown_id(library: tokenizers.Tokenizer, model: dict) -> int | None:
    """Return the token for unknown text; Unigram models give its id, the others its name."""
    name = model.get("unk_token")
    return model.get("unk_id") if name is None else library.token_to_id(name)


def _post_processor_affixes(
    library: tokenizers.Tokenizer,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that the post-processor adds before and after a text."""
    try:
        encoding = library.encode("a", add_special_tokens=True)
    except Exception as error:  # the library raises plain Exception for everything
        raise TokenizerError(f"{JSON_FILE}: cannot encode text ({error}); copy it again") from None
    marks = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
    prefix = [token_id for token_id, _ in takewhile(lambda mark: mark[1], marks)]
    suffix = [
        token_id for token_id, _ in takewhile(lambda mark: mark[1], reversed(marks[len(prefix) :]))
    ]
    return tuple(prefix), tuple(reversed(suffix))
