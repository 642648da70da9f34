"""Who a client is: a connection, or a token where the server has several."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from grpc import aio

from jaxserve.errors import ConfigError, CredentialError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.request_observer import RequestObserver
from jaxserve.server.security.auth import BearerTokens
from jaxserve.server.security.files import MAX_TOKENS, read_tokens
from jaxserve.v1 import common_pb2, inference_pb2
from jaxserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.jaxserve.server.harness import Running, running

TWO = BearerTokens(("first", "second"), admin="root")


def test_a_file_has_one_token_or_more(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    assert read_tokens(None, "--token-file") == ()
    for content, expected in ((b"secret", ("secret",)), (b" a\r\n\n  b \nc", ("a", "b", "c"))):
        path.write_bytes(content)
        assert read_tokens(path, "--token-file") == expected
    path.write_bytes(b"a\nb\na\n")
    assert read_tokens(path, "--token-file") == ("a", "b")


TOO_MANY = b"\n".join(b"%d" % number for number in range(MAX_TOKENS + 1))


@pytest.mark.parametrize("content", [b"", b" \n", b"a b", b"a\n\xc3\xa9\n", b"x" * 5000, TOO_MANY])
def test_a_file_with_anything_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="--token-file"):
        read_tokens(path, "--token-file")


def test_each_of_several_tokens_is_enough() -> None:
    for token in ("first", "second", "root"):
        TWO.check([f"Bearer {token}"], admin=False)
    for given in ([], ["Bearer third"], ["Bearer firstsecond"], ["Bearer first\nsecond"]):
        with pytest.raises(CredentialError):
            TWO.check(given, admin=False)


def test_a_client_is_a_token_or_a_connection() -> None:
    assert TWO.client_of(["Bearer first"], "a") == TWO.client_of(["bearer first"], "b")
    names = {TWO.client_of([f"Bearer {token}"], "a") for token in ("first", "second", "root")}
    assert len(names) == 3 and not any(token in name for name in names for token in TWO.clients)
    for tokens in (BearerTokens(), BearerTokens(("one",), admin="root")):
        assert tokens.client_of(["Bearer one"], "a") == "a"
        assert tokens.client_of(["Bearer one"], "b") == "b"


class Clients(RequestObserver):
    """The clients of the requests that have ended."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def ended(self, answer: Answer, error: object) -> None:
        self.names.append(answer.incoming.client)
        assert answer.prepared.request.client == answer.incoming.client


@asynccontextmanager
async def connections(server: Running, number: int) -> AsyncIterator[list[InferenceServiceStub]]:
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [aio.insecure_channel(server.address, options=options) for _ in range(number)]
        yield [
            InferenceServiceStub(await stack.enter_async_context(channel)) for channel in channels
        ]


def metadata(token: str | None) -> Sequence[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []


@pytest.mark.parametrize(
    ("tokens", "sent", "distinct"),
    [(None, (None, None), 2), (TWO, ("first", "first"), 1), (TWO, ("first", "second"), 2)],
)
def test_over_grpc(
    tmp_path: Path, tokens: BearerTokens | None, sent: tuple[str | None, ...], distinct: int
) -> None:
    seen = Clients()
    request = inference_pb2.GenerateRequest(
        text="x", sampling=common_pb2.SamplingParams(max_tokens=1)
    )

    async def main() -> None:
        async with (
            running(tmp_path, tokens=tokens, observers=(seen,)) as server,
            connections(server, 2) as stubs,
        ):
            for stub, token in zip(stubs, sent, strict=True):
                await stub.Generate(request, metadata=metadata(token))
                await stub.Generate(request, metadata=metadata(token))
                score = inference_pb2.ScoreRequest(text="xy")
                await stub.Score(score, metadata=metadata(token))

    asyncio.run(main())
    assert len(seen.names) == 6 and len(set(seen.names)) == distinct
    assert "" not in seen.names


@pytest.mark.parametrize(
    ("tokens", "sent", "distinct"),
    [(None, (None, None), 2), (TWO, ("first", "first"), 1), (TWO, ("first", "second"), 2)],
)
def test_over_http(
    tmp_path: Path, tokens: BearerTokens | None, sent: tuple[str | None, ...], distinct: int
) -> None:
    seen = Clients()

    async def main() -> None:
        async with running(tmp_path, tokens=tokens, observers=(seen,), http=True) as server:
            base = f"http://127.0.0.1:{server.process.listeners.ports['HTTP']}"
            for token in sent:
                async with httpx.AsyncClient(
                    base_url=base, headers=dict(metadata(token))
                ) as client:
                    for body in ({"prompt": "x"}, {"prompt": ["x", "y"]}):
                        answer = await client.post("/v1/completions", json=body | {"max_tokens": 1})
                        assert answer.status_code == 200, answer.text

    asyncio.run(main())
    assert len(seen.names) == 6 and len(set(seen.names)) == distinct
    assert "" not in seen.names


def test_headers_of_proxies_make_no_other_client(tmp_path: Path) -> None:
    """Whoever may write them would have a share of the rows for each address that it invents."""
    seen = Clients()
    number = 6

    async def main() -> None:
        async with running(tmp_path, observers=(seen,), http=True) as server:
            base = f"http://127.0.0.1:{server.process.listeners.ports['HTTP']}"
            async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
                for each in range(number):
                    answer = await client.post(
                        "/v1/completions",
                        json={"prompt": "x", "max_tokens": 1},
                        headers=headers_of_proxy(f"10.0.0.{each}"),
                    )
                    assert answer.status_code == 200, answer.text
            await server.at_rest()

    asyncio.run(main())
    assert len(seen.names) == number and len(set(seen.names)) == 1
    assert seen.names[0].startswith("127.0.0.1:")


def headers_of_proxy(address: str) -> dict[str, str]:
    """Return headers by which proxies say who has asked them."""
    return {
        "x-forwarded-for": address,
        "x-forwarded-proto": "https",
        "x-real-ip": address,
        "forwarded": f"for={address};proto=https",
    }
