"""Batch files: every line of a file gets one answer, wherever an earlier run was killed."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest
from rich.console import Console

from jaxserve import LLM, SamplingParams
from jaxserve.completion import TextDelta
from jaxserve.errors import ConfigError
from jaxserve.generate.batch import LIMITS, TRIES, BatchRun
from jaxserve.generate.batch_files import (
    BatchOutput,
    check_batch_file,
    read_lines,
    read_requests,
)
from jaxserve.generate.batch_format import URLS, LineError, parse_line
from jaxserve.server.core.answer_events import Outbox
from tests.embedding_model import BOUND, golden, with_tokenizer
from tests.jaxserve.generate_harness import (
    BUNDLED,
    ROOT,
    SMALL,
    STORY,
    Call,
    assert_refused,
    caller,
)

CHAT = ROOT / "checkpoints" / "bundled" / "tiny-chat"
HELLO = [{"role": "user", "content": "Hello"}]
LONGEST = 1000  # bytes of a line
ONE = b'{"custom_id": "one", "url": "/v1/completions", "body": {"prompt": "a"}}'


def request(custom_id: str, kind: str = "completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{kind}", "body": body}


def written(path: Path, *lines: Any) -> Path:
    """Write requests, or whatever else stands in a line, to a file."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return path


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def answers_of(path: Path) -> dict[str | None, Any]:
    """The answers by their custom ids; each may be there once."""
    answers = records(path)
    assert len({answer["id"] for answer in answers}) == len(answers)
    found = Counter(answer["custom_id"] for answer in answers)
    assert not [custom_id for custom_id, times in found.items() if times > 1]
    return {answer["custom_id"]: answer for answer in answers}


# ---- lines


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "has more than"),
        ("[" * 900, "is not JSON"),
        ('"text"', "is no JSON object"),
        (b'{"custom_id": "\xed\xa0\x80"}', "is not JSON"),
        ('{"custom_id": "a", "custom_id": "b"}', "is not JSON: 'custom_id' is given twice"),
        ('{"custom_id": "a", "body": {"temperature": NaN}}', "NaN is no JSON number"),
        ({"url": URLS[0], "body": {}}, "custom_id is None; give a string"),
        ({"custom_id": 3, "url": URLS[0], "body": {}}, "custom_id is 3; give a string"),
        (request("a") | {"priority": 1}, "'priority' is no field of a request"),
        (request("a") | {"method": "GET"}, "method is 'GET'; give POST"),
        (request("a", "responses"), "url is '/v1/responses'; give one of /v1/chat/completions"),
        (request("a") | {"url": ["x"]}, "give one of"),
        (request("a") | {"body": "x"}, "body is 'x'; give a JSON object"),
        (request("a", stream=True), "body.stream is set"),
        (
            json.dumps(request("a", top_p=7)).replace("7", "-1e400"),
            "beyond the numbers that can be read",
        ),
    ],
)
def test_a_line_that_is_no_request(line: Any, problem: str) -> None:
    text = line if isinstance(line, str | bytes) else json.dumps(line)
    with pytest.raises(LineError, match=problem):
        parse_line(text.encode() if isinstance(text, str) else text, LONGEST)


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  \n" + b"x" * 3000 + b"\nlast")
    found = list(read_lines(file, LONGEST))
    assert found == [(1, b"one"), (4, b"x" * (LONGEST + 1)), (5, b"last")]
    file.write_bytes(b"x" * LONGEST + b"\n")
    assert list(read_lines(file, LONGEST)) == [(1, b"x" * LONGEST)]
    file.write_bytes(b"")
    assert list(read_lines(file, LONGEST)) == []


def test_how_deep_a_line_may_be() -> None:
    """What the parser just takes must not be too deep for what follows."""
    for depth in range(900, 1600):
        deep = '{"a":' * depth + "1" + "}" * depth
        try:
            parse_line(json.dumps(request("a", user=7)).replace("7", deep).encode())
        except LineError as error:
            assert "recursion" in str(error) or "nested" in str(error)


