"""Write small tokenizers of byte pairs with the ids that other libraries give.

    pip install tiktoken mistral-common regex
    python tests/golden/make_tokenizers.py --tiktoken FILE --tekken FILE

FILE are the tiktoken.model of Kimi K2 and the tekken.json of a model of Mistral. Each folder gets
the tokens that are part of a piece of TEXTS, in the order of their ranks: pairs within a piece join
to no others, so that a text has the same tokens as with the whole vocabulary. vectors.json has the
texts with their pieces and ids, and `ranks`, the rank that each token has in the whole vocabulary.
"""

import argparse
import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import regex  # pyright: ignore[reportMissingImports]
import tiktoken  # pyright: ignore[reportMissingImports]
from mistral_common.tokens.tokenizers.tekken import (  # pyright: ignore[reportMissingImports]
    Tekkenizer,
)

HERE = Path(__file__).parent
# Kimi's pattern, as tokenization_kimi.py of its folders has it.
LETTERS = r"[{}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]"
UPPER = LETTERS.format(r"\p{Lu}\p{Lt}")
LOWER = LETTERS.format(r"\p{Ll}")
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SHORT}",
        *(r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
TEXTS = (
    *("", " ", "   ", "Hello world", "Hello, world!", "   leading whitespace", "trailing   "),
    *("I've got it, don't worry.", "it's I'LL WE'RE", "a\tb\nc d", "   \t\n   ", "\r\n\r\n x"),
    *("1234567890", "the year 2024 had 365 days", "price: $19.99, quantity: 42"),
    *(
        "你好世界",
        "中文English混合",
        "北京市 Pascal",
        "汉字abc",
        "東京タワーは高い",
        "한국어와中文混合",
    ),
    *("русский текст", "Zürich Ångström İstanbul ǅ", "ข้อความ हिन्दी العربية", "cafe\u0301"),
    *("def add(a, b):\n    return a + b\n", "https://x.org/a/b?c=d // e", "getHTTPResponse"),
    *("emoji 😀🎉 👨\u200d👩\u200d👧", "<s>[INST] <|im_end|>", "\x00\x07", "\ufeff\u00a0\u2003x"),
)


def needed(tokens: Iterable[bytes], pieces: Iterable[bytes]) -> list[int]:
    """Return the ranks of single bytes, and of tokens that are part of a piece."""
    text = b"\xff\xff".join(pieces)  # in no UTF-8
    return [rank for rank, token in enumerate(tokens) if len(token) == 1 or token in text]


def vectors(pattern: str, tokens: list[bytes]) -> dict[str, Any]:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    split = regex.compile(pattern, regex.V1)
    cases = [
        {
            "text": text,
            "pieces": split.findall(text),
            "ranks": encoding.encode(text, disallowed_special=()),
        }
        for text in TEXTS
    ]
    parts = [piece.encode() for case in cases for piece in case["pieces"]]
    return {"ranks": needed(tokens, parts), "cases": cases}


def write(folder: Path, found: dict[str, Any]) -> None:
    text = json.dumps(found, ensure_ascii=True)
    (folder / "vectors.json").write_text(text + "\n")


def kimi(source: Path) -> None:
    folder = HERE / "tokenizer_kimi"
    folder.mkdir(exist_ok=True)
    tokens = [base64.b64decode(line.split()[0]) for line in source.read_text().splitlines()]
    found = vectors(KIMI, tokens)
    lines = [f"{base64.b64encode(tokens[r]).decode()} {i}\n" for i, r in enumerate(found["ranks"])]
    (folder / "tiktoken.model").write_text("".join(lines))
    write(folder, found)


def tekken(source: Path) -> None:
    folder = HERE / "tokenizer_tekken"
    folder.mkdir(exist_ok=True)
    whole = json.loads(source.read_text())
    size, special = (
        whole["config"][name] for name in ("default_vocab_size", "default_num_special_tokens")
    )
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in whole["vocab"][: size - special]]
    found = vectors(whole["config"]["pattern"], tokens)
    own = Tekkenizer.from_file(source)
    for case in found["cases"]:
        if [id - special for id in own.encode(case["text"], False, False)] != case["ranks"]:
            raise SystemExit(f"mistral-common encodes {case['text']!r} otherwise than tiktoken")
    config = whole["config"] | {"default_vocab_size": special + len(found["ranks"])}
    entries = [whole["vocab"][rank] | {"rank": i} for i, rank in enumerate(found["ranks"])]
    content = {"config": config, "vocab": entries}
    (folder / "tekken.json").write_text(json.dumps(content) + "\n")
    write(folder, found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiktoken", type=Path, required=True)
    parser.add_argument("--tekken", type=Path, required=True)
    args = parser.parse_args()
    kimi(args.tiktoken)
    tekken(args.tekken)
