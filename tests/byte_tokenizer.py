"""A tokenizer that a person can check by hand: one token for each UTF-8 byte."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxserve.tokenizer import MARK


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 is BOS, which encode() adds, and 257 is EOS."""

    vocab_size = 258
    bos_id = 256
    eos_ids = (257,)
    special_tokens = MappingProxyType({"<bos>": 256, "<eos>": 257})
    added_tokens: Mapping[str, int] = MappingProxyType({})
    missing_tokens: Mapping[str, int] = MappingProxyType({})

    def token_id(self, name: str) -> int | None:
        return self.special_tokens.get(name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [*text.encode("utf-8")]
        return [self.bos_id, *ids] if add_special_tokens else ids

    def encode_special(self, text: str) -> list[int]:
        parts = re.split("(<bos>|<eos>)", text)
        return [i for part in parts for i in self._encode_part(part)]

    def encode_inner(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def _encode_part(self, part: str) -> list[int]:
        named = self.special_tokens.get(part)
        return list(part.replace(MARK, "").encode("utf-8")) if named is None else [named]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in ids if token_id < 256).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        if token_id >= 256:
            return {256: "<bos>", 257: "<eos>"}.get(token_id, f"<id {token_id}>")
        return chr(token_id) if token_id < 128 else f"<0x{token_id:02X}>"

    def token_bytes(self, token_id: int, opening: bool = False) -> tuple[bytes, bool]:
        return (bytes([token_id]), False) if token_id < 256 else (b"", opening)
