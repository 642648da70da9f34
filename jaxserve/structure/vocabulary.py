"""A tokenizer as llguidance takes it."""

from collections.abc import Sequence
from functools import cached_property

from jaxserve.structure.spelling import RecentSpellings, Speller
from jaxserve.tokenizer import Tokenizer, TokenizerError


class Vocabulary:
    """Tokenizer with the attributes of TokenizerWrapper in llguidance's Python package."""

    is_tokenizer_wrapper = True
    bos_token_id = None  # a grammar describes the output, which has no such token

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], size: int) -> None:
        self._tokenizer = tokenizer
        texts = [tokenizer.token_bytes(token)[0] for token in range(size)]
        special = {id: name for name, id in tokenizer.special_tokens.items()}
        # An end token ends the answer wherever it comes, also one that spells text.
        special |= {id: tokenizer.token_text(id) for id in eos_ids}
        self._texts = [b"" if token in special else text for token, text in enumerate(texts)]
        self._recent = RecentSpellings(self._texts)
        self.tokens = [
            special[id].encode() if id in special else text for id, text in enumerate(texts)
        ]
        self.special_token_ids = sorted(special)
        self.eos_token_id = eos_ids[0] if eos_ids else 0
        if not eos_ids:
            # The library insists on an end token. Its id lies behind all words of the mask, which
            # are cut off there, so the engine never sees it.
            self.tokens += [b""] * (-size % 32)
            self.eos_token_id = len(self.tokens)
            self.special_token_ids.append(self.eos_token_id)
            self.tokens.append(b"<end>")

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text inside of an output; none if no tokens spell it.

        The tokenizer's own ids may spell another text, for it may normalize, or lack a letter, or
        have an end token for a word. Then some of them give way to others.
        """
        asked = text.encode()
        ids = self._recent.find(asked)
        if ids is None:
            ids = self._spell(text, asked)
            self._recent.add(asked, ids)
        return ids

    def _spell(self, text: str, asked: bytes) -> list[int]:
        try:
            ids = self._tokenizer.encode_inner(text)
        except TokenizerError:
            ids = []
        spelled = b"".join(self._texts[token] for token in ids)
        return ids if spelled == asked else self._speller.mend(ids, asked)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self._texts, frozenset(self._tokenizer.added_tokens.values()))
