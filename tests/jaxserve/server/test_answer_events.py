"""Unread events of an answer, without a server."""

import asyncio

import pytest

from jaxserve.completion import TextDelta
from jaxserve.engine.events import Logprob
from jaxserve.errors import SlowConsumerError
from jaxserve.server.core.answer_events import Outbox, Update

FIRST = TextDelta("one", [1, 2], [Logprob(1, -1.0, ()), Logprob(2, -2.0, ())])
SECOND = TextDelta(" two", [3], [Logprob(3, -3.0, ())])


def test_unread_updates_of_a_choice_are_merged() -> None:
    async def main() -> None:
        outbox = Outbox(max_tokens=10)
        outbox.update(0, FIRST)
        outbox.update(1, SECOND)
        outbox.update(0, SECOND)
        scores = [Logprob(1, -1.0, ()), Logprob(2, -2.0, ()), Logprob(3, -3.0, ())]
        assert await outbox.take() == [
            Update(0, "one two", [1, 2, 3], scores),
            Update(1, " two", [3], scores[2:]),
        ]
        assert FIRST.token_ids == [1, 2]

    asyncio.run(main())


def test_updates_without_log_probabilities_have_none() -> None:
    async def main() -> None:
        outbox = Outbox(max_tokens=10)
        outbox.update(0, TextDelta("a", [1], None))
        outbox.update(0, TextDelta("b", [2], None))
        assert await outbox.take() == [Update(0, "ab", [1, 2], None)]

    asyncio.run(main())


def test_only_unread_tokens_count() -> None:
    async def main() -> None:
        outbox = Outbox(max_tokens=3)
        for _ in range(5):
            outbox.update(0, FIRST)
            await outbox.take()
        outbox.update(0, FIRST)
        with pytest.raises(SlowConsumerError, match="4 tokens lie unread; the limit is 3"):
            outbox.update(0, FIRST)

    asyncio.run(main())
