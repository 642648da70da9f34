"""Choice of the server that computes a prompt."""

from dataclasses import dataclass, field

import pytest

from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.disaggregation.prefix_affinity import BLOCK, Blocks, PrefixAffinity, blocks_of

PROMPT = tuple(range(1000))


@dataclass(eq=False)
class Server:
    queue: int = 0
    affinity: PrefixAffinity = field(default_factory=PrefixAffinity)

    def cached(self, blocks: Blocks) -> int:
        return self.affinity.cached(blocks)


def test_the_threshold_is_the_first_that_travels() -> None:
    assert [Policy(512, 0).is_short(tokens) for tokens in (0, 511, 512, 513)] == [
        True,
        True,
        False,
        False,
    ]


def test_the_least_busy_one_is_chosen() -> None:
    servers = [Server(300), Server(100), Server(200)]
    assert Policy(1, 1000).choose(blocks_of(PROMPT, ""), servers) is servers[1]


@pytest.mark.parametrize(("queue", "kept"), [(499, True), (500, True), (501, False)])
def test_the_queue_has_a_limit(queue: int, kept: bool) -> None:
    server = Server(queue)
    assert Policy(1, 500).choose(blocks_of(PROMPT, ""), [server, Server(502)]) is (
        server if kept else None
    )


def test_nobody_there() -> None:
    assert Policy(1, 500).choose(blocks_of(PROMPT, ""), []) is None


def test_a_cached_prefix_weighs_as_much_as_it_saves() -> None:
    knowing = Server(700)
    idle = Server(0)
    knowing.affinity.add(blocks_of(PROMPT, ""))
    choose = Policy(1, 5000).choose
    assert (
        choose(blocks_of(PROMPT, ""), [idle, knowing]) is knowing
    )  # 700 tokens wait there, 768 need not be computed
    assert choose(blocks_of(PROMPT, "salt"), [idle, knowing]) is idle
    knowing.queue = 769
    assert choose(blocks_of(PROMPT, ""), [idle, knowing]) is idle


@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
def test_whole_blocks_are_remembered(length: int) -> None:
    affinity = PrefixAffinity()
    affinity.add(blocks_of(PROMPT[:length], "a"))
    assert affinity.cached(blocks_of(PROMPT, "a")) == length // BLOCK * BLOCK
    assert affinity.cached(blocks_of(PROMPT, "b")) == 0
    assert affinity.cached(blocks_of((7, *PROMPT), "a")) == 0


def test_what_was_used_last_is_remembered_longest() -> None:
    affinity = PrefixAffinity(max_blocks=6)
    others = [tuple(range(i, i + 2 * BLOCK)) for i in (1000, 2000, 3000)]
    affinity.add(blocks_of(PROMPT[: 2 * BLOCK], ""))
    for other in others:
        affinity.add(blocks_of(PROMPT[: 2 * BLOCK], ""))
        affinity.add(blocks_of(other, ""))
    assert affinity.cached(blocks_of(PROMPT, "")) == 2 * BLOCK
    assert [affinity.cached(blocks_of(other, "")) for other in others] == [0, 2 * BLOCK, 2 * BLOCK]
