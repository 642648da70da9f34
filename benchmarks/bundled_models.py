"""Figures of the bundled models in the README, measured with the engine that serves them.

    python -m benchmarks.bundled_models TARGET [--draft DRAFT] > evaluation.json

Every answer is greedy but for the stories, whose seeds are fixed: the same folders give the same
report.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxserve import LLM, SamplingParams
from jaxserve.completion import Completion
from training.corpus import LONG, Document, documents
from training.sums import Sum, all_sums
from training.tokens import encoded

CHATS = ("story chat", "questions", "summary", "sums", "json", "facts", "small talk", "mixed chat")
SUBJECTS = (
    "a fox",
    "a lost ball",
    "a girl named Lily",
    "a picnic",
    "a dragon and a key",
    "sharing",
    "a birthday",
)
SUMS = (
    "7 plus 5",
    "12 plus 9",
    "20 minus 6",
    "3 + 4",
    "15 - 8",
    "19 plus 18",
    "0 plus 13",
    "8 + 8",
    "16 minus 16",
    "17 plus 6",
)
LONGEST_ANSWER = 320  # tokens; a story has about 230
type Message = dict[str, str]


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def wrong_sums(llm: LLM) -> list[str]:
    """Return the wrong answers to `What is A plus B?`, for every sum of the trained range.

    Answers are greedy.
    """
    asked: list[Sum] = all_sums()
    answers = llm.chat(
        [user(f"What is {exercise.words()}?") for exercise in asked],
        SamplingParams(temperature=0.0, max_tokens=32),
    )
    pairs = zip(asked, answers, strict=True)
    return [
        f"{exercise.words()}: {told.text}"
        for exercise, told in pairs
        if told.text != exercise.answer()
    ]


def fitting(vocabulary: bytes, room: int, document: Document) -> tuple[list[Message], str]:
    """Return a held-out chat up to its last answer within so many tokens, and that answer."""
    turns = document.turns
    while len(encoded(vocabulary, [Document(document.kind, turns)])[0].ids) > room:
        turns = turns[:-2]
    return [{"role": turn.role, "content": turn.text} for turn in turns[:-1]], turns[-1].text


def right_answers(
    llm: LLM, chats: Sequence[tuple[list[Message], str]]
) -> tuple[int, list[Completion]]:
    """Return how many last answers of chats are given word by word, greedily, and the answers."""
    told = llm.chat(
        [chat for chat, _ in chats], SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
    )
    return sum(answer.text == text for answer, (_, text) in zip(told, chats, strict=True)), told


def agreement(draft: LLM, told: Sequence[Completion]) -> tuple[int, int]:
    """Return how many tokens of these completions the draft puts first too, and their number."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    scored = draft.generate([(*a.prompt_token_ids, *a.token_ids) for a in told], params)
    same = 0
    for completion, score in zip(told, scored, strict=True):
        said = (score.prompt_logprobs or ())[-len(completion.token_ids) :]
        same += sum(entry.top[0][0] == entry.token for entry in said)
    return same, sum(len(a.token_ids) for a in told)


def stories(llm: LLM) -> dict[str, str]:
    """Return ten stories at temperature 0.7, with fixed seeds.

    Seven are told by request, three continued from their first words.
    """
    asked = [user(f"Tell me a short story about {subject}.") for subject in SUBJECTS]
    params = [SamplingParams(temperature=0.7, seed=number, max_tokens=400) for number in range(10)]
    told = [*llm.chat(asked, params[:7]), *llm.generate(["Once upon a time"] * 3, params[7:])]
    names = [
        *(chat[0]["content"] for chat in asked),
        *(f"Once upon a time (seed {seed})" for seed in (7, 8, 9)),
    ]
    return {name: answer.text for name, answer in zip(names, told, strict=True)}


def answers(llm: LLM, questions: Sequence[str]) -> dict[str, str]:
    told = llm.chat(
        [user(text) for text in questions], SamplingParams(temperature=0.0, max_tokens=64)
    )
    return {text: answer.text for text, answer in zip(questions, told, strict=True)}


def measure(target: Path, draft: Path | None, seed: int, count: int) -> dict:
    report: dict = {"sums": len(all_sums())}
    vocabulary = (target / "tokenizer.model").read_bytes()
    with LLM(target) as llm:
        cut = partial(fitting, vocabulary, llm.model.spec.max_positions - LONGEST_ANSWER)
        chats = {
            kind: list(map(cut, documents(seed, "held-out", count, kind)))
            for kind in (*CHATS, LONG)
        }
        report["wrong_sums"] = wrong_sums(llm)
        last = {kind: right_answers(llm, held_out) for kind, held_out in chats.items()}
        report["exact_last_answers"] = {
            kind: f"{right} of {count}" for kind, (right, _) in last.items()
        }
        report["stories"] = stories(llm)
        report["sample_sums"] = answers(llm, [f"What is {asked}?" for asked in SUMS])
        report["talk"] = answers(
            llm, ["Hello!", "Who are you?", "What is the capital of France?", "Tell me a joke."]
        )
    if draft:
        with LLM(draft) as llm:
            report["draft_wrong_sums"] = len(wrong_sums(llm))
            shares = {kind: agreement(llm, told) for kind, (_, told) in last.items()}
        report["agreement"] = {
            kind: round(same / total, 4) for kind, (same, total) in shares.items()
        }
        same, total = (sum(column) for column in zip(*shares.values(), strict=True))
        report["agreement"]["all"] = round(same / total, 4)
    return report


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bundled_models", description="Measure the models."
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the held-out chats; the training's own keeps them new",
    )
    parser.add_argument("--count", type=int, default=40, help="held-out chats of each kind")
    asked = parser.parse_args(argv)
    print(
        json.dumps(
            measure(asked.target, asked.draft, asked.seed, asked.count),
            indent=2,
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
