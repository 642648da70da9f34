"""Subjects of benchmarks.quality: a model, documents it was not trained on, and prompts.

Prompts are cut from such documents.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxserve.cli.flags import BUNDLED
from jaxserve.tokenizer import load_tokenizer
from training.corpus import documents
from training.tokens import Encoded, encoded

SHORTEST, LONGEST = 16, 48  # tokens of a prompt
NOVEL = "CHAPTER I", "*** END"  # where Botchan begins and ends in its file


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    texts: whose perplexity is measured. prompts: token ids. source: what they are, for the table.
    """

    name: str
    folder: Path
    texts: list[Encoded]
    prompts: list[list[int]]
    source: str

    @property
    def longest(self) -> int:
        """Return the tokens of the longest text, and one more."""
        return 1 + max(len(text.ids) for text in self.texts)


def bundled(count: int, prompts: int) -> Subject:
    """Return the subject from the corpus's held-out split, which shares no text with training.

    Of chats the answers count.
    """
    tokenizer = (BUNDLED / "tokenizer.model").read_bytes()
    texts = encoded(tokenizer, documents(0, "held-out", count))
    begun = encoded(tokenizer, documents(1, "held-out", prompts))
    cuts = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, len(begun))
    cut = [text.ids[:length].tolist() for text, length in zip(begun, cuts, strict=True)]
    source = "held-out documents of its own corpus, answers of chats and all of plain texts"
    return Subject(BUNDLED.name, BUNDLED, texts, cut, source)


def babyllama(count: int, prompts: int) -> Subject | None:
    """Return the subject that others trained, or None where JAXSERVE_TEST_DATA lacks it.

    Its text is Botchan, an English novel, in windows of its context; it was trained on stories for
    children.
    """
    data = Path(os.environ.get("JAXSERVE_TEST_DATA", ""))
    folder = data / "models" / "babyllama"
    file = data / "text" / "botchan.txt"
    if not (folder.is_dir() and file.is_file()):
        return None
    tokenizer = load_tokenizer(folder)
    novel = file.read_text()
    begin, end = (novel.index(mark) for mark in NOVEL)
    bos, *ids = tokenizer.encode(" ".join(novel[begin:end].split()))
    size = 253  # with BOS and the token that is generated, its context of 256 less one
    windows = [[bos, *ids[at : at + size]] for at in range(0, len(ids) - size, size)]
    spelled = [
        window for window in windows if 0 not in window
    ]  # 0: a character that its vocabulary does not have
    texts = [
        Encoded(np.array(window, np.uint16), np.ones(len(window), bool))
        for window in spelled[:count]
    ]
    draw = np.random.default_rng(0)
    cut = [spelled[i % len(spelled)] for i in range(count, count + prompts)]
    cut = [window[: draw.integers(SHORTEST, LONGEST + 1)] for window in cut]
    return Subject(
        folder.name,
        folder,
        texts,
        cut,
        "windows of a novel, Botchan, of another kind than its stories",
    )
