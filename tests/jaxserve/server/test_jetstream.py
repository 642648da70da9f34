"""JetStream's clients: their own messages, as google-jetstream 0.2.2 describes them, before the fake device."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.errors import JaxserveError
from jaxserve.server.core.answer import Answer
from jaxserve.server.core.limits import Limits
from jaxserve.server.flags import parser
from jaxserve.server.jetstream import SERVICE
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.v1 import jetstream_pb2 as ours
from jaxserve.v1 import admin_pb2
from tests.byte_tokenizer import ByteTokenizer
from tests.fake_runner import naive
from tests.jaxserve.engine.host.driver import request as engine_request
from tests.jaxserve.server.harness import Running, running
from tests.jaxserve.server.security.test_tls import listening

GOLDEN = Path(__file__).parents[2] / "golden" / "jetstream_0.2.2.binpb"
TEXT = "The quick brown fox"
BOS = ByteTokenizer.bos_id
LATER = {"metadata": 7, "num_samples": 8, "lora_adapter_id": 9, "has_bos": 10}  # fields that 0.2.2 has not yet


class Theirs:
    """JetStream's messages and calls, in a pool of their own."""

    def __init__(self) -> None:
        pool = descriptor_pool.DescriptorPool()
        described = FileDescriptorProto.FromString(GOLDEN.read_bytes())
        pool.Add(described)  # pyright: ignore[reportAttributeAccessIssue]
        file = pool.FindFileByName(described.name)
        self.service = file.services_by_name["Orchestrator"]
        self.types = {name: message_factory.GetMessageClass(d) for name, d in file.message_types_by_name.items()}

    def request(self, **fields: Any) -> Message:
        return self.types["DecodeRequest"](**fields)

    def call(self, channel: aio.Channel, name: str) -> Any:
        """What the generated stub has under this name."""
        method = self.service.methods_by_name[name]
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = message_factory.GetMessageClass(method.output_type)
        path = f"/{self.service.full_name}/{name}"
        return kind(path, request_serializer=_serialized, response_deserializer=answer.FromString)


