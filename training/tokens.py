"""Turns documents into tokens: vocabulary, chat format, and the windows that training reads.

A plain text is BOS, text, EOS. A chat is BOS and for every turn

    <|im_start|>ROLE newline TEXT<|im_end|> newline

as CHAT_TEMPLATE writes it. The two marks are control tokens, which encoding a text never yields.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import sentencepiece

from training.corpus import Document, Turn, documents
from training.recipe import Recipe

UNK, BOS, EOS, IM_START, IM_END = range(5)
MARKS: Final = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(recipe: Recipe, seed: int) -> bytes:
    """Train a SentencePiece BPE model with byte fallback; return it serialized.

    Newlines are not in the training text, so that a newline is encoded as its byte.
    """
    turns = [
        turn
        for document in documents(seed, "train", recipe.tokenizer_documents)
        for turn in document.turns
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(
            line for turn in turns for line in (turn.role, *turn.text.split("\n")) if line
        ),
        model_writer=model,
        model_type="bpe",
        vocab_size=recipe.vocab,
        byte_fallback=True,
        split_digits=True,
        control_symbols=list(MARKS),
        add_dummy_prefix=False,  # the encoding of a text does not depend on its place in a chat
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=1.0,
        num_threads=1,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        minloglevel=2,
    )
    return model.getvalue()


@dataclass(frozen=True)
class Encoded:
    """A document as tokens.

    ids: [tokens] uint16. answer: [tokens] bool, true for tokens that the model has to generate: the
    assistant's turns, and all of a plain text.
    """

    ids: np.ndarray
    answer: np.ndarray


def encoded(tokenizer: bytes, texts: Iterable[Document]) -> list[Encoded]:
    """Encode documents with a serialized SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer)
    return [_encoded(processor, document.turns) for document in texts]


def _encoded(processor: sentencepiece.SentencePieceProcessor, turns: Iterable[Turn]) -> Encoded:
    ids = [BOS]
    answer = [False]
    for turn in turns:
        for part, is_answer in _parts(processor, turn):
            ids += part
            answer += [is_answer] * len(part)
    return Encoded(np.array(ids, np.uint16), np.array(answer))


def _parts(
    processor: sentencepiece.SentencePieceProcessor, turn: Turn
) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of a turn in parts, and whether a part is an answer."""
    if not turn.role:
        yield [*processor.encode(turn.text), EOS], True
        return
    yield [IM_START, *processor.encode(turn.role + "\n")], False
    yield [*processor.encode(turn.text), IM_END], turn.role == "assistant"
    yield processor.encode("\n"), False


@dataclass(frozen=True)
class Stream:
    """Concatenated documents: ids and answer [tokens], and where each begins [documents]."""

    ids: np.ndarray
    answer: np.ndarray
    starts: np.ndarray

    def windows(
        self, rows: int, context: int, key: tuple[int, int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids int32 and answer bool, both [rows, context + 1].

        Windows begin where a document does; which ones depends on the key (seed, step) alone.
        """
        # Number of documents with a whole window behind their start.
        whole = np.searchsorted(self.starts, len(self.ids) - context)
        drawn = self.starts[np.random.default_rng(key).integers(whole, size=rows)]
        index = drawn[:, None] + np.arange(context + 1)
        return self.ids[index].astype(np.int32), self.answer[index]


def stream(texts: list[Encoded]) -> Stream:
    """Concatenate documents."""
    ids = np.concatenate([text.ids for text in texts])
    answer = np.concatenate([text.answer for text in texts])
    return Stream(ids, answer, np.flatnonzero(ids == BOS))
