"""One greedy request, asked again and again beside the load: its answer must not change."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.soak.http_calls import COMPLETIONS, check
from benchmarks.soak.target import Target

EVERY = 3.0  # seconds
BODY: dict[str, Any] = {
    "prompt": "Once upon a time, a small fox found a red ball.",
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
    "logprobs": 3,
}


@dataclass
class Canary:
    """Answers so far, compared with the one of before the load.

    Attributes:
        expected: Text, log-probabilities and finish reason of the first answer.
        other_texts: Answers whose text, tokens or end differed.
        other_logprobs: Answers of the same text whose log-probabilities were not the same bits.
        largest: The largest difference of a chosen token's log-probability among these.
        slowest: Seconds that the slowest answer took.
    """

    expected: dict[str, Any] | None = None
    asked: int = 0
    other_texts: int = 0
    other_logprobs: int = 0
    largest: float = 0.0
    slowest: float = 0.0

    async def ask(self, http: httpx.AsyncClient) -> None:
        """Ask once; the first answer is what later ones are compared with."""
        began = time.monotonic()
        response = await http.post(COMPLETIONS, json=BODY)
        self.slowest = max(self.slowest, time.monotonic() - began)
        check(response, response.text, 200)
        (choice,) = response.json()["choices"]
        if self.expected is None:
            self.expected = choice
        else:
            self._compare(self.expected, choice)

    def _compare(self, expected: dict[str, Any], choice: dict[str, Any]) -> None:
        # Numbers of JSON that are equal were the same bits: repr is exact both ways.
        self.asked += 1
        one = expected["logprobs"]
        other = choice["logprobs"]
        told = expected["text"], expected["finish_reason"], one["tokens"]
        if told != (choice["text"], choice["finish_reason"], other["tokens"]):
            self.other_texts += 1
        elif one != other:
            self.other_logprobs += 1
            pairs = zip(one["token_logprobs"], other["token_logprobs"], strict=True)
            self.largest = max(self.largest, *(abs(a - b) for a, b in pairs))

    @property
    def differed(self) -> int:
        return self.other_texts + self.other_logprobs


async def keep_asking(canary: Canary, target: Target, until: float) -> None:
    """Ask every EVERY seconds until a moment; an answer that is none is counted as unexpected."""
    while time.monotonic() < until:
        target.outcomes.actions["canary"] += 1
        try:
            await canary.ask(target.http)
        except Exception as error:
            target.outcomes.note("canary", error)
        await asyncio.sleep(EVERY)
