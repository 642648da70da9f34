"""A tokenizer that a person can check by hand: one token for each UTF-8 byte."""

from collections.abc import Sequence


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is BOS, which encode() adds, and 257 is EOS."""

    vocab_size = 258
    bos_id = 256
    eos_ids = (257,)

    def encode(self, text: str) -> list[int]:
        return [self.bos_id, *text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        if token_id >= 256:
            return {256: "<bos>", 257: "<eos>"}.get(token_id, f"<id {token_id}>")
        return chr(token_id) if token_id < 128 else f"<0x{token_id:02X}>"

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        return (bytes([token_id]), False) if token_id < 256 else (b"", opening)