def _serialized(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


def later(request: Message, num_samples: int = 0, lora: bytes = b"", has_bos: bool = False) -> bytes:
    """With fields that 0.2.2 does not have, as they are on the wire."""
    found = request.SerializeToString()
    found += bytes([8 << 3, num_samples]) if num_samples else b""
    found += bytes([9 << 3 | 2, len(lora)]) + lora if lora else b""
    return found + (bytes([10 << 3, 1]) if has_bos else b"")


def text(content: str = TEXT, **fields: Any) -> Message:
    return Theirs().request(text_content={"text": content}, **{"max_tokens": 8} | fields)


def ids(content: list[int], **fields: Any) -> Message:
    return Theirs().request(token_content={"token_ids": content}, **{"max_tokens": 8} | fields)


def expected(prompt: list[int], n: int = 8, index: int = 0) -> list[int]:
    """What the fake device answers with seed 1, by its arithmetic over a plain list."""
    return naive(engine_request(prompt=tuple(prompt), max_tokens=n), index, 1, n)


class Seen:
    """An observer: the requests that ended."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def refused(self, call: Any, error: JaxserveError) -> None: ...
    def stepped(self, news: Any) -> None: ...
    def received(self, answer: Answer, tokens: int, first: bool, seconds: float) -> None: ...
    def ended(self, answer: Answer, error: JaxserveError | None) -> None:
        self.answers.append(answer)


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed that the server draws for every request: the fake device heeds it even where it should be greedy."""
    monkeypatch.setattr("jaxserve.server.core.service.secrets.randbits", lambda bits: 1)


def listener(server: Running, token: str | None = None, temperature: float = 0.0) -> Any:
    return listening(server, token, jetstream_port=0, jetstream_temperature=temperature)  # type: ignore[arg-type]


async def decode(server: Running, request: Message | bytes, **options: Any) -> list[Any]:
    """All responses."""
    async with listener(server, **options) as addresses, aio.insecure_channel(addresses["JetStream"]) as channel:
        return [response async for response in Theirs().call(channel, "Decode")(request)]


def sample(responses: list[Any], index: int = 0) -> tuple[str, list[int]]:
    """Text and ids of one, as JetStream's clients collect them: from every message."""
    samples = [response.stream_content.samples[index] for response in responses]
    return "".join(s.text for s in samples), [token for s in samples for token in s.token_ids]


def fields_of(message: Descriptor) -> Iterator[tuple[str, FieldDescriptor]]:
    for field in message.fields:
        yield f"{message.name}.{field.name}", field
    for nested in message.nested_types:
        yield from fields_of(nested)


def test_numbers_and_types_are_jetstream_s() -> None:
    """Of 0.2.2's fields every one, and the later ones beside them."""

    def wire(field: FieldDescriptor) -> tuple[Any, ...]:
        kind = field.message_type.name if field.message_type else ""
        oneof = field.containing_oneof.name if field.containing_oneof else ""
        return field.number, field.type, kind, field.is_repeated, oneof

    def all_fields(types: Any) -> dict[str, tuple[Any, ...]]:
        return {name: wire(field) for message in types for name, field in fields_of(message)}

    theirs = all_fields(kind.DESCRIPTOR for kind in Theirs().types.values())
    mine = all_fields(ours.DESCRIPTOR.message_types_by_name.values())
    assert len(theirs) == 13 and theirs.items() <= mine.items()
    added = {name.removeprefix("DecodeRequest."): mine[name][0] for name in mine.keys() - theirs.keys()}
    assert added == LATER | {"Metadata.start_time": 1}
    methods = {name: method.server_streaming for name, method in Theirs().service.methods_by_name.items()}
    assert methods == {"Decode": True, "HealthCheck": False}


def test_both_may_be_in_one_process() -> None:
    """A pool of descriptors has every name once."""
    pool, mine = descriptor_pool.DescriptorPool(), FileDescriptorProto()
    ours.DESCRIPTOR.CopyToProto(mine)
    pool.Add(FileDescriptorProto.FromString(GOLDEN.read_bytes()))  # pyright: ignore[reportAttributeAccessIssue]
    pool.Add(mine)  # pyright: ignore[reportAttributeAccessIssue]


def test_text(tmp_path: Path) -> None:
    """Greedy, and nothing is cut; older clients set a priority."""
    seen = Seen()

    async def main() -> None:
        async with running(tmp_path, observers=(seen,)) as server:
            responses = await decode(server, text(priority=1, session_cache=""))
            wanted = expected([BOS, *TEXT.encode()])
            assert sample(responses) == (ByteTokenizer().decode(wanted), wanted)
            assert {response.WhichOneof("content") for response in responses} == {"stream_content"}
            assert {len(response.stream_content.samples) for response in responses} == {1}
            params = seen.answers[0].prepared.request.params
            assert (params.temperature, params.top_k, params.top_p, params.n) == (0, 0, 1, 1)
            await server.at_rest()

    asyncio.run(main())


def test_ids(tmp_path: Path) -> None:
    """As the benchmark sends them: without BOS, which is put before them; no text comes back."""
    prompt = list(TEXT.encode())

    async def main() -> None:
        async with running(tmp_path) as server:
            assert sample(await decode(server, ids(prompt))) == ("", expected([BOS, *prompt]))
            assert sample(await decode(server, later(ids(prompt), has_bos=True))) == ("", expected(prompt))
            own = later(ids([BOS, *prompt]), has_bos=True)
            assert sample(await decode(server, own)) == ("", expected([BOS, *prompt]))
            assert sample(await decode(server, later(text(), has_bos=True)))[1] == expected(prompt)
            await server.at_rest()

    asyncio.run(main())


def test_samples(tmp_path: Path) -> None:
    """As many in every message, in order."""
    prompt, seen = [BOS, *TEXT.encode()], Seen()

    async def main() -> None:
        async with running(tmp_path, observers=(seen,)) as server:
            responses = await decode(server, later(text(), num_samples=3), temperature=0.5)
            assert {len(response.stream_content.samples) for response in responses} == {3}
            for index in range(3):
                wanted = expected(prompt, index=index)
                assert sample(responses, index) == (ByteTokenizer().decode(wanted), wanted)
            assert seen.answers[0].prepared.request.params.temperature == 0.5
            await server.at_rest()

    asyncio.run(main())


def test_an_end_token_is_told(tmp_path: Path) -> None:
    wanted = expected([BOS, *TEXT.encode()], n=20)
    end = next(token for place, token in enumerate(wanted) if place > 3 and token not in wanted[:place])
    length = wanted.index(end) + 1

    async def main() -> None:
        async with running(tmp_path) as server:
            server.service.prompts = replace(server.service.prompts, eos_ids=(end,))
            found = sample(await decode(server, text(max_tokens=20)))
            assert found == (ByteTokenizer().decode(wanted[: length - 1]), wanted[:length])
            await server.at_rest()

    asyncio.run(main())


@pytest.mark.parametrize(
    "request_, code, problem",
    [
        (Theirs().request(max_tokens=8), "INVALID_ARGUMENT", "content: is missing"),
        (text(max_tokens=0), "INVALID_ARGUMENT", "max_tokens: is 0"),
        (text(max_tokens=1000), "INVALID_ARGUMENT", "text_content.text: "),
        (text(session_cache="gs://x"), "INVALID_ARGUMENT", "session_cache: is 'gs://x'"),
        (later(text(), lora=b"poet"), "INVALID_ARGUMENT", "lora_adapter_id: is 'poet'; this server has none"),
        (later(text(), num_samples=17), "INVALID_ARGUMENT", "num_samples: is 17"),
        (text().SerializeToString() + bytes([11 << 3, 1]), "INVALID_ARGUMENT", "number 11"),
        (ids([1, 258]), "INVALID_ARGUMENT", "token_content.token_ids: entry 1 is 258"),
        (ids([1] * 600), "INVALID_ARGUMENT", "token_content.token_ids: has 601 tokens"),
        (later(ids([]), has_bos=True), "INVALID_ARGUMENT", "token_content.token_ids: has no tokens"),
    ],
)
def test_refused(tmp_path: Path, request_: Message | bytes, code: str, problem: str) -> None:
    async def main() -> None:
        async with running(tmp_path) as server:
            with pytest.raises(aio.AioRpcError) as caught:
                await decode(server, request_)
            assert caught.value.code() is grpc.StatusCode[code]
            assert problem in (caught.value.details() or "")
            await server.at_rest()

    asyncio.run(main())


def test_a_full_queue(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED, which JetStream's clients try again after; whoever waits already gets its answer."""
    hold = threading.Event()

    async def main() -> None:
        async with running(tmp_path, limits=Limits(max_waiting_requests=1), max_batch=1) as server:
            server.runner.hook = lambda number: hold.wait(20) and None
            async with listener(server) as addresses, aio.insecure_channel(addresses["JetStream"]) as channel:
                calls = [Theirs().call(channel, "Decode")(text()) for _ in range(3)]
                codes = [asyncio.create_task(_code(call)) for call in calls]
                while sum(code.done() for code in codes) < 2:
                    await asyncio.sleep(0.001)
                hold.set()
                assert sorted(await asyncio.gather(*codes)) == ["OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
            await server.at_rest()

    asyncio.run(main())


async def _code(call: Any) -> str:
    """The status's name, after everything was read."""
    with contextlib.suppress(aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not aio.EOF:
            pass
    return (await call.code()).name


def test_a_client_that_leaves_frees_its_row_and_pages(tmp_path: Path) -> None:
    metrics = Metrics(lambda: 0)

    async def main() -> None:
        async with running(tmp_path, seconds=0.002, observers=(metrics,)) as server:
            async with listener(server) as addresses, aio.insecure_channel(addresses["JetStream"]) as channel:
                call = Theirs().call(channel, "Decode")(text(max_tokens=400))
                await call.read()
                assert server.service.loads.pages_used
                call.cancel()
                await server.at_rest()
            steps = server.runner.steps
            assert steps < 100 and "jaxserve:request_cancelled_total 1.0" in metrics.render().decode()

    asyncio.run(main())


def test_an_abort_is_no_answer(tmp_path: Path) -> None:
    """A response cannot say that it was cut short, so the status does."""

    async def main() -> None:
        async with running(tmp_path, seconds=0.002) as server:
            async with listener(server) as addresses, aio.insecure_channel(addresses["JetStream"]) as channel:
                call = Theirs().call(channel, "Decode")(text(max_tokens=400))
                await call.read()
                (id,) = server.service._requests
                await server.admin.Abort(admin_pb2.AbortRequest(request_ids=[id]))
                assert await _code(call) == "CANCELLED" and "aborted" in await call.details()
            await server.at_rest()

    asyncio.run(main())


def test_health_needs_no_token_and_says_when_requests_are_taken(tmp_path: Path) -> None:
    seen = Seen()

    async def main() -> None:
        async with (
            running(tmp_path, opened=False, observers=(seen,)) as server,
            listener(server, token="secret") as addresses,
            aio.insecure_channel(addresses["JetStream"]) as channel,
        ):

            async def is_live() -> bool:
                return (await Theirs().call(channel, "HealthCheck")(Theirs().types["HealthCheckRequest"]())).is_live

            async def is_ready() -> bool:
                request = health_pb2.HealthCheckRequest(service=SERVICE)
                response = await health_pb2_grpc.HealthStub(channel).Check(request)
                return response.status == health_pb2.HealthCheckResponse.SERVING

            assert not await is_live() and not await is_ready()
            server.open()
            assert await is_live()
            decode = Theirs().call(channel, "Decode")
            assert await _code(decode(text())) == "UNAUTHENTICATED"
            metadata = (("authorization", "Bearer secret"), ("traceparent", "00-1"))
            assert await _code(decode(text(), metadata=metadata)) == "OK"
            (answer,) = seen.answers
            assert answer.call.trace == {"traceparent": "00-1"} and answer.call.timeout is None
            server.gate.drain()
            assert not await is_live() and await _code(decode(text())) == "UNAUTHENTICATED"
            await server.at_rest()

    asyncio.run(main())


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args(["--jetstream-port", "9000", "--jetstream-temperature", "0.7"])
    assert (args.jetstream_port, args.jetstream_temperature) == (9000, 0.7)
    assert parser().parse_args([]).jetstream_port is None
    for given in ("2.1", "nan", "warm"):
        with pytest.raises(SystemExit):
            parser().parse_args(["--jetstream-temperature", given])
        assert "--jetstream-temperature: " in capsys.readouterr().err
