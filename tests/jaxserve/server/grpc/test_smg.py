"""The router smg before two servers, with the clients that smg supports."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.jaxserve.server.test_serve_process import DRAFT, Process, free_port, get, launch

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(600)]
MODEL = DRAFT.name
QUESTION: Any = [{"role": "user", "content": "What is 7 plus 5?"}]
LONG = 300  # tokens of an answer that is under way when something happens
ENDLESS: dict[str, Any] = {"ignore_eos": True}


@dataclass
class Worker:
    """A server of this project, and the address under which the router finds it."""

    process: Process
    port: int

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def metric(self, name: str) -> float:
        lines = get(f"{self.process.http}/metrics").decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"jaxserve:{name}")
        )

    def is_at_rest(self) -> bool:
        return not any(
            map(
                self.metric, ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            )
        )


@contextmanager
def worker(port: int | None = None) -> Iterator[Worker]:
    """Start a server; `port` is that of a server that it replaces."""
    port = port or free_port()
    process = launch("--vllm-port", str(port))
    try:
        process.client().close()
        yield Worker(process, port)
    finally:
        process.popen.kill()
        process.wait()


@contextmanager
def smg(*workers: Worker) -> Iterator[str]:
    """Start the router and yield its address once it knows all servers and their tokenizer."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "smg"),
        "launch",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "--worker-urls",
        *(worker.url for worker in workers),
        "--health-check-interval-secs",
        "1",
    ]
    # With it, a busy server is left out of routing for seconds: when the other one died, nobody was
    # left.
    command += ["--disable-worker-overload-protection"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as popen:
        url = f"http://127.0.0.1:{port}"
        try:
            until(
                lambda: popen.poll() is None and answers(url) and len(healthy(url)) == len(workers)
            )
            yield url
        finally:
            popen.kill()  # told to end, it waits for routers before it


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def answers(url: str) -> bool:
    """Return whether the router answers and has the tokenizer, which it fetches later."""
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 1}
    try:
        return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    except httpx.HTTPError:
        return False


def healthy(url: str) -> set[str]:
    found = json.loads(get(f"{url}/workers"))["workers"]
    return {worker["url"] for worker in found if worker["is_healthy"]}


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[str, Sequence[Worker]]]:
    with ExitStack() as stack:
        workers = [stack.enter_context(worker()) for _ in range(2)]
        yield stack.enter_context(smg(*workers)), workers


@pytest.fixture
def router(fleet: tuple[str, Sequence[Worker]]) -> str:
    return fleet[0]


@pytest.fixture
def workers(fleet: tuple[str, Sequence[Worker]]) -> Sequence[Worker]:
    return fleet[1]


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60)


def chat(client: openai.OpenAI, **given: Any) -> Any:
    """Send a conversation; sampling is greedy by default."""
    return client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16} | given
    )


def test_the_openai_sdk_reads_what_the_server_itself_says(
    router: str, workers: Sequence[Worker]
) -> None:
    with sdk(router) as through, sdk(workers[0].process.http) as direct:
        asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
        there = chat(through, **asked)
        here = chat(direct, **asked)
        assert there.choices[0].message.content == here.choices[0].message.content != ""
        assert there.choices[0].finish_reason == here.choices[0].finish_reason == "stop"
        assert there.usage.prompt_tokens == here.usage.prompt_tokens, (
            "it renders and tokenizes as the server does"
        )
        assert there.usage.completion_tokens == here.usage.completion_tokens
        scores = there.choices[0].logprobs.content
        own = here.choices[0].logprobs.content
        assert len(scores) > 5
        for entry, other in zip(
            scores, own, strict=False
        ):  # one of them may have the end token's as well
            assert (entry.token, len(entry.top_logprobs)) == (other.token, 2)
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        pieces = list(chat(through, stream=True, stream_options={"include_usage": True}))
        texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
        assert "".join(texts) == here.choices[0].message.content and sum(map(bool, texts)) > 1
        assert (
            pieces[-1].usage and pieces[-1].usage.completion_tokens == here.usage.completion_tokens
        )
        several = chat(through, n=3, temperature=1, seed=5)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        word = here.choices[0].message.content.split()[1]
        stopped = chat(through, stop=[word])
        assert (
            stopped.choices[0].message.content == here.choices[0].message.content.partition(word)[0]
        )


