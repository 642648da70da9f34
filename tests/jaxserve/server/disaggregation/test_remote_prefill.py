"""Prompts computed by another server: answers, decisions and metrics."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.disaggregation.prefill_pool import State
from jaxserve.server.observe.metrics import Metrics
from jaxserve.v1 import common_pb2
from tests.jaxserve.cluster.transfer.harness import weights
from tests.jaxserve.server.disaggregation.harness import (
    HANDSHAKE,
    LONG,
    PLAN,
    apart,
    asking,
    plain,
    reachable,
    tokens_of,
)
from tests.jaxserve.server.harness import until


def run(work: Any) -> None:
    asyncio.run(work)


@pytest.mark.parametrize("theirs", [4, 8, 16])
def test_a_long_prompt_is_computed_by_the_other_server(tmp_path: Path, theirs: int) -> None:
    """The client gets the answer of a single server.

    `theirs` is the page size of the prefill server in tokens.
    """

    async def main() -> None:
        requests = [
            asking(),
            asking(LONG[:90]),
            asking(LONG + "z", sampling={"temperature": 0.7, "n": 1}),
        ]
        expected = await plain(tmp_path, *requests)
        async with apart(tmp_path, prefill_options={"page_size": theirs}) as servers:
            for request, tokens in zip(requests, expected, strict=True):
                response = await servers.decode.inference.Generate(request)
                assert tokens_of(response) == tokens
            assert servers.decisions("remote") == 1 and servers.decisions("local_short") == 2
            assert servers.prefills[0].runner.launches, "it has computed something"
            await servers.at_rest()

    run(main())


def test_what_it_found_cached_is_what_came(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            usage = (await servers.decode.inference.Generate(asking())).usage
            assert usage.cached_prompt_tokens == reachable(usage.prompt_tokens)
            assert servers.count("received_bytes_total") == reachable(usage.prompt_tokens) * 3 * 4
            sent = servers.prefill_registries[0].get_sample_value(
                "jaxserve:disaggregation_sent_bytes_total"
            )
            assert sent == servers.count("received_bytes_total")
            assert servers.count("seconds_count") == 1 and not servers.failures
            computed = {
                name: count for name, count in servers.decode.runner.launches.items() if count
            }
            assert sum(computed.values()) == 12, (
                "one step for the prompt's end and the first token, and one for each other"
            )
            await servers.at_rest()

    run(main())


def test_the_prefill_server_counts_a_prompt_as_done(tmp_path: Path) -> None:
    """The request is left before it ends, because its token is not needed."""

    async def main() -> None:
        metrics = Metrics(lambda: 0)
        async with apart(tmp_path, prefill_options={"observers": (metrics,)}) as servers:
            await servers.decode.inference.Generate(asking())
            await servers.at_rest()
        name = "jaxserve:request_success_total"
        assert metrics.registry.get_sample_value(name, {"finished_reason": "prefilled"}) == 1
        assert metrics.registry.get_sample_value("jaxserve:request_cancelled_total") == 0

    run(main())


def test_what_is_cached_here_does_not_travel(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            await servers.decode.inference.Generate(asking(LONG[:48]))
            usage = (await servers.decode.inference.Generate(asking())).usage
            assert (
                servers.count("received_bytes_total")
                == (reachable(usage.prompt_tokens) - 48) * 3 * 4
            )
            await servers.at_rest()

    run(main())


def test_a_salt_goes_with_the_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            for salt in ("", "one", "one", "two"):
                await servers.decode.inference.Generate(asking(cache_salt=salt))
            assert servers.decisions("remote") == 3
            await servers.at_rest()

    run(main())


def test_what_stays_here(tmp_path: Path) -> None:
    async def main() -> None:
        plan = replace(PLAN, policy=Policy(64, 0))
        async with apart(tmp_path, plan=plan) as servers:
            generate = servers.decode.inference.Generate
            await generate(asking("short"))
            assert servers.decisions("local_short") == 1
            await generate(asking("a" + LONG, sampling={"prompt_logprobs": 0}))
            assert servers.decisions("local_scored") == 1
            with servers.prefills[0].holding():
                first = asyncio.ensure_future(generate(asking()))
                await until(lambda: servers.decisions("remote") == 1)
                await generate(asking("b" + LONG))
                assert servers.decisions("local_busy") == 1
            await first
            await servers.prefills[0].stop(0)
            await servers.until(State.UNREACHABLE)
            await generate(asking("c" + LONG))
            assert servers.decisions("local_no_server") == 1 and not servers.failures
            await servers.at_rest()

    run(main())


def test_a_prefill_server_refuses_clients(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            with pytest.raises(aio.AioRpcError) as refused:
                await servers.prefills[0].inference.Generate(asking("hello"))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "--role prefill" in (refused.value.details() or "")
            await servers.at_rest()

    run(main())


@pytest.mark.system
@pytest.mark.parametrize(
    ("handshake", "problem"),
    [
        (replace(HANDSHAKE, model={"the model": "another"}), "the model"),
        (replace(HANDSHAKE, weights=weights(second=7)), "the weight "),
        (replace(HANDSHAKE, page_dtype="bfloat16"), "--kv"),
    ],
)
def test_servers_that_do_not_fit_together(
    tmp_path: Path, handshake: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every prompt is computed here, and the log says why, once."""

    async def main() -> None:
        async with apart(tmp_path, handshake=handshake, ready=False) as servers:
            await servers.until(State.REFUSING)
            await servers.decode.inference.Generate(asking())
            assert servers.decisions("local_no_server") == 1
            await asyncio.sleep(1.5)
            told = [
                record.getMessage()
                for record in caplog.records
                if "is refusing" in record.getMessage()
            ]
            assert len(told) == 1 and problem in told[0]
            await servers.at_rest()

    run(main())


