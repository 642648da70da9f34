"""Reads tokenizer.model: a SentencePiece model (Kudo and Richardson 2018)."""

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from jaxserve.tokenizer.protocol import MARK, TokenizerError
from jaxserve.tokenizer.sentencepiece_proto import rules_of, user_defined_ids, without_dummy_prefix
from jaxserve.tokenizer.settings import SETTINGS_FILE, TokenizerSettings, affix
from jaxserve.tokenizer.special import NamedToken, NameSplitter
from jaxserve.tokenizer.utf8 import readable, require_unicode, text_of

MODEL_FILE = "tokenizer.model"
SPACE = "\u2581"  # SentencePiece's visible space


class SentencePieceTokenizer:
    """A Tokenizer over a SentencePiece model.

    Unknown pieces decode to the model's own sign for them. A denormalizer (rules that rewrite
    decoded text) is not applied.
    """

    def __init__(self, processor: SentencePieceProcessor, settings: TokenizerSettings) -> None:
        """Create a tokenizer; TokenizerError if the settings name tokens that the model lacks."""
        self._processor = processor
        self._legacy = bool(settings.legacy)
        self.vocab_size: int = processor.vocab_size()
        self.bos_id = _special_id(processor, settings.bos_token, processor.bos_id())
        eos_id = _special_id(processor, settings.eos_token, processor.eos_id())
        self.eos_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        default_prefix = () if self.bos_id is None else (self.bos_id,)
        self._prefix = affix(settings.add_bos_token, self.bos_id, default_prefix, "add_bos_token")
        self._suffix = affix(settings.add_eos_token, eos_id, (), "add_eos_token")
        control = filter(processor.is_control, range(self.vocab_size))
        self.special_tokens = {processor.id_to_piece(token_id): token_id for token_id in control}
        self._unknown = processor.decode([processor.unk_id()]).encode("utf-8")
        self._rules = rules_of(processor.serialized_model_proto())
        self._spelled = cache(self._spell)  # called for every token of every stream

    def encode(self, text: str) -> list[int]:
        require_unicode(text)
        return [*self._prefix, *self._processor.encode(text), *self._suffix]

    @property
    def added_tokens(self) -> dict[str, int]:
        """User-defined symbols of the model, which it never splits."""
        return self._user_defined

    @cached_property
    def _user_defined(self) -> dict[str, int]:
        ids = user_defined_ids(self._processor.serialized_model_proto())
        return {self._processor.id_to_piece(token_id): token_id for token_id in ids}

    @cached_property
    def _splitter(self) -> NameSplitter:
        return NameSplitter(
            NamedToken(name, token_id) for name, token_id in self.special_tokens.items()
        )

    @cached_property
    def _inner_processor(self) -> SentencePieceProcessor:
        """Processor of text that continues another and gets no dummy space."""
        model = self._processor.serialized_model_proto()
        return SentencePieceProcessor(model_proto=without_dummy_prefix(model))

    def encode_special(self, text: str) -> list[int]:
        require_unicode(text)
        return self._splitter.encode(text, self._encode_part)

    def encode_inner(self, text: str) -> list[int]:
        require_unicode(text)
        return self._inner_processor.encode(text)

    def _encode_part(self, part: str, opening: bool) -> list[int]:
        processor = self._processor if opening or self._legacy else self._inner_processor
        text = part.replace(MARK, "")
        if not any(name in text for name in self._user_defined):
            return processor.encode(text)
        # The library always takes a symbol's name for the symbol: names with a mark are cut there.
        first, *others = part.split(MARK)
        ids = list(processor.encode(first))
        for other in others:
            ids += self._inner_processor.encode(other)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return text_of(self, ids)

    def token_text(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            return f"<id {token_id}>"
        if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
            return self._processor.id_to_piece(token_id)
        return readable(self.token_bytes(token_id)[0])

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        if not 0 <= token_id < self.vocab_size:
            return b"", opening
        return self._spelled(token_id, opening)

    def _spell(self, token_id: int, opening: bool) -> tuple[bytes, bool]:
        if self._processor.is_control(token_id):
            return b"", opening
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


def load_sentencepiece(path: Path, settings: TokenizerSettings) -> SentencePieceTokenizer:
    """Load a tokenizer.model.

    Raises:
        TokenizerError: The file is no SentencePiece model, or lacks tokens that the settings name.
    """
    try:
        model = path.read_bytes()
        if not model:  # SentencePiece accepts an empty file and prints errors later
            raise RuntimeError("it is empty")
        processor = SentencePieceProcessor(model_proto=model)
        _require_utf8(processor)
        return SentencePieceTokenizer(processor, settings)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{path}: not a SentencePiece model ({reason}); copy the file again"
        ) from None


def _require_utf8(processor: SentencePieceProcessor) -> None:
    """Raise RuntimeError for a piece that is not UTF-8, which the library does not look for.

    Otherwise the first answer with this piece would fail.
    """
    for token_id in range(processor.vocab_size()):
        try:
            processor.id_to_piece(token_id)
        except UnicodeDecodeError:
            raise RuntimeError(f"piece {token_id} is not UTF-8") from None


def _special_id(processor: SentencePieceProcessor, name: str | None, default: int) -> int | None:
    """Return the id of the token that the settings name, or the default; -1 stands for none."""
    if name is None:
        return default if default >= 0 else None
    token_id = processor.piece_to_id(name)
    if processor.is_unknown(token_id) and name != processor.id_to_piece(token_id):
        raise TokenizerError(
            f"{SETTINGS_FILE}: {name!r} is not in {MODEL_FILE}; correct it or add a tokenizer.json"
        )
    return token_id