def test_an_anthropic_client(router: str) -> None:
    body = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    with sdk(router) as client:
        text = chat(client).choices[0].message.content
    whole = httpx.post(f"{router}/v1/messages", json=body, timeout=60).raise_for_status().json()
    assert (whole["type"], whole["role"], whole["stop_reason"]) == (
        "message",
        "assistant",
        "end_turn",
    )
    assert [block["text"] for block in whole["content"]] == [text]
    assert whole["usage"]["input_tokens"] > 0 < whole["usage"]["output_tokens"]
    with httpx.stream(
        "POST", f"{router}/v1/messages", json=body | {"stream": True}, timeout=60
    ) as response:
        data = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    events = [event["type"] for event in data]
    assert (events[0], events[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert (
        "".join(event["delta"]["text"] for event in data if event["type"] == "content_block_delta")
        == text
    )
    cut = httpx.post(
        f"{router}/v1/messages", json=body | {"stop_sequences": [text.split()[1]]}, timeout=60
    ).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", text.split()[1])
    short = httpx.post(f"{router}/v1/messages", json=body | {"max_tokens": 2}, timeout=60).json()
    assert short["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_frees_the_pages(router: str, workers: Sequence[Worker], stream: bool) -> None:
    until(lambda: all(worker.is_at_rest() for worker in workers))
    before = sum(worker.metric("generation_tokens_total") for worker in workers)
    calls = 8
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 480, "stream": stream} | ENDLESS

    def made() -> float:
        return sum(worker.metric("generation_tokens_total") for worker in workers) - before

    async def main() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{router}/v1/chat/completions"
            under_way = [asyncio.create_task(client.post(url, json=body)) for _ in range(calls)]
            await asyncio.to_thread(until, lambda: made() > 0)
            for task in under_way:
                task.cancel()
            ended = await asyncio.gather(*under_way, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended

    asyncio.run(main())
    until(lambda: all(worker.is_at_rest() for worker in workers))
    assert 0 < made() < calls * 480 / 2, "most of it was never made"


def test_what_is_refused_is_named(router: str) -> None:
    with sdk(router) as client:
        with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema"):
            schema = {"name": "none", "schema": {"not": {}}}
            chat(client, response_format={"type": "json_schema", "json_schema": schema})
        with pytest.raises(openai.BadRequestError, match="exceed the context of 512"):
            chat(client, messages=[{"role": "user", "content": "x" * 600}])


def test_a_prefix_goes_where_its_pages_are(router: str) -> None:
    words = (
        "the quick brown fox and the lazy dog ran over a bridge near an old stone house ".split()
    )
    with sdk(router) as client:
        cached = []
        for story in range(4):
            text = " ".join(words[story:] + words[:story]) * 6
            for ending in ("", " Why?", " Who?"):
                usage = chat(
                    client, messages=[{"role": "user", "content": text + ending}], max_tokens=2
                ).usage
                cached.append(usage.prompt_tokens_details.cached_tokens)
    again = [tokens for number, tokens in enumerate(cached) if number % 3]
    assert sum(map(bool, again)) >= 7, cached  # of 8; by chance it would be half of them


@dataclass
class Outcome:
    """Result of a request: number of the pieces that came, and the error."""

    stream: bool
    pieces: int = 0
    tokens: int = 0
    error: str = ""

    @property
    def lost(self) -> bool:
        return bool(self.error) or self.tokens != LONG


async def one(client: openai.AsyncOpenAI, outcome: Outcome, number: int) -> None:
    asked: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Tell me story {number}."}],
        "max_tokens": LONG,
        "extra_body": ENDLESS,
    }
    try:
        if outcome.stream:
            options: Any = {"include_usage": True}
            async for piece in await client.chat.completions.create(
                **asked, stream=True, stream_options=options
            ):
                outcome.pieces += 1
                outcome.tokens = piece.usage.completion_tokens if piece.usage else 0
        else:
            answer = await client.chat.completions.create(**asked)
            outcome.tokens = answer.usage.completion_tokens if answer.usage else 0
    except (openai.APIError, httpx.HTTPError) as error:
        outcome.error = repr(error)


async def load(url: str, outcomes: list[Outcome], while_: Callable[[], bool]) -> None:
    """Keep twelve requests running, every second one a stream."""

    async def caller(number: int) -> None:
        while while_():
            outcomes.append(Outcome(stream=number % 2 == 0))
            await one(client, outcomes[-1], len(outcomes))

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=60
    ) as client:
        await asyncio.gather(*map(caller, range(12)))


def under_load(url: str, event: Callable[[], None]) -> list[Outcome]:
    """Return the outcomes of requests that ran before, during and after an event."""
    outcomes: list[Outcome] = []

    async def main() -> None:
        happening = asyncio.create_task(asyncio.to_thread(event))
        await load(url, outcomes, lambda: not happening.done())
        await happening

    asyncio.run(main())
    return outcomes


def test_a_server_killed_under_load() -> None:
    """Requests without output so far are retried; streams that had begun end with an error."""
    with worker() as first, worker() as second, smg(first, second) as url:

        def kill() -> None:
            until(
                lambda: (
                    second.metric("num_requests_running") == 2
                    and second.metric("num_requests_waiting") > 1
                )
            )
            second.process.popen.kill()
            time.sleep(2)

        outcomes = under_load(url, kill)
        lost = [outcome for outcome in outcomes if outcome.lost]
        print(len(outcomes), "requests,", lost)
        assert all(outcome.stream and outcome.pieces and outcome.error for outcome in lost), lost
        assert len(lost) <= 4, "its two rows, and what had just ended and was on its way"
        until(first.is_at_rest)


def test_servers_drained_one_by_one() -> None:
    """An update of a Deployment drains servers in turn, and no request is lost."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker()) for _ in range(2)]
        url = stack.enter_context(smg(*workers))

        def update() -> None:
            for old in workers:
                until(lambda old=old: old.metric("num_requests_running") == 2)  # type: ignore[misc]
                old.process.popen.send_signal(signal.SIGTERM)
                assert old.process.popen.wait(60) == 0
                new = stack.enter_context(worker(old.port))
                until(lambda new=new: new.url in healthy(url))  # type: ignore[misc]
                until(lambda new=new: new.metric("num_requests_running") > 0)  # type: ignore[misc]

        outcomes = under_load(url, update)
        print(len(outcomes), "requests")
        assert not [outcome for outcome in outcomes if outcome.lost]
