"""AsyncLLM: coroutines of any event loop share an engine, and each gets what it gets alone.

The answers are compared with those of LLM, which tests/jaxserve/engine compares with others'.
"""

import asyncio
import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, Completion, EngineOptions, SamplingParams, Structure
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError, EngineError, PurposeError, RequestError
from tests.embedding_model import BOUND, golden, with_tokenizer
from tests.notebook_kernel import Kernel

MODEL = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat"
OPTIONS = EngineOptions(
    max_batch=8, step_tokens=64, page_size=16, max_context=1024, cache_tokens=4096
)
ENDLESS = SamplingParams(ignore_eos=True, max_tokens=1000)
HELLO = [{"role": "user", "content": "Hello"}]
STORY = "Once upon a time"
PROMPTS = [f"{STORY} there {verb} {number} cats" for verb in ("were", "lived") for number in "2479"]
GREEDY = SamplingParams(temperature=0, max_tokens=16)

Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def alone() -> dict[str, Tokens]:
    """The tokens of each prompt, computed by itself."""
    with LLM(MODEL, options=OPTIONS) as llm:
        return {prompt: llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS}


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(MODEL, options=OPTIONS)
    yield llm
    assert asyncio.run(idle(llm)), "requests were left in the engine"
    asyncio.run(llm.close())


@pytest.fixture
def llm(shared: AsyncLLM) -> Iterator[AsyncLLM]:
    yield shared
    assert asyncio.run(idle(shared)), "requests were left in the engine"


async def idle(llm: AsyncLLM) -> bool:
    """Wait until no step is left to run; return whether every page can be had again."""

    def is_free(engine: Engine) -> bool | None:
        if engine.has_work:
            return None
        engine.scheduler.check_invariants()
        pools = [cache.pool for lane in engine.scheduler.lanes for cache in lane.caches]
        return all(pool.available == pool.num_pages for pool in pools)

    while (free := await llm._on_engine(is_free)) is None:
        await asyncio.sleep(0.001)
    return free and not llm._calls._requests


async def tokens_of(llm: AsyncLLM, prompt: str) -> Tokens:
    (done,) = await llm.generate([prompt], GREEDY)
    return done.token_ids


async def streamed(llm: AsyncLLM, prompt: str) -> Tokens:
    return tuple([token async for d in llm.stream(prompt, GREEDY) for token in d.token_ids])


