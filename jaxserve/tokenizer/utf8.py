"""Text and its UTF-8 bytes, when the bytes come in pieces that need not be whole characters."""

import codecs
import re
from collections.abc import Sequence

from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError

LONGEST_UNFINISHED = 3  # bytes: a character has at most four


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ids from its beginning; ill-formed bytes become U+FFFD."""
    return joined_bytes(tokenizer, ids).decode("utf-8", "replace")


def joined_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """The bytes of the text of ids from its beginning."""
    pieces, opening = [], True
    for token_id in ids:
        piece, opening = tokenizer.token_bytes(token_id, opening)
        pieces.append(piece)
    return b"".join(pieces)


def unfinished(data: bytes) -> bytes:
    """The end of data that begins a character and lacks its last bytes: 0 to 3 bytes.

    UTF-8 synchronises itself: a first byte is never taken for a later one, so the last three bytes
    decide.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-LONGEST_UNFINISHED:])
    return decoder.getstate()[0]


def readable(data: bytes) -> str:
    """data as text, with each byte that is no part of a whole character written <0xNN>."""
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)


def require_unicode(text: str) -> None:
    """Raises TokenizerError if text holds half a surrogate pair (JSON can write one), which has no
    UTF-8 form.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text: character {error.start} is half a surrogate pair "
            f"(U+{ord(text[error.start]):04X}); "
            "send both halves or neither"
        ) from None
