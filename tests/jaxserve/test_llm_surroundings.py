"""An LLM beside what its program does: changes of folder, threads, forks, and no close().

Origins: abetlen/llama-cpp-python#471 (threads), ymahlau/fdtdx#56 (a fork that waits for ever),
vllm-project/vllm#1908 and #21073 (an object that is deleted and frees nothing).
"""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxserve import LLM, Completion, EngineOptions, Structure
from jaxserve.call_guard import CallGuard
from jaxserve.engine.events import TokenEvent
from jaxserve.errors import EngineError
from jaxserve.progress import Bar

MODEL = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat"
OPTIONS = EngineOptions(max_batch=4, step_tokens=32, page_size=16, max_context=128)
HELLO = [{"role": "user", "content": "Hello"}]
STORY = "Once upon a time"


def new_llm(model: Path | str = MODEL) -> LLM:
    return LLM(model, options=OPTIONS, progress=False)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with new_llm() as llm:
        yield llm


def answer(llm: LLM, prompt: str = STORY) -> tuple[int, ...]:
    (done,) = llm.generate([prompt], temperature=0, max_tokens=24)
    return done.token_ids


def test_a_relative_folder_stays_the_one_that_was_meant(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    monkeypatch.chdir(MODEL.parent)
    with new_llm(MODEL.name) as moved:
        monkeypatch.chdir(tmp_path)
        asked = {"temperature": 0, "max_tokens": 8}
        assert moved.chat(HELLO, **asked)[0].text == llm.chat(HELLO, **asked)[0].text
    with LLM(MODEL, chat_template="template.jinja", options=OPTIONS) as other:
        monkeypatch.chdir(MODEL)
        assert other.chat(HELLO, max_tokens=2)[0].prompt == "Hello"


def children() -> set[str]:
    """Return the ids of the child processes that any thread of this process has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {child for task in tasks for child in (task / "children").read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are read from /proc")
def test_an_llm_that_is_dropped_leaves_nothing_behind() -> None:
    """No process, no descriptor, no array: close() frees them earlier, and nothing more."""

    def held() -> tuple[set[str], int, int]:
        gc.collect()
        return children(), len(os.listdir("/proc/self/fd")), len(jax.live_arrays())

    before = held()
    llm = new_llm()
    llm.chat(HELLO, max_tokens=2)
    llm.generate([STORY], max_tokens=8, structure=Structure.of("regex", "[a-z]+"))
    assert len(children() - before[0]) == 2, "templates and grammars have a process each"
    del llm
    assert held() == before


def test_threads_wait_for_each_other(llm: LLM) -> None:
    """Calls and streams of several threads give what each gives alone."""
    prompts = [f"{STORY}, {number} cats" for number in range(4)]
    alone = [answer(llm, prompt) for prompt in prompts]
    found: dict[int, object] = {}

    def call(number: int) -> None:
        try:
            if number % 2:
                found[number] = answer(llm, prompts[number])
            else:
                deltas = llm.stream(prompts[number], temperature=0, max_tokens=24)
                found[number] = tuple(token for delta in deltas for token in delta.token_ids)
        except BaseException as error:
            found[number] = error

    for _ in range(3):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(4)] == alone
    assert not llm.engine.has_work
    llm.engine.scheduler.check_invariants()


def test_calls_of_threads_run_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call goes on while that of another thread is between two steps."""
    alone = [answer(llm), answer(llm, "The dog")]
    between = threading.Event()
    goes_on = threading.Event()
    found: list[object] = []

    class SlowBar(Bar):
        def update(self, done: int, total: int, what: str) -> None:
            if threading.current_thread() is not threading.main_thread():
                between.set()
                assert goes_on.wait(60)

    def call() -> None:
        try:
            found.append(answer(llm))
        except BaseException as error:
            found.append(error)

    monkeypatch.setattr(llm, "_bar", lambda title: SlowBar(Console(stderr=True), title))
    thread = threading.Thread(target=call)
    thread.start()
    assert between.wait(60)
    assert answer(llm, "The dog") == alone[1]
    goes_on.set()
    thread.join()
    assert found == [alone[0]]


@pytest.fixture(scope="module")
def one_row() -> Iterator[LLM]:
    with LLM(MODEL, options=replace(OPTIONS, max_batch=1), progress=False) as llm:
        for prompt in (STORY, "The dog"):  # prompts cost the same from now on
            answer(llm, prompt)
        yield llm


LONG = {"temperature": 0, "max_tokens": 110, "ignore_eos": True}


def cost(llm: LLM, call: Callable[[], object]) -> int:
    """Return how many tokens a call computes, padding included."""
    before = llm.runner.total.computed_tokens
    call()
    return llm.runner.total.computed_tokens - before


def in_line(guard: CallGuard) -> int:
    """Return how many threads have the guard or wait for it."""
    return len(guard._line._places)


@contextmanager
def another_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Generate in another thread, which computes only while this one waits for its turn.

    The list has the answer, or an error, behind the block, in which the call has begun.
    """
    found: list[object] = []
    alone = threading.Event()
    step = llm.engine.step

    def step_in_turn() -> list[TokenEvent]:
        if threading.current_thread() is not threading.main_thread():
            wait_until(lambda: in_line(llm._guard) > 1 or alone.is_set())
        return step()

    def call() -> None:
        try:
            found.append(answer(llm, "The dog"))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    open_before = len(llm._streams.unfinished)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", step_in_turn)
        thread.start()
        try:
            wait_until(lambda: len(llm._streams.unfinished) > open_before)
            yield found
        finally:
            alone.set()
            thread.join()


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0001)


def test_a_stop_string_is_seen_while_another_call_waits_for_a_row(
    one_row: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The waiting call's thread computes the other's tokens, but none behind its end."""
    llm = one_row
    (whole,) = llm.generate([STORY], **LONG)
    expected = answer(llm, "The dog")
    places = range(len(whole.text) // 4, len(whole.text))
    at = next(i for i in places if whole.text.find(whole.text[i : i + 8]) == i)
    stop = [whole.text[at : at + 8]]
    separately = cost(llm, lambda: llm.generate([STORY], stop=stop, **LONG))
    separately += cost(llm, lambda: answer(llm, "The dog"))
    assert separately < cost(llm, lambda: llm.generate([STORY], **LONG))
    texts: list[str] = []
    found: list[object] = []

    def together() -> None:
        deltas = llm.stream(STORY, stop=stop, **LONG)
        texts.append(next(deltas).text)
        with another_call(llm, monkeypatch) as answers:
            texts.extend(delta.text for delta in deltas)
        found.extend(answers)

    assert cost(llm, together) == separately
    assert "".join(texts) == whole.text[:at]
    assert found == [expected]


def test_leaving_a_stream_while_another_call_waits_for_a_row(
    one_row: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is aborted before the waiting call's thread computes a further step."""
    llm = one_row
    expected = answer(llm, "The dog")
    separately = cost(llm, lambda: next(llm.stream(STORY, **LONG)))
    separately += cost(llm, lambda: answer(llm, "The dog"))
    found: list[object] = []

    def together() -> None:
        deltas = llm.stream(STORY, **LONG)
        next(deltas)
        with another_call(llm, monkeypatch) as answers:
            deltas.close()  # type: ignore[attr-defined]
        found.extend(answers)

    assert cost(llm, together) <= separately + 1  # a step was begun already
    assert found == [expected]
    assert not llm.engine.has_work


def test_a_stream_gets_each_token_while_another_call_waits_for_a_row(
    one_row: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = one_row
    deltas = llm.stream(STORY, **LONG)
    next(deltas)
    with another_call(llm, monkeypatch):
        costs = [cost(llm, lambda: next(deltas)) for _ in range(40)]
        list(deltas)
    assert costs == [1] * 40


def test_threads_get_the_guard_in_the_order_in_which_they_come() -> None:
    """A thread that leaves it and enters again comes last."""
    guard = CallGuard()
    order: list[object] = []

    def enter(number: int) -> None:
        with guard, guard:
            order.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(4)]
    with guard:
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: in_line(guard) == number + 2)
    with guard:
        order.append("again")
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, "again"]


def test_who_cannot_wait_any_longer_leaves_the_line() -> None:
    guard = CallGuard()
    errors: list[str] = []

    def enter() -> None:
        try:
            with guard:
                pass
        except EngineError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=enter) for _ in range(3)]
    with pytest.raises(EngineError), guard:  # who leaves a closed guard is told as well
        for thread in threads:
            thread.start()
        wait_until(lambda: in_line(guard) == 4)
        guard.close("it is closed")
        for thread in threads:
            thread.join()
        assert errors == ["it is closed"] * 3 and in_line(guard) == 1
    assert in_line(guard) == 0