def test_coroutines_with_random_cancellations(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    """Those that are not cancelled give what they give alone."""

    async def all_of_them() -> None:
        draw = random.Random(4)
        prompts = [draw.choice(PROMPTS) for _ in range(200)]
        tasks = [
            asyncio.create_task(draw.choice((tokens_of, streamed))(llm, prompt))
            for prompt in prompts
        ]
        unwanted = tasks[::2]  # however long steps take to compile
        unwanted[0].cancel()
        while not all(task.done() for task in tasks):
            if draw.random() < 0.6:
                draw.choice(unwanted).cancel()
            await asyncio.sleep(draw.random() * 0.02)
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        finished = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            if not isinstance(answer, asyncio.CancelledError):
                assert answer == alone[prompt]
                finished += 1
        assert len(tasks) / 2 <= finished < len(tasks)
        assert await idle(llm)

    asyncio.run(all_of_them())


def in_threads(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run coroutines in an event loop and a thread each, at once, and return their results."""
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = asyncio.run(work[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found.get(number) for number in range(len(work))]


def test_threads_with_a_loop_each(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    found = in_threads(*(tokens_of(llm, prompt) for prompt in PROMPTS))
    assert found == [alone[prompt] for prompt in PROMPTS] and len(found) == 8


def test_two_loops_with_many_coroutines_each(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    async def ask(call: Any) -> list[Tokens]:
        return await asyncio.gather(*(call(llm, prompt) for prompt in PROMPTS * 2))

    expected = [alone[prompt] for prompt in PROMPTS * 2]
    assert in_threads(ask(tokens_of), ask(streamed)) == [expected, expected]


def test_one_loop_after_the_other(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    for prompt in PROMPTS[:2]:
        assert asyncio.run(tokens_of(llm, prompt)) == alone[prompt]


def test_calls_run_together(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that come while others run join them at the next step."""
    launch = llm.runner.launch
    rows: list[int] = []
    all_are_there = threading.Event()

    def held(plan: Any) -> Any:
        assert all_are_there.wait(60)
        rows.append(sum(len(lane.sizes) for lane in plan.lanes))
        return launch(plan)

    async def ask() -> None:
        first = asyncio.create_task(tokens_of(llm, PROMPTS[0]))
        others = [asyncio.create_task(tokens_of(llm, prompt)) for prompt in PROMPTS[1:]]
        while len(llm._calls._new) + len(llm._calls._requests) < len(PROMPTS):
            await asyncio.sleep(0.001)
        all_are_there.set()
        await asyncio.gather(first, *others)

    monkeypatch.setattr(llm.runner, "launch", held)
    asyncio.run(ask())
    assert max(rows) == len(PROMPTS)


def test_every_call_as_llm_has_it(llm: AsyncLLM) -> None:
    async def calls() -> Any:
        digits = Structure.of("regex", "[0-9]{4}")
        return await asyncio.gather(
            llm.chat(HELLO, temperature=0, max_tokens=8),
            llm.chat([HELLO, HELLO], temperature=0, max_tokens=4),
            llm.generate(STORY, n=2, seed=3, max_tokens=8),
            llm.generate([STORY, PROMPTS[0]], [GREEDY, SamplingParams(seed=1, max_tokens=4)]),
            llm.generate([STORY], temperature=0, structure=digits),
            llm.generate([]),
        )

    found = asyncio.run(calls())
    with LLM(MODEL, options=OPTIONS) as other:
        digits = Structure.of("regex", "[0-9]{4}")
        expected = [
            other.chat(HELLO, temperature=0, max_tokens=8),
            other.chat([HELLO, HELLO], temperature=0, max_tokens=4),
            other.generate(STORY, n=2, seed=3, max_tokens=8),
            other.generate([STORY, PROMPTS[0]], [GREEDY, SamplingParams(seed=1, max_tokens=4)]),
            other.generate([STORY], temperature=0, structure=digits),
            other.generate([]),
        ]

    def shown(completions: list[Completion]) -> list[tuple[Any, ...]]:
        return [(c.prompt, c.index, c.text, c.token_ids, c.finish_reason) for c in completions]

    assert list(map(shown, found)) == list(map(shown, expected))


def test_a_stream_joins_to_its_completion(llm: AsyncLLM) -> None:
    async def stream() -> None:
        (whole,) = await llm.generate([STORY], GREEDY)
        stop = whole.text[9:14]
        params = SamplingParams(temperature=0, max_tokens=16, stop=[stop])
        deltas = [delta async for delta in llm.stream(STORY, params)]
        done = deltas[-1].completion
        assert done and done.stopped_by == stop and done.finish_reason == "stop"
        assert "".join(delta.text for delta in deltas) == done.text == whole.text.split(stop)[0]
        assert [t for delta in deltas for t in delta.token_ids] == list(done.token_ids)
        chat = [delta async for delta in llm.stream(HELLO, temperature=0, max_tokens=4)]
        (answer,) = await llm.chat(HELLO, temperature=0, max_tokens=4)
        assert chat[-1].completion and chat[-1].completion.text == answer.text

    asyncio.run(stream())


def test_a_task_that_is_cancelled_leaves_before_the_next_step(llm: AsyncLLM) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(streamed(llm, STORY))
        stream = llm.stream(STORY, ENDLESS)
        await anext(stream)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        # Both jobs come before the next step.
        unfinished = await llm._on_engine(lambda engine: list(engine.scheduler.queue.requests))
        assert len(unfinished) == 1, "the stream alone"
        await stream.aclose()
        assert await idle(llm)

    asyncio.run(cancel())


def test_leaving_a_stream_without_closing_it(llm: AsyncLLM) -> None:
    async def leave() -> None:
        async for _ in llm.stream(STORY, ENDLESS):
            break
        gc.collect()
        await asyncio.sleep(0)  # the loop closes the iterator that was collected
        assert await idle(llm)

    asyncio.run(leave())


def test_a_loop_that_is_closed_in_the_middle(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    """Its requests are aborted, and other loops go on."""
    loop = asyncio.new_event_loop()
    stream = llm.stream(STORY, ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def others() -> None:
        assert await tokens_of(llm, PROMPTS[0]) == alone[PROMPTS[0]]
        assert await idle(llm)

    asyncio.run(others())
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_until_complete(stream.aclose())


def test_a_prompt_that_is_refused_disturbs_nobody(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    async def refused() -> None:
        good = asyncio.create_task(tokens_of(llm, PROMPTS[0]))
        with pytest.raises(RequestError, match=r"prompts\[1\]"):
            await llm.generate([STORY, []])
        with pytest.raises(RequestError, match="max_tokens"):
            await llm.generate([STORY], max_tokens=2000)
        with pytest.raises(RequestError, match="prompt"):
            await anext(llm.stream(list(range(1500))))
        with pytest.raises(RequestError, match=r"messages\[0\]\.role"):
            await llm.chat([{"role": 3, "content": "x"}])
        with pytest.raises(PurposeError, match="makes no embeddings"):
            await llm.embed([STORY])
        assert await good == alone[PROMPTS[0]]

    asyncio.run(refused())


def test_embeddings(tmp_path: Path) -> None:
    async def embed() -> None:
        prompts, expected = golden()
        options = replace(OPTIONS, max_context=64)
        async with AsyncLLM(with_tokenizer(tmp_path), options=options) as llm:
            found = await asyncio.gather(*(llm.embed([prompt]) for prompt in prompts))
            assert np.abs(np.concatenate(found) - expected).max() < BOUND
            with pytest.raises(PurposeError, match="generates no text"):
                await llm.generate([STORY])

    asyncio.run(embed())


def test_closing_ends_what_runs_with_one_error() -> None:
    async def close() -> None:
        llm = AsyncLLM(MODEL, options=OPTIONS)
        stream = llm.stream(STORY, ENDLESS)
        await anext(stream)
        calls = [asyncio.create_task(rest_of(llm.stream(each, ENDLESS))) for each in PROMPTS]
        await asyncio.sleep(0)
        await asyncio.gather(llm.close(), llm.close())
        ends = await asyncio.gather(*calls, rest_of(stream), return_exceptions=True)
        assert {(type(end), str(end)) for end in ends} == {(EngineError, "this AsyncLLM is closed")}
        for call in (llm.generate([STORY]), anext(llm.stream(STORY)), llm.warm_up()):
            with pytest.raises(EngineError, match="this AsyncLLM is closed"):
                await call
        await llm.close()

    asyncio.run(close())


async def rest_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [delta async for delta in stream]


def test_an_engine_that_fails_tells_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        async with AsyncLLM(MODEL, options=OPTIONS) as llm:
            stream = llm.stream(STORY, ENDLESS)
            await anext(stream)
            calls = [asyncio.create_task(rest_of(stream))]
            calls += [asyncio.create_task(rest_of(llm.stream(prompt))) for prompt in PROMPTS]
            monkeypatch.setattr(llm.runner, "launch", partial(broken, "the device is gone"))
            ends = await asyncio.gather(*calls, return_exceptions=True)
            ends += await asyncio.gather(rest_of(llm.stream(STORY)), return_exceptions=True)
        assert len(ends) == 10
        for end in ends:
            assert isinstance(end, EngineError) and "the device is gone" in str(end)
            assert "make a new one" in str(end) and isinstance(end.__cause__, OSError)

    asyncio.run(fail())


def broken(why: str, *_: object) -> None:
    raise OSError(why)


def test_a_step_that_cannot_be_compiled_is_the_error_of_its_call(
    llm: AsyncLLM, alone: dict[str, Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def compile_in_vain() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(llm.steps, "compile_first", partial(broken, "no memory for this step"))
            with pytest.raises(OSError, match="no memory for this step"):
                await llm.generate([STORY])
        assert await tokens_of(llm, PROMPTS[0]) == alone[PROMPTS[0]]

    asyncio.run(compile_in_vain())


def test_one_that_is_dropped_leaves_nothing_behind() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(jax.live_arrays())

    before = held()
    llm = AsyncLLM(MODEL, options=OPTIONS)
    asyncio.run(llm.generate([STORY], max_tokens=4))
    assert held() > before
    del llm
    while held() != before:  # threads of a pool end by themselves
        time.sleep(0.001)


def test_one_whose_engine_failed_leaves_nothing_behind() -> None:
    """Dropped without a close, as where the error of a call ends the program's use of it."""

    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(jax.live_arrays())

    async def fail(llm: AsyncLLM) -> None:
        calls = [rest_of(llm.stream(prompt, ENDLESS)) for prompt in PROMPTS]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, EngineError) for end in ends)

    before = held()
    llm = AsyncLLM(MODEL, options=OPTIONS)
    llm.runner.launch = partial(broken, "the device is gone")  # type: ignore[method-assign]
    asyncio.run(fail(llm))
    dropped = weakref.ref(llm)
    del llm
    # Threads of a pool let go of a call a moment after its result is there, and end by themselves.
    while held() != before or dropped() is not None:
        time.sleep(0.001)


def test_the_thread_of_an_engine_that_failed_keeps_no_jobs() -> None:
    class Kept:
        pass

    done: list[str] = []
    kept: list[weakref.ref[Kept]] = []

    async def fail() -> None:
        async with AsyncLLM(MODEL, options=OPTIONS) as llm:

            def add() -> None:
                what = Kept()
                kept.append(weakref.ref(what))
                llm._thread.do(lambda _: done.append(str(what)))

            def launch(*_: object) -> None:
                add()
                raise OSError("the device is gone")

            llm.runner.launch = launch  # type: ignore[method-assign]
            with pytest.raises(EngineError, match="the device is gone"):
                await llm.generate([STORY])
            llm._thread._thread.join()
            add()
            assert [ref() for ref in kept] == [None, None]
            with pytest.raises(EngineError, match="the device is gone"):
                await llm._on_engine(lambda _: None)
        assert not done

    asyncio.run(fail())


@pytest.mark.steps_come
def test_calls_begin_with_the_fewest_steps(alone: dict[str, Tokens]) -> None:
    """The other steps are compiled beside them, and put into use between two steps."""

    async def ask() -> None:
        async with AsyncLLM(MODEL, options=OPTIONS) as llm:
            answers = await asyncio.gather(*(tokens_of(llm, prompt) for prompt in PROMPTS))
            assert answers == [alone[prompt] for prompt in PROMPTS]
            prepared = llm._requests.of_prompts({"prompt": PROMPTS[0]}, GREEDY, {})
            needed = list(llm.steps._needed(prepared))
            while llm.runner.missing(needed):
                assert await tokens_of(llm, PROMPTS[0]) == alone[PROMPTS[0]]

    asyncio.run(ask())


def test_a_program_that_fills_the_threads_of_its_loop(
    llm: AsyncLLM, alone: dict[str, Tokens]
) -> None:
    """Calls of those threads, which wait for their answers, are answered all the same."""

    async def fill() -> list[Tokens]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))

        def ask(prompt: str) -> Tokens:
            return asyncio.run_coroutine_threadsafe(tokens_of(llm, prompt), loop).result()

        return await asyncio.gather(*(asyncio.to_thread(ask, prompt) for prompt in PROMPTS))

    assert asyncio.run(fill()) == [alone[prompt] for prompt in PROMPTS]


def test_closing_while_prompts_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends with the next prompt, before the processes of templates are ended."""

    async def close() -> None:
        llm = AsyncLLM(MODEL, options=OPTIONS)
        render = llm.prompts.chat.render
        began = threading.Event()
        goes_on = threading.Event()
        rendered = []

        def slow(*given: Any, **options: Any) -> Any:
            began.set()
            assert goes_on.wait(60)
            assert llm.engine.usable
            rendered.append(given)
            return render(*given, **options)

        monkeypatch.setattr(llm.prompts.chat, "render", slow)
        call = asyncio.create_task(llm.chat([HELLO] * 100))
        assert await asyncio.to_thread(began.wait, 60)
        closing = asyncio.create_task(llm.close())
        while not llm._guard._closed:
            await asyncio.sleep(0.001)
        goes_on.set()
        await closing
        with pytest.raises(EngineError, match="this AsyncLLM is closed"):
            await call
        assert len(rendered) == 1

    asyncio.run(close())


def use_in_fork(llm: AsyncLLM, sender: Connection) -> None:
    for call in (llm.generate([STORY]), anext(llm.stream(STORY)), llm.warm_up()):
        try:
            asyncio.run(call)  # type: ignore[arg-type]
        except EngineError as error:
            sender.send(str(error))
    asyncio.run(llm.close())
    sender.send("closed")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_told_that_it_cannot_use_it(llm: AsyncLLM, alone: dict[str, Tokens]) -> None:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=use_in_fork, args=(llm, sender))
    child.start()
    sender.close()
    told = [receiver.recv() for _ in range(4)]
    child.join()
    assert all("spawn or forkserver" in text for text in told[:3]) and told[3] == "closed"
    assert asyncio.run(tokens_of(llm, PROMPTS[0])) == alone[PROMPTS[0]]


def test_a_mesh_of_several_hosts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.async_llm.spans_hosts", lambda mesh: True)
    with pytest.raises(ConfigError, match="jaxserve serve"):
        AsyncLLM(MODEL)


def test_what_other_libraries_call_it() -> None:
    with pytest.raises(TypeError, match="AsyncLLM has no keyword 'tensor_parallel_size': use tens"):
        AsyncLLM(MODEL, tensor_parallel_size=2)  # type: ignore[call-arg]


FORGOTTEN = """
import asyncio, sys
from jaxserve import AsyncLLM

async def main():
    llm = AsyncLLM(sys.argv[1], max_context=128, progress=False)
    asyncio.create_task(llm.generate(["Once upon a time"], ignore_eos=True, max_tokens=100))
    async for delta in llm.stream("Once upon a time", ignore_eos=True, max_tokens=100):
        return llm

llm = asyncio.run(main())
print("end")
"""


@pytest.mark.system
def test_a_program_that_forgets_to_close_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, str(MODEL)], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


@pytest.mark.system
def test_a_cell_of_a_notebook() -> None:
    """A cell awaits in the loop that the notebook runs."""
    kernel = Kernel()
    try:
        cells = (
            f"from jaxserve import AsyncLLM; llm = AsyncLLM({str(MODEL)!r}, max_context=128)",
            f"(done,) = await llm.generate([{STORY!r}], temperature=0, max_tokens=16)",
            f"text = ''.join([d.text async for d in llm.stream({STORY!r}, temperature=0, "
            f"max_tokens=16)]); assert text == done.text and text",
            "await llm.close()",
        )
        assert [kernel.run(cell) for cell in cells] == [""] * len(cells)
    finally:
        kernel.close()
