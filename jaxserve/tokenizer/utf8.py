"""Text and its UTF-8 bytes where tokens need not be whole characters."""

import codecs
import re
from collections.abc import Sequence

from jaxserve.tokenizer.protocol import Tokenizer, TokenizerError

LONGEST_UNFINISHED = 3  # bytes; a character has at most four


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Decode ids as a whole text; ill-formed bytes become U+FFFD."""
    return joined_bytes(tokenizer, ids).decode("utf-8", "replace")


def joined_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> bytes:
    """Return the bytes of ids as a whole text."""
    pieces = list[bytes]()
    opening = True
    for token_id in ids:
        piece, opening = tokenizer.token_bytes(token_id, opening)
        pieces.append(piece)
    return b"".join(pieces)


def unfinished(data: bytes) -> bytes:
    """Return the 0 to 3 bytes at the end of data that begin a character without completing it.

    UTF-8 is self-synchronizing: a first byte is never taken for a later one, so that the last three
    bytes decide.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-LONGEST_UNFINISHED:])
    return decoder.getstate()[0]


def readable(data: bytes) -> str:
    """Return data as text; bytes that are no part of a whole character are written <0xNN>."""
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)


def require_unicode(text: str) -> None:
    """Raise TokenizerError if text holds half a surrogate pair, which has no UTF-8 form.

    JSON can write one.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"character {error.start} is half a surrogate pair "
            f"(U+{ord(text[error.start]):04X}); send both halves or neither"
        ) from None
