"""Endpoints about the server, and the tokens that they need."""

import asyncio
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.jaxserve.server.http.harness import serving

OPEN = {"/health", "/ping"}
PATHS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/embeddings": "POST",
    "/v1/models": "GET",
    "/v1/models/fake": "GET",
    "/health": "GET",
    "/ping": "GET",
    "/metrics": "GET",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/version": "GET",
    "/nowhere": "GET",
}


def test_models(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            (card,) = (await http.client.models.list()).data
            assert card == await http.client.models.retrieve("fake")
            assert (card.id, card.object, card.owned_by) == ("fake", "model", "jaxserve")
            assert card.model_extra and card.model_extra["max_model_len"] == 512
            response = await http.raw.get("/v1/models/org/other")
            assert (response.status_code, response.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )

    asyncio.run(main())


def test_plain_questions(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            assert (await http.raw.get("/health")).json() == {"status": "ready"}
            assert (await http.raw.get("/version")).json() == {"version": version("jaxserve")}
            metrics = await http.raw.get("/metrics")
            assert metrics.content == b"fake_metric 1\n" and metrics.headers[
                "content-type"
            ].startswith("text/plain")

    asyncio.run(main())


@pytest.mark.system
def test_tokenize(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            text = await http.post("/tokenize", {"model": "fake", "prompt": "hé"})
            assert text.json() == {
                "tokens": [256, *"hé".encode()],
                "count": 4,
                "max_model_len": 512,
            }
            empty = await http.post("/tokenize", {"prompt": ""})
            assert empty.json()["tokens"] == [256]
            chat = await http.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
            assert chat.json()["tokens"] == list(b"user: hi\n")
            back = await http.post("/detokenize", {"tokens": text.json()["tokens"]})
            assert back.json() == {"prompt": "hé"}
            assert (
                await http.post("/tokenize", {"model": "other", "prompt": "x"})
            ).status_code == 404

    asyncio.run(main())


def test_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            for path, method in PATHS.items():
                for given in (None, "Bearer wrong", "secret", "Basic secret", "Bearer sécret"):
                    headers = {b"authorization": (given or "").encode()}
                    response = await http.raw.request(method, path, headers=headers)
                    if path in OPEN:
                        assert response.status_code == 200
                    else:
                        error = response.json()["error"]
                        assert (response.status_code, error["code"]) == (401, "invalid_api_key"), (
                            path,
                            given,
                        )
                assert (await http.raw.request(method, path)).status_code != 401

    asyncio.run(main())


def test_wrong_methods_and_paths(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for path, right in PATHS.items():
                for method in {"GET", "POST", "PUT", "DELETE"} - {right}:
                    response = await http.raw.request(method, path)
                    error = response.json()["error"]
                    wanted = (
                        (404, "unknown_url")
                        if path == "/nowhere"
                        else (405, "method_not_supported")
                    )
                    assert (response.status_code, error["code"]) == wanted, (method, path)
                    assert error["type"] == "invalid_request_error" and error["param"] is None
                    assert wanted[0] == 404 or right in response.headers["allow"]

    asyncio.run(main())


def test_a_slash_at_the_end_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            for path in ("/health", "/v1/models", "/v1/models/fake", "/version", "/metrics"):
                plain = await http.raw.get(path)
                for slashes in ("/", "//"):
                    response = await http.raw.get(path + slashes)
                    assert (response.status_code, response.content) == (200, plain.content)
            body = {"prompt": "x", "max_tokens": 1}
            assert (await http.post("/v1/completions/", body)).status_code == 200
            headers = {"authorization": "Bearer wrong"}
            assert (await http.raw.get("/health/", headers=headers)).status_code == 200
            assert (await http.raw.get("/metrics/", headers=headers)).status_code == 401

    asyncio.run(main())


def test_small_writes_leave_at_once(tmp_path: Path) -> None:
    """With Nagle's algorithm a token would wait 40 ms for the acknowledgement of the one before."""

    async def main() -> None:
        async with serving(tmp_path) as http:
            await http.raw.get("/health")
            (connection,) = http.uvicorn.server_state.connections
            accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(main())


def test_ids(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            body = {"prompt": "x", "max_tokens": 1}
            for given, header in (
                ("mine", "mine"),
                ("né", None),
                ("a b", None),
                ("x\r\ny: z", None),
            ):
                response = await http.post("/v1/completions", body | {"request_id": given})
                assert response.json()["id"] == f"cmpl-{given}"
                assert response.headers.get("x-request-id") == header
            response = await http.post(
                "/v1/completions", body | {"request_id": "mine"}, headers={"x-request-id": "t"}
            )
            assert response.json()["id"] == "cmpl-mine" and response.headers["x-request-id"] == "t"
            response = await http.raw.get("/nowhere", headers={"x-request-id": "t"})
            assert response.headers["x-request-id"] == "t"

    asyncio.run(main())
