"""Reads tiktoken.model, the tokenizer file of Kimi K2 and its successors."""

from pathlib import Path
from typing import Final

from jaxserve.tokenizer.byte_pairs import BytePairs, decoded
from jaxserve.tokenizer.protocol import TokenizerError
from jaxserve.tokenizer.settings import SETTINGS_FILE, TokenizerSettings

TIKTOKEN_FILE: Final = "tiktoken.model"
RESERVED: Final = 256  # ids behind the vocabulary, for special tokens
# Code beside the file, which is not run. It says how text is split.
KNOWN_CODE: Final = "tokenization_kimi.TikTokenTokenizer"
HAN: Final = r"\p{Han}"
# Letters that may begin a word, and those that may follow, but for Chinese ones.
UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
ENDING: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# As in o200k_base of OpenAI's tiktoken, but for runs of Chinese characters, which stand alone.
PATTERN: Final = "|".join(
    (
        rf"[{HAN}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_tiktoken(path: Path, settings: TokenizerSettings) -> BytePairs:
    """Read the vocabulary, and the special tokens that tokenizer_config.json declares behind it.

    Ids that it leaves out are called <|reserved_token_n|>.

    Raises:
        TokenizerError: The file is damaged, or no known code says how it splits text.
    """
    if settings.tokenizer_code != KNOWN_CODE:
        raise TokenizerError(
            f"{path}: auto_map of {SETTINGS_FILE} names {settings.tokenizer_code!r:.80}; how text "
            f"is split is known for {KNOWN_CODE} alone (use a folder with tokenizer.json)"
        )
    try:
        lines = path.read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: not readable ({error}); copy the file again") from None
    ranks = dict(_line(path, number, line) for number, line in enumerate(lines, 1) if line)
    tokens = [token for token, _ in sorted(ranks.items(), key=lambda entry: entry[1])]
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{path}: ranks are not 0 to {len(ranks) - 1}; copy the file again")
    ids = range(len(tokens), len(tokens) + RESERVED)
    declared = {token.id: token.name for token in settings.declared}
    special = {declared.get(id, f"<|reserved_token_{id}|>"): id for id in ids}
    return BytePairs(path.name, tokens, PATTERN, special)


def _line(path: Path, number: int, line: str) -> tuple[bytes, int]:
    """Return the token and the rank of a line."""
    token, _, rank = line.strip().partition(" ")
    if not rank.isdecimal() or len(rank) > 9:
        raise TokenizerError(
            f"{path}: line {number} is {line!r:.40}; expected base64, a space and a rank"
        )
    return decoded(path.name, token), int(rank)
