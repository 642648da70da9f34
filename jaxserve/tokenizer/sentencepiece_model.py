"""Reads tokenizer.model: a SentencePiece model (Kudo and Richardson 2018)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jaxserve.tokenizer.beside_model import missing_tokens, named_id, piece_id, tokens_beside
from jaxserve.tokenizer.model_ids import MissingTokens
from jaxserve.tokenizer.protocol import MARK, TokenizerError
from jaxserve.tokenizer.sentencepiece_proto import (
    rules_of,
    user_defined_ids,
    with_control,
    with_dummy_prefix,
)
from jaxserve.tokenizer.settings import TokenizerSettings, affix
from jaxserve.tokenizer.special import NamedToken, NameSplitter, require_text
from jaxserve.tokenizer.utf8 import readable, require_unicode, text_of

SPACE = "\u2581"  # SentencePiece's visible space


class SentencePieceTokenizer:
    """A Tokenizer over a SentencePiece model.

    Unknown pieces decode to the model's own sign for them. A denormalizer (rules that rewrite
    decoded text) is not applied. `model_ids` is as in load_tokenizer.
    """

    def __init__(
        self,
        processor: SentencePieceProcessor,
        settings: TokenizerSettings,
        model_ids: int | None = None,
    ) -> None:
        """Create a tokenizer.

        Raises:
            TokenizerError: The settings name tokens that the model lacks, or text cannot be spelled
                with the ids.
        """
        declared = tokens_beside(processor, settings)
        bos_id = named_id(processor, declared, settings.bos_token, processor.bos_id())
        eos_id = named_id(processor, declared, settings.eos_token, processor.eos_id())
        default_prefix = () if bos_id is None else (bos_id,)
        self._prefix = affix(settings.add_bos_token, bos_id, default_prefix, "add_bos_token")
        self._suffix = affix(settings.add_eos_token, eos_id, (), "add_eos_token")
        missing = missing_tokens(processor, declared, model_ids)
        missing.require_absent(self._prefix, "add_bos_token")
        missing.require_absent(self._suffix, "add_eos_token")
        self._missing = missing
        self.bos_id = missing.of_model(bos_id)
        eos_id = missing.of_model(eos_id)
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        processor = _without_symbols(processor, missing)
        self._processor = processor
        pieces = processor.vocab_size()
        self._pieces = pieces if model_ids is None else min(pieces, model_ids)
        self._legacy = bool(settings.legacy)
        self.declared = {id: t for id, t in declared.items() if t.name not in missing.ids}
        self._declared_ids = {token.name: id for id, token in self.declared.items()}
        self._new = {id: t.name for id, t in self.declared.items() if id >= self._pieces}
        self.vocab_size: int = self._pieces + len(self._new)
        control = filter(processor.is_control, range(self._pieces))
        self.special_tokens = {processor.id_to_piece(token_id): token_id for token_id in control}
        self.special_tokens |= {t.name: id for id, t in self.declared.items() if t.special}
        self._special = {token_id: name for name, token_id in self.special_tokens.items()}
        self._unknown = processor.decode([processor.unk_id()]).encode("utf-8")
        self._rules = rules_of(self.model)
        self._spelled = cache(self._spell)  # called for every token of every stream

    @property
    def missing_tokens(self) -> Mapping[str, int]:
        return self._missing.ids

    def token_id(self, name: str) -> int | None:
        token_id = self._declared_ids.get(name, piece_id(self._processor, name))
        return token_id if token_id in range(self.vocab_size) else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        require_unicode(text)
        ids = self._plain_splitter.encode(text, self._encode_plain)
        require_text(ids, self._control)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    @property
    def added_tokens(self) -> dict[str, int]:
        """Tokens that are found in any text: symbols of the model, and those declared beside it."""
        return self._added

    @cached_property
    def _added(self) -> dict[str, int]:
        added = self.symbols | self._declared_ids
        return {name: token_id for name, token_id in added.items() if token_id not in self._special}

    @property
    def model(self) -> bytes:
        """The SentencePiece model in use, whose dummy prefix is as the settings say."""
        return self._processor.serialized_model_proto()

    @cached_property
    def symbols(self) -> dict[str, int]:
        ids = user_defined_ids(self.model)
        return {self._processor.id_to_piece(token_id): token_id for token_id in ids}

    @cached_property
    def _splitter(self) -> NameSplitter:
        named = {name: NamedToken(name, token_id) for name, token_id in self.special_tokens.items()}
        named |= {token.name: token.with_id(id) for id, token in self.declared.items()}
        # A name of one letter has no inside for a MARK, and so is always text.
        return NameSplitter(token for token in named.values() if len(token.name) > 1)

    @cached_property
    def _plain_splitter(self) -> NameSplitter:
        """Splitter at the declared tokens that are found in any text."""
        plain = [(id, token) for id, token in self.declared.items() if not token.special]
        return NameSplitter(token.with_id(id) for id, token in plain)

    @cached_property
    def _inner_processor(self) -> SentencePieceProcessor:
        """Processor of text that continues another and gets no dummy space."""
        return SentencePieceProcessor(model_proto=with_dummy_prefix(self.model, False))

    def encode_special(self, text: str) -> list[int]:
        require_unicode(text)
        self._missing.require_unwritten(text)
        return self._splitter.encode(text, self._encode_part)

    def encode_inner(self, text: str) -> list[int]:
        require_unicode(text)
        ids = self._inner_processor.encode(text)
        require_text(ids, self._control)
        return ids

    def _encode_plain(self, part: str, opening: bool) -> list[int]:
        processor = self._processor if opening or self._legacy else self._inner_processor
        return processor.encode(part)

    def _encode_part(self, part: str, opening: bool) -> list[int]:
        """Encode text between names, in which only symbols of the model that it has are tokens.

        The model takes the name of a symbol for the symbol, also with a MARK inside or with letters
        that its rules make equal. Then the text is cut at the marks.
        """
        ids = self._encode_plain(part.replace(MARK, ""), opening)
        written = [self.symbols[found[0]] for found in self._symbol_splitter.found(part)]
        if self._named_in(ids) == written:
            return ids
        first, *others = part.split(MARK)
        ids = self._encode_plain(first, opening)
        for other in others:
            ids += self._inner_processor.encode(other)
        unwritten = Counter(self._named_in(ids)) - Counter(written)
        require_text(unwritten, self._guarded)
        return ids

    def _named_in(self, ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in ids if token_id in self._guarded]

    @cached_property
    def _symbol_splitter(self) -> NameSplitter:
        named = [(name, id) for name, id in self.symbols.items() if id in self._guarded]
        return NameSplitter(NamedToken(name, id) for name, id in named)

    @cached_property
    def _guarded(self) -> dict[int, str]:
        """Names of tokens that text becomes only where it has the name."""
        named = {name: token_id for name, token_id in self.added_tokens.items() if len(name) > 1}
        unknown = self._processor.unk_id()
        ids = named | self.special_tokens
        return {token_id: name for name, token_id in ids.items() if token_id != unknown}

    @cached_property
    def _control(self) -> dict[int, str]:
        unknown = self._processor.unk_id()
        return {id: name for id, name in self._special.items() if id != unknown}

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(self, ids)

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            return f"<id {token_id}>"
        if token_id in self._special:
            return self._special[token_id]
        if token_id < self._pieces and self._processor.is_unknown(token_id):
            return self._processor.id_to_piece(token_id)
        return readable(self.token_bytes(token_id)[0])

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        if not 0 <= token_id < self.vocab_size:
            return b"", opening
        return self._spelled(token_id, opening)

    def _spell(self, token_id: int, opening: bool) -> tuple[bytes, bool]:
        if token_id in self._special:
            return b"", opening
        if token_id in self._new:
            return self._new[token_id].replace(SPACE, " ").encode("utf-8"), False
        if self._processor.is_unknown(token_id):
            return self._unknown, False
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[1:-1], 16)]), False
        if opening and (self._rules.dummy_prefix or self._rules.single_spaces):
            piece = piece.removeprefix(SPACE)
        # With single spaces all leading spaces are dropped, else only the first.
        still_opening = opening and self._rules.single_spaces and not piece
        return piece.replace(SPACE, " ").encode("utf-8"), still_opening


def load_sentencepiece(
    path: Path, settings: TokenizerSettings, model_ids: int | None = None
) -> SentencePieceTokenizer:
    """Load a tokenizer.model; `model_ids` is as in load_tokenizer.

    Raises:
        TokenizerError: The file is no SentencePiece model, or SentencePieceTokenizer refuses it.
    """
    try:
        model = path.read_bytes()
        if not model:  # SentencePiece accepts an empty file and prints errors later
            raise RuntimeError("it is empty")
        if settings.add_prefix_space is not None:
            model = with_dummy_prefix(model, settings.add_prefix_space)
        processor = SentencePieceProcessor(model_proto=model)
        _require_utf8(processor)
        return SentencePieceTokenizer(processor, settings, model_ids)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{path}: not a SentencePiece model ({reason}); copy the file again"
        ) from None


def _without_symbols(
    processor: SentencePieceProcessor, missing: MissingTokens
) -> SentencePieceProcessor:
    """Return a processor for which names of missing tokens are text."""
    if not missing.ids:
        return processor
    model = processor.serialized_model_proto()
    symbols = missing.names.keys() & user_defined_ids(model)
    return SentencePieceProcessor(model_proto=with_control(model, symbols))


def _require_utf8(processor: SentencePieceProcessor) -> None:
    """Raise RuntimeError for a piece that is not UTF-8, which the library does not look for.

    Otherwise the first answer with this piece would fail.
    """
    for token_id in range(processor.vocab_size()):
        try:
            processor.id_to_piece(token_id)
        except UnicodeDecodeError:
            raise RuntimeError(f"piece {token_id} is not UTF-8") from None
