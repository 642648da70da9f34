"""Other people's servers: what they stream, refuse and break off, and how it is counted."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from jaxserve.bench.caller import CUT, SHORT, TIMEOUT, Credentials, call
from jaxserve.bench.latency import OK, Objective, Outcome, Spread, summarize
from jaxserve.bench.openai_caller import MALFORMED, Model, OpenAICaller, find_model, shares
from jaxserve.errors import ConfigError

DONE = "data: [DONE]\n\n"


def event(text: str = "", completion_tokens: int | None = None, **more: Any) -> str:
    chunk: dict[str, Any] = {"choices": [{"text": text}] if text else []} | more
    if completion_tokens is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    return f"data: {json.dumps(chunk)}\n\n"


def answered(
    body: Sequence[str] | str,
    status: int = 200,
    *,
    asked: int = 4,
    may_end_early: bool = False,
    strict: bool = False,
) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome of a request for `asked` tokens, and the request."""
    sent = list[bytes]()

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        sent.append(request.content)
        return httpx.Response(status, content="".join(body).encode())

    async def run() -> Outcome:
        transport = httpx.MockTransport(handle)
        async with httpx.AsyncClient(transport=transport, base_url="http://test/v1/") as client:
            caller = OpenAICaller(client, "theirs", True, strict)
            outcome = Outcome(0.0, 2, asked, may_end_early)
            await call(caller, caller.prepare([1, 2], asked, "salt"), outcome, 60.0)
            return outcome

    return asyncio.run(run()), json.loads(sent[0])


def test_a_server_that_counts_with_every_chunk() -> None:
    """An empty chunk in between, and the last usage once more at the end."""
    outcome, _ = answered(
        [event("a", 1), event("", 1), event("bc", 3), event("d", 4), event("", 4), DONE]
    )
    assert (outcome.status, outcome.counts.tolist(), outcome.shared_out) == (OK, [1, 2, 1], False)
    assert outcome.prompt_tokens == 7  # theirs, not ours


def test_a_server_that_counts_in_the_end() -> None:
    outcome, _ = answered([event("ab"), event("cd"), event("ef"), event("", 7), DONE], asked=7)
    assert (outcome.status, outcome.counts.tolist(), outcome.shared_out) == (OK, [2, 2, 3], True)
    summary = summarize([outcome], Objective())
    assert summary.shared_out == 1 and isinstance(summary.itl, Spread)


def test_a_server_that_never_counts() -> None:
    outcome, _ = answered([event("ab"), event("cd"), DONE], asked=2)
    assert (outcome.status, outcome.received, outcome.shared_out, outcome.prompt_tokens) == (
        OK,
        2,
        True,
        2,
    )


def test_a_server_that_says_no_done() -> None:
    """A stream may end with a finish_reason alone, as that of transformers does."""
    end = {"choices": [{"text": "", "finish_reason": "length"}]}
    outcome, _ = answered([event("ab"), event("cd"), event("", 2, **end)], asked=2)
    assert (outcome.status, outcome.counts.tolist()) == (OK, [1, 1])


def test_shares() -> None:
    assert shares([1.0, 2.0, 3.0], None) == [(1.0, 1), (2.0, 2), (3.0, 3)]
    assert shares([1.0, 2.0], 5) == [(1.0, 2), (2.0, 5)]
    assert shares([1.0, 2.0, 3.0], 2) == [(1.0, 0), (2.0, 1), (3.0, 2)]


def test_an_answer_that_ends_early() -> None:
    body = [event("a", 1), event("b", 2), DONE]
    assert answered(body, may_end_early=True)[0].status == OK
    short = answered(body)[0]
    assert (short.status, short.error) == (SHORT, "2 tokens came instead of 4")
    assert answered([DONE], may_end_early=True)[0].status == SHORT
    assert answered(body, asked=1, may_end_early=True)[0].status == SHORT  # too many


@pytest.mark.parametrize(
    ("status", "body", "counted"),
    [
        (
            429,
            '{"error": {"code": "rate_limit_exceeded", "message": "slow\\ndown"}}',
            "rate_limit_exceeded",
        ),
        (429, '{"error": {"message": "slow down"}}', "HTTP 429"),
        (400, '{"error": "no"}', "HTTP 400"),
        (502, "<html>Bad Gateway</html>", "HTTP 502"),
        (
            200,
            event("a", 1) + 'data: {"error": {"code": "overloaded", "message": "later"}}\n\n',
            "overloaded",
        ),
        (200, event("a", 1), CUT),
        (200, event("a", 1) + "data: {nonsense\n\n" + DONE, MALFORMED),
        (200, "data: [1]\n\n" + DONE, MALFORMED),
        (200, 'data: {"choices": 5}\n\n' + DONE, MALFORMED),
        (200, 'data: {"usage": {"completion_tokens": "many"}}\n\n' + DONE, MALFORMED),
    ],
)
def test_what_went_wrong_is_counted_by_its_status(status: int, body: str, counted: str) -> None:
    outcome, _ = answered(body, status)
    assert (
        outcome.status == counted
        and outcome.error
        and "\n" not in outcome.error
        and outcome.ended > outcome.sent
    )


@pytest.mark.system
def test_a_server_that_never_answers() -> None:
    async def silent(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> Outcome:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(silent), base_url="http://test/v1/"
        ) as client:
            caller = OpenAICaller(client, "theirs", True, False)
            outcome = Outcome(0.0, 2, 4)
            await call(caller, caller.prepare("a text", 4, "salt"), outcome, 0.05)
            return outcome

    outcome = asyncio.run(run())
    assert (outcome.status, outcome.error) == (TIMEOUT, "no end after 0.05 s (--timeout)")


def test_strict_sends_only_what_openai_knows() -> None:
    body = [event("a", 4), DONE]
    extensions = {"ignore_eos": True, "cache_salt": "salt"}
    _, sent = answered(body)
    _, strict = answered(body, strict=True)
    assert extensions.items() <= sent.items() and not extensions.keys() & strict.keys()
    assert strict["stream_options"] == {"include_usage": True}
    assert sent == strict | extensions | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    }


def found(response: httpx.Response, wanted: str | None, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model that a server with this answer to GET models is measured with."""

    def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models"
        return response

    new = httpx.AsyncClient
    monkeypatch.setattr(
        httpx,
        "AsyncClient",
        lambda **options: new(transport=httpx.MockTransport(handle), **options),
    )
    return asyncio.run(find_model("http://test/v1/", Credentials(), wanted))


def test_models_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = httpx.Response(
        200, json={"data": [{"id": "theirs"}, {"id": "big", "max_model_len": 99}]}
    )
    assert found(listed, None, monkeypatch) == Model("theirs", None)
    monkeypatch.undo()
    assert found(listed, "big", monkeypatch) == Model("big", 99)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="offers theirs, big"):
        found(listed, "other", monkeypatch)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_models_that_are_not_listed(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that was given is enough, unless the credentials are wrong."""
    if status == 401:
        with pytest.raises(ConfigError, match=r"no list of models .*401"):
            found(httpx.Response(status), "theirs", monkeypatch)
    else:
        assert found(httpx.Response(status), "theirs", monkeypatch) == Model("theirs", None)
        monkeypatch.undo()
        with pytest.raises(ConfigError, match=rf"no list of models .*{status}"):
            found(httpx.Response(status), None, monkeypatch)
