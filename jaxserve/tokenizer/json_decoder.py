"""The decoder of a tokenizer.json: how its tokens spell text."""

import json

from jaxserve.tokenizer.beside_json import JSON_FILE
from jaxserve.tokenizer.protocol import TokenizerError


def is_byte_level(decoder: dict | None) -> bool:
    """Return whether tokens spell bytes by GPT-2's letters.

    Otherwise they spell text, in some vocabularies with byte tokens <0xNN>.

    Raises:
        TokenizerError: The text of a token would depend on the tokens around it.
    """
    decoder = decoder or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return True
    for step in steps:
        if not _is_local(step):
            raise TokenizerError(
                f"{JSON_FILE}: decoder {json.dumps(step)} is not supported; supported are "
                f"ByteLevel, or ByteFallback, Fuse, Metaspace, Replace of one character and Strip "
                f"of one at the start; use another tokenizer file"
            )
    return False


def _is_local(step: dict) -> bool:
    """Return whether a step treats each token by itself, but for a text's first character."""
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    if step["type"] == "Strip":
        return step["start"] <= 1 and step["stop"] == 0
    return step["type"] in ("ByteFallback", "Fuse", "Metaspace")


def bytes_of_letter() -> dict[str, int]:
    """Return the byte that each letter of GPT-2's alphabet (Radford et al. 2019) stands for.

    Printable Latin-1 characters stand for themselves, letters from U+0100 on for the other bytes.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
