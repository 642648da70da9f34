"""Text to token ids and back, and decoding of a stream of ids; imports no jax."""

from jaxserve.tokenizer.loading import load_tokenizer
from jaxserve.tokenizer.protocol import MARK, Tokenizer, TokenizerError
from jaxserve.tokenizer.stream import StreamDecoder, completion_text

__all__ = [
    "MARK",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "completion_text",
    "load_tokenizer",
]