@pytest.mark.system
def test_the_wait_elsewhere_counts(tmp_path: Path) -> None:
    """Times begin with the client's wait, not with the request's submission."""

    async def main() -> None:
        async with apart(tmp_path, prefill_seconds=0.05) as servers:
            response = await servers.decode.inference.Generate(asking())
            timings = response.choices[0].finish.timings
            assert timings.first_token_seconds > 0.1 and timings.queue_seconds > 0.1

    run(main())


def test_many_at_once_are_what_one_server_says(tmp_path: Path) -> None:
    async def main() -> None:
        texts = [LONG[i:] if i % 3 else f"{i} {LONG}" for i in range(24)] * 2
        requests = [
            asking(text, sampling={"temperature": 0.5 * (i % 2)}) for i, text in enumerate(texts)
        ]
        expected = await plain(tmp_path, *requests)
        # Pages for all prompts: one that waits to be sent is not evicted for another's.
        prefills = {"num_pages": 4096}
        async with apart(
            tmp_path, prefills=2, prefill_seconds=0.002, prefill_options=prefills
        ) as servers:
            found = await asyncio.gather(*map(servers.decode.inference.Generate, requests))
            assert list(map(tokens_of, found)) == expected
            assert servers.decisions("remote") > 10 and not servers.failures
            assert all(server.runner.steps for server in servers.prefills)
            await servers.at_rest()

    run(main())


def test_a_request_id_is_known_while_its_prompt_is_away(tmp_path: Path) -> None:
    async def main() -> None:
        async with apart(tmp_path) as servers:
            with servers.prefills[0].holding():
                first = servers.decode.inference.Generate(asking(request_id="one"))
                await until(lambda: servers.decisions("remote"))
                with pytest.raises(aio.AioRpcError) as refused:
                    await servers.decode.inference.Generate(asking("hello", request_id="one"))
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
            assert (await first).choices[0].finish.reason == common_pb2.FINISH_REASON_LENGTH
            await servers.at_rest()

    run(main())