def test_closing_ends_the_calls_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a thread which computes for others while it waits for its first token."""
    llm = LLM(MODEL, options=replace(OPTIONS, max_batch=1), progress=False)
    deltas = llm.stream(STORY, **LONG)
    next(deltas)
    with another_call(llm, monkeypatch) as found:
        llm.close()
    assert len(found) == 1 and isinstance(found[0], EngineError)
    with pytest.raises(EngineError, match="closed"):
        list(deltas)


def test_ctrl_c_is_for_the_main_thread_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for its turn, or computes; the call of the other thread goes on."""
    alone = answer(llm)
    found: dict[str, object] = {}
    holds = threading.Event()
    pressed = threading.Event()
    step = llm.engine.step

    def slow_step() -> list[TokenEvent]:
        if threading.current_thread() is not threading.main_thread():
            holds.set()
            assert pressed.wait(60)
        return step()

    def call() -> None:
        try:
            found["answer"] = answer(llm)
        except BaseException as error:
            found["answer"] = error

    def press() -> None:
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            time.sleep(0.001)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGINT)
        pressed.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(llm.engine, "step", slow_step)
    threads = [threading.Thread(target=call), threading.Thread(target=press)]
    try:
        threads[0].start()
        assert holds.wait(60)
        threads[1].start()
        with pytest.raises(KeyboardInterrupt):
            answer(llm)
    finally:
        pressed.set()
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGINT, before)
    assert found["answer"] == alone


def use_in_fork(llm: LLM, sender: Connection) -> None:
    calls = {
        "generate": lambda: llm.generate([STORY], max_tokens=1),
        "chat": lambda: llm.chat(HELLO, max_tokens=1),
        "stream": lambda: list(llm.stream(STORY, max_tokens=1)),
        "prepare": lambda: llm.prepare(STORY),
        "warm_up": lambda: llm.warm_up(),
    }
    for name, call in calls.items():
        try:
            call()
        except EngineError as error:
            sender.send((name, str(error)))
    llm.close()
    sender.send(("close", "done"))


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_it_cannot_use_it(llm: LLM) -> None:
    """Before, it waited for threads that it does not have; the process that made it goes on."""
    expected = answer(llm)
    llm.chat(HELLO, max_tokens=2)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=use_in_fork, args=(llm, sender))
    child.start()
    sender.close()
    told = [receiver.recv() for _ in range(6)]
    child.join()
    assert [name for name, _ in told] == [
        *("generate", "chat", "stream", "prepare", "warm_up", "close")
    ]
    assert all("spawn or forkserver" in text for _, text in told[:5])
    assert answer(llm) == expected
    assert isinstance(llm.chat(HELLO, max_tokens=2)[0], Completion), "its process was not ended"