def test_lines_with_one_custom_id(tmp_path: Path) -> None:
    """A line's error does not hide the answer to an earlier line: the last record counts."""
    bad = request("one") | {"priority": 1}
    batch = written(tmp_path / "in.jsonl", bad, request("one"), request("one", n=2), bad)
    first, answered, twice, last = (found for _, _, found in read_requests(batch))
    assert isinstance(first, LineError) and first.custom_id == "one"
    assert not isinstance(answered, LineError) and answered.custom_id == "one"
    assert isinstance(twice, LineError) and twice.custom_id is None
    assert "'one' is that of an earlier line" in str(twice)
    assert isinstance(last, LineError) and last.custom_id is None


def test_ids_of_clients_are_left_out() -> None:
    one, other = (parse_line(json.dumps(request("a", request_id=id)).encode()) for id in "xy")
    assert json.loads(one.body) == json.loads(other.body) == {}
    assert one.id != other.id


# ---- the file of answers


def test_a_file_that_is_cut_anywhere_is_continued(tmp_path: Path) -> None:
    """Each line is there once in the end, whichever byte was the last that was written."""
    requests = [
        parse_line(json.dumps(request(custom_id, prompt="ä")).encode())
        for custom_id in ("one", "zwei-ü", "half of a pair \ud800")
    ]
    bad = 3

    def run(path: Path) -> None:
        with BatchOutput(path) as output:
            output.refuse(bad, b"{", LineError("the line is not JSON"))
            for each in requests:
                if not output.has(each):
                    output.answer(each, 200, b'{"id":"x"}', "x")

    whole = tmp_path / "whole.jsonl"
    run(whole)
    for length in range(whole.stat().st_size + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(whole.read_bytes()[:length])
        run(cut)
        found = answers_of(cut)
        assert found.keys() == {each.custom_id for each in requests} | {None}
        assert found[None]["error"]["line"] == bad
        assert found[None]["error"]["message"] == "line 3: the line is not JSON"


@pytest.mark.parametrize(
    "text",
    [
        *("one line of something else", "{}\n", "[]\n", '{"error": 1, "custom_id": "a"}\n', "\n"),
        '{"id": 3, "custom_id": "a", "error": null}\n',
    ],
)
def test_another_file_is_not_touched(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match="line 1 is no answer to a batch"):
        BatchOutput(file)
    assert file.read_text() == text


def test_two_processes_do_not_write_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxserve.generate.batch_files.LOCK_SECONDS", 0.0)
    file = tmp_path / "out.jsonl"
    with BatchOutput(file), pytest.raises(ConfigError, match="another process writes it"):
        BatchOutput(file)
    BatchOutput(file).__exit__()
    assert capsys.readouterr().err.startswith("waiting for another process that writes")


def test_places_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        BatchOutput(tmp_path)
    with pytest.raises(ConfigError, match="is no regular file"):
        BatchOutput(Path("/dev/null"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="is no regular file"):
        check_batch_file(pipe)


def test_a_file_of_another_batch(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    one, other = (parse_line(json.dumps(request("one", prompt=prompt)).encode()) for prompt in "ab")
    with BatchOutput(file) as output:
        output.answer(one, 200, b"{}", "")
    with BatchOutput(file) as output:
        assert output.has(one)
        for compared in (
            partial(output.has, other),
            partial(output.count_lines, written(tmp_path / "in.jsonl", "{", request("one"))),
        ):
            with pytest.raises(ConfigError, match="answer to another request with the custom_id"):
                compared()
        batch = written(tmp_path / "in.jsonl", "", request("one", prompt="a"), request("one"))
        assert output.count_lines(batch) == 2


def test_a_line_that_is_mended_is_answered(tmp_path: Path) -> None:
    """The last record of a custom id counts, whether it is an answer or an error."""
    file = tmp_path / "out.jsonl"
    bad = ONE.replace(b"url", b"uri")
    with pytest.raises(LineError) as problem:
        parse_line(bad)
    with BatchOutput(file) as output:
        assert output.refuse(1, bad, problem.value)
    one = parse_line(ONE)
    with BatchOutput(file) as output:
        assert not output.has(one)
        output.answer(one, 200, b"{}", "")
    first, last = records(file)
    assert first["custom_id"] == last["custom_id"] == "one"
    assert first["error"] and last["response"]
    with BatchOutput(file) as output:
        assert output.has(one) and not output.refuse(1, bad, problem.value)
        other = bad.replace(b"uri", b"urn")
        assert output.refuse(1, other, problem.value) and not output.has(one)
    with BatchOutput(file) as output:
        assert not output.has(one)


def test_errors_of_lines_that_have_moved(tmp_path: Path) -> None:
    """Each of two such lines has one record, wherever it stands."""
    file = tmp_path / "out.jsonl"
    error = LineError("the line is not JSON")
    for numbers in ((1, 2), (2, 3), (2, 7)):
        with BatchOutput(file) as output:
            new = [output.refuse(number, b"{", error) for number in numbers]
            assert new == [numbers == (1, 2)] * 2
    assert [record["error"]["line"] for record in records(file)] == [1, 2]
    assert len({record["id"] for record in records(file)}) == 2


@pytest.mark.parametrize(
    ("status", "again"),
    [(200, False), (400, False), (413, False)]
    + [(status, True) for status in (404, 408, 409, 429, 500, 503)],
)
def test_errors_that_are_tried_again(tmp_path: Path, status: int, again: bool) -> None:
    file = tmp_path / "out.jsonl"
    one = parse_line(ONE)
    with BatchOutput(file) as output:
        output.answer(one, status, b"{}", "")
    with BatchOutput(file) as output:
        assert output.has(one) is not again
        output.answer(one, 200, b"{}", "")
    with BatchOutput(file) as output:
        assert output.has(one)


def test_a_last_line_that_lacks_its_end(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with BatchOutput(file) as output:
        output.answer(parse_line(ONE), 200, b"{}", "")
    whole = file.read_bytes()
    file.write_bytes(whole.rstrip())
    with BatchOutput(file) as output:
        assert output.has(parse_line(ONE))
    assert file.read_bytes() == whole


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is taken back, and no other follows it."""

    class Full:
        def __init__(self, file: Any):
            self._file = file
            self._room = 30

        def write(self, data: Any) -> int:
            if not self._room:
                raise OSError(errno.ENOSPC, "No space left on device")
            count = self._file.write(bytes(data)[: self._room])
            self._room -= count
            return count

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    file = tmp_path / "out.jsonl"
    with BatchOutput(file) as output:
        output.refuse(1, b"{", LineError("the line is not JSON"))
        before = file.read_bytes()
        monkeypatch.setattr(output, "_file", Full(output._file))
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                output.answer(parse_line(ONE), 200, b"{}", "")
        assert file.read_bytes() == before


# ---- one run


class Server:
    """Stands in for a LocalServer; `reply` answers a body, given with the number of the try."""

    rows = 2

    def __init__(self, reply: Callable[["Server", Any, int], Coroutine[Any, Any, httpx.Response]]):
        self.failure: BaseException | None = None
        self._reply = reply
        self._tries = Counter[str]()

    async def post(self, path: str, body: bytes) -> httpx.Response:
        given = json.loads(body)
        self._tries[given["prompt"]] += 1
        return await self._reply(self, given, self._tries[given["prompt"]])


NO_ROOM = httpx.Response(429, json={"error": {}}, headers={"x-should-retry": "true"})
GOOD = httpx.Response(200, json={"usage": {"prompt_tokens": 1, "completion_tokens": 1}})


def served(folder: Path, server: Server, *lines: Any) -> list[Any]:
    """Answer lines by a server, and return the records."""
    batch = written(folder / "in.jsonl", *lines)
    with BatchOutput(folder / "out.jsonl") as output:
        run = BatchRun(batch, output, len(lines), Console(quiet=True))
        asyncio.run(run._answer_all(server, lambda: None))  # type: ignore[arg-type]
    return records(folder / "out.jsonl")


def test_answers_are_read_while_lines_are(tmp_path: Path) -> None:
    """Tokens must not pile up behind a long row of lines that need no answer."""

    async def reply(server: Server, body: Any, tried: int) -> httpx.Response:
        await asyncio.sleep(0)
        return GOOD

    found = served(tmp_path, Server(reply), request("a", prompt="a"), *["{"] * 100)
    assert [record["custom_id"] for record in found].index("a") < 50
    outbox = Outbox(LIMITS.max_unread_tokens)
    outbox.update(0, TextDelta("", [1] * 100_000))


def test_a_request_waits_until_others_leave_it_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.generate.batch.FIRST_WAIT", 0.0)
    room = asyncio.Event()

    async def reply(server: Server, body: Any, tried: int) -> httpx.Response:
        if body["prompt"] == "long":
            async with asyncio.timeout(60):
                await room.wait()
        elif tried < 10 * TRIES:
            return NO_ROOM
        room.set()
        return GOOD

    lines = [request(prompt, prompt=prompt) for prompt in ("long", "short")]
    found = served(tmp_path, Server(reply), *lines)
    assert [record["response"]["status_code"] for record in found] == [200, 200]


def test_a_request_that_has_no_room_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.generate.batch.FIRST_WAIT", 0.0)
    tries = list[int]()

    async def reply(server: Server, body: Any, tried: int) -> httpx.Response:
        tries.append(tried)
        return NO_ROOM

    (found,) = served(tmp_path, Server(reply), request("a", prompt="a"))
    assert found["response"]["status_code"] == 429 and max(tries) == TRIES


def test_a_refusal_by_an_engine_that_fails_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever try it is that meets the failure, the last one included."""
    monkeypatch.setattr("jaxserve.generate.batch.FIRST_WAIT", 0.0)

    async def reply(failing: int, server: Server, body: Any, tried: int) -> httpx.Response:
        if tried == failing:
            server.failure = OSError("the device is gone")
        return NO_ROOM

    for failing in (1, 2, TRIES):
        assert not served(tmp_path, Server(partial(reply, failing)), request("a", prompt="a"))


# ---- the command


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    return partial(caller(capsys), model=CHAT)


def test_every_kind_of_line(call: Call, tmp_path: Path) -> None:
    batch = written(
        tmp_path / "in.jsonl",
        request("story", prompt=STORY, temperature=0, max_tokens=12),
        request("chat", "chat/completions", messages=HELLO, temperature=0, max_tokens=6),
        "",
        request("two", prompt=[STORY, "The dog"], n=2, seed=1, max_tokens=4),
        "no request",
        request("wrong", prompt=STORY, max_tokens=-1),
        request("embed", "embeddings", input="a text"),
        request("other model", model="gpt-4o", prompt=STORY),
        request("story", prompt=STORY),
        request("unknown", prompt=STORY, max_tokns=3),
    )
    output = tmp_path / "out.jsonl"
    files = ("--batch-file", str(batch), "--output", str(output))
    code, out, err = call(*files)
    assert code == 0 and out == ""
    last = err.splitlines()[-1]
    assert last.startswith("3 answered, 6 with an error; ") and "tokens/s" in last

    lines = records(output)
    refused = {line["error"]["line"]: line for line in lines if line["error"]}
    assert refused.keys() == {5, 9}
    assert "'story' is that of an earlier line" in refused[9]["error"]["message"]
    found = {line["custom_id"]: line["response"] for line in lines if not line["error"]}
    status = {custom_id: response["status_code"] for custom_id, response in found.items()}
    assert status == {
        **dict.fromkeys(("story", "chat", "two"), 200),
        **dict.fromkeys(("wrong", "embed", "unknown"), 400),
        "other model": 404,
    }
    with LLM(CHAT) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        (story,) = llm.generate([STORY], greedy)
        (answer,) = llm.chat(HELLO, greedy, max_tokens=6)
    assert found["story"]["body"]["choices"][0]["text"] == story.text
    assert found["story"]["body"]["id"] == "cmpl-" + found["story"]["request_id"]
    assert found["chat"]["body"]["choices"][0]["message"]["content"] == answer.text
    assert len(found["two"]["body"]["choices"]) == 4
    assert "max_tokens" in found["wrong"]["body"]["error"]["message"]
    assert "tiny-chat" in found["other model"]["body"]["error"]["message"]

    code, _, err = call(*files, "--served-model-name", "gpt-4o")
    assert code == 0 and err.splitlines()[-1].startswith("1 answered, 8 dealt with before; ")
    before = output.read_bytes()
    *earlier, last = records(output)
    assert earlier == lines
    assert last["custom_id"] == "other model" and last["response"]["status_code"] == 200
    code, _, err = call(*files)
    assert code == 0 and output.read_bytes() == before
    assert err.splitlines()[-1].startswith("0 answered, 9 dealt with before; ")


def test_ids_that_two_lines_have(call: Call, tmp_path: Path) -> None:
    lines = [
        request(f"{i}", prompt=STORY, max_tokens=8, request_id="mine", ignore_eos=True)
        for i in range(8)
    ]
    batch = written(tmp_path / "in.jsonl", *lines)
    output = tmp_path / "out.jsonl"
    assert call("--batch-file", str(batch), "--output", str(output))[0] == 0
    assert {a["response"]["status_code"] for a in answers_of(output).values()} == {200}


def test_answers_of_another_batch(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found before the model is loaded, and the file is left as it is."""
    batch = written(tmp_path / "in.jsonl", request("new", prompt="a"), request("one", prompt="b"))
    output = tmp_path / "out.jsonl"
    with BatchOutput(output) as given:
        given.answer(parse_line(ONE), 200, b"{}", "")
    before = output.read_bytes()

    def load(*_: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("jaxserve.generate.program.open_llm", load)
    result = call("--batch-file", str(batch), "--output", str(output))
    assert_refused(result, "an answer to another request with the custom_id 'one'")
    assert output.read_bytes() == before


def test_embeddings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts, expected = golden()
    lines = [request(f"{i}", "embeddings", input=prompt) for i, prompt in enumerate(prompts)]
    batch = written(tmp_path / "in.jsonl", *lines, request("text", prompt="w1"))
    output = tmp_path / "out.jsonl"
    model = with_tokenizer(tmp_path / "model")
    call = partial(caller(capsys), model=model)
    assert call("--batch-file", str(batch), "--output", str(output))[0] == 0
    answers = answers_of(output)
    for i, embedding in enumerate(expected):
        (found,) = answers[f"{i}"]["response"]["body"]["data"]
        assert abs(found["embedding"] - embedding).max() < BOUND
    assert answers["text"]["response"]["status_code"] == 400


def test_an_engine_that_fails_leaves_its_lines_for_the_next_run(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [request(f"{i}", prompt=STORY, seed=i, max_tokens=2 + i) for i in range(30)]
    batch = written(tmp_path / "in.jsonl", *lines)
    output = tmp_path / "out.jsonl"
    files = ("--batch-file", str(batch), "--output", str(output))
    launch = "jaxserve.engine.device.runner.DeviceRunner.launch"
    steps = iter(range(40))
    original = sys.modules["jaxserve.engine.device.runner"].DeviceRunner.launch

    def breaks(*given: Any) -> Any:
        if next(steps, None) is None:
            raise OSError("the device is gone")
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(launch, breaks)
        code, _, err = call(*files)
    assert code == 70 and "error: the engine has failed: the device is gone" in err
    some = answers_of(output)
    assert 0 < len(some) < 30
    code, _, err = call(*files)
    assert code == 0 and f"{len(some)} dealt with before" in err.splitlines()[-1]
    found = answers_of(output)
    assert len(found) == 30
    for i in range(30):
        usage = found[f"{i}"]["response"]["body"]["usage"]
        assert usage["completion_tokens"] <= 2 + i


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), asyncio.CancelledError()])
def test_a_step_that_hangs_when_a_run_ends(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The process ends before anything is freed that the step uses; the pod is told first."""
    hangs = threading.Event()
    goes_on = threading.Event()
    ends: list[object] = []
    close = LLM.close
    original = sys.modules["jaxserve.engine.device.runner"].DeviceRunner.launch

    def launch(*given: Any) -> Any:
        hangs.set()
        goes_on.wait(timeout=60)
        return original(*given)

    async def answer_all(run: BatchRun, server: Any, show: Any) -> None:
        asked = asyncio.ensure_future(server.post(URLS[1], b'{"prompt": "a"}'))
        await asyncio.to_thread(hangs.wait)
        asked.cancel()
        raise error

    def free(llm: LLM) -> None:
        ends.append("freed")
        close(llm)

    def leave(code: int) -> None:
        ends.append(code)
        goes_on.set()
        for thread in threading.enumerate():
            if thread.name == "engine":
                thread.join()
        raise SystemExit(code)

    monkeypatch.setattr("jaxserve.engine.device.runner.DeviceRunner.launch", launch)
    monkeypatch.setattr("jaxserve.generate.batch.BatchRun._answer_all", answer_all)
    monkeypatch.setattr("jaxserve.server.local_server.CLOSING_SECONDS", 0.1)
    monkeypatch.setattr("jaxserve.cluster.bootstrap.SingleHost.fail", lambda _: ends.append("pod"))
    monkeypatch.setattr("jaxserve.llm.LLM.close", free)
    monkeypatch.setattr("faulthandler.dump_traceback", lambda *_, **__: ends.append("stacks"))
    monkeypatch.setattr("os._exit", leave)
    batch = written(tmp_path / "in.jsonl", request("a", prompt="a"))
    code, _, err = call("--batch-file", str(batch), "--output", str(tmp_path / "out.jsonl"))
    assert code == 70 and ends[:3] == ["stacks", "pod", 70]
    assert "the engine has failed: a step does not end (the same command goes on)" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--output", "x"], "--output is for a file of requests (add --batch-file)"),
        (["--batch-file", "x"], "--batch-file needs a file for the answers (add --output)"),
        (
            ["--batch-file", "missing", "--output", "x"],
            "--batch-file is missing; it cannot be read: No such file",
        ),
        (
            ["--batch-file", "x", "--output", "y", "--max-tokens", "3"],
            "--max-tokens is given, but",
        ),
        (["--batch-file", "x", "--output", "y", "--chat"], "--chat is given together with"),
        (["--batch-file", "x", "--output", "y", "a prompt"], "--prompt is given together with"),
        (["--batch-file", "x", "--output", "y", "--json"], "--json is given together with"),
    ],
)
def test_flags_that_do_not_go_together(call: Call, arguments: list[str], problem: str) -> None:
    assert_refused(call(*arguments), problem)


@pytest.mark.system
def test_a_run_that_is_killed(tmp_path: Path) -> None:
    """Without a chance to clean up; the texts are those of a run in one go."""
    lines = [
        request(f"{i}", prompt=f"{STORY} {i}", temperature=0, max_tokens=24, ignore_eos=True)
        for i in range(60)
    ]
    batch = written(tmp_path / "in.jsonl", *lines)
    cache = ["--compilation-cache", str(jax.config.jax_compilation_cache_dir)]
    command = [sys.executable, "-m", "jaxserve.generate", "--model", str(BUNDLED), *SMALL, *cache]

    def start(output: Path) -> "subprocess.Popen[str]":
        files = ["--batch-file", str(batch), "--output", str(output)]
        return subprocess.Popen([*command, *files], stderr=subprocess.PIPE, text=True)

    killed = tmp_path / "killed.jsonl"
    process = start(killed)
    while process.poll() is None and _lines(killed) < 25:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with killed.open("ab") as file:
        file.truncate(killed.stat().st_size - 7)  # as if the last write had been cut
    whole = tmp_path / "whole.jsonl"
    for path in (killed, whole):
        process = start(path)
        _, err = process.communicate()
        assert process.returncode == 0, err

    def texts(path: Path) -> dict[str | None, str]:
        found = answers_of(path)
        return {i: a["response"]["body"]["choices"][0]["text"] for i, a in found.items()}

    assert texts(killed) == texts(whole) and len(texts(whole)) == 60


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if os.path.exists(path) else 0
