"""Steps of an LLM that are compiled while its calls run."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import LLM, EngineOptions, SamplingParams
from jaxserve.compilation_cache import OPTIONS as OF_JAX
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.background import THREAD
from tests.jaxserve.engine.tiny import BASE, make_engine

pytestmark = pytest.mark.steps_come
BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
SMALL = EngineOptions(max_batch=8, step_tokens=64, page_size=16, max_context=128)
# Where a test compiles all of its steps anew.
FEW_STEPS = replace(SMALL, max_batch=2, step_tokens=32)
PROMPTS = ["Once", "The dog ran to the river and", "A cat"]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LONG = 100.0  # seconds


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Take the tests' own cache away from jax; conftest gives it back after the test."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield


def names(llm: LLM) -> set[str]:
    return {str(bucket) for bucket in llm.runner.compiled}


def options_of_jax() -> dict[str, object]:
    return {name: getattr(jax.config, name) for name in OF_JAX}


def test_a_call_begins_with_the_fewest_steps() -> None:
    with LLM(BUNDLED, options=SMALL) as llm:
        stream = llm.run([llm.prepare(prompt) for prompt in PROMPTS])
        next(stream)
        assert {"decode[4]", "prefill[8x64]"} <= names(llm)
        assert llm.runner.buckets_pending or len(names(llm)) > 2
        stream.close()
        kept = names(llm)
        wait_until(lambda: not llm.runner.executables.background.busy)
        assert llm.runner.executables.background.count < len(llm.runner.buckets.buckets)
        assert llm.runner.compiles_after_ready == 0
        llm.warm_up()
        assert kept < names(llm) and len(names(llm)) == len(llm.runner.buckets.buckets)
        assert llm.runner.buckets_pending == 0


def test_texts_do_not_depend_on_what_is_there() -> None:
    """In float32, where no two tokens of these texts are nearly as probable."""
    with LLM(BUNDLED, dtype="float32", options=SMALL) as llm:
        first = [c.token_ids for c in llm.generate(PROMPTS, **GREEDY)]
        again = [c.token_ids for c in llm.generate(PROMPTS, **GREEDY)]
        llm.warm_up()
        assert first == again == [c.token_ids for c in llm.generate(PROMPTS, **GREEDY)]


def test_a_deterministic_engine_waits_for_all() -> None:
    with LLM(BUNDLED, options=replace(SMALL, deterministic=True)) as llm:
        next(llm.stream("Once", max_tokens=4))
        assert llm.runner.buckets_pending == 0 and llm.runner.background_compiles == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_a_call_beside_an_open_stream(tmp_path: Path) -> None:
    """It compiles while the background does, and both keep what they compile."""
    before = options_of_jax()
    with LLM(BUNDLED, options=FEW_STEPS, compilation_cache=tmp_path) as llm:
        stream = llm.stream("Once", max_tokens=40)
        next(stream)
        other = threading.Thread(target=lambda: llm.generate(PROMPTS * 3, **GREEDY), daemon=True)
        other.start()
        other.join(LONG)
        assert not other.is_alive()
        assert list(stream)[-1].completion
        wait_until(lambda: not llm.runner.executables.background.busy)
        assert options_of_jax() == before
    assert list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_an_llm_made_while_another_one_s_steps_come_keeps_its_own_folder(tmp_path: Path) -> None:
    before = options_of_jax()
    folders = tmp_path / "a", tmp_path / "b"
    with LLM(BUNDLED, options=FEW_STEPS, compilation_cache=folders[0]) as a:
        stream = a.run([a.prepare(prompt) for prompt in PROMPTS])
        next(stream)
        with LLM(BUNDLED, options=FEW_STEPS, compilation_cache=folders[1]) as b:
            stream.close()
            wait_until(lambda: not a.runner.executables.background.busy)
            assert options_of_jax() == before
            b.generate(PROMPTS, **GREEDY)
            wait_until(lambda: not b.runner.executables.background.busy)
    assert options_of_jax() == before
    assert all(any(folder.glob("*-cache")) for folder in folders)


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
def test_what_the_program_sets_meanwhile_stays(tmp_path: Path) -> None:
    with LLM(BUNDLED, options=SMALL, compilation_cache=tmp_path / "ours") as llm:
        stream = llm.run([llm.prepare(prompt) for prompt in PROMPTS])
        next(stream)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        stream.close()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")


@pytest.mark.parametrize("calls", [False, True])
def test_an_llm_that_nothing_refers_to_gives_its_memory_back_at_once(calls: bool) -> None:
    """A cycle would keep it until the next full garbage collection."""
    llm = LLM(BUNDLED, options=SMALL)
    if calls:
        llm.generate("Once", **GREEDY)
    background = llm.runner.executables.background
    wait_until(lambda: not background.busy)
    runner = weakref.ref(llm.runner)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert runner() is None
    finally:
        gc.enable()


def test_an_iterator_that_is_collected_by_a_compile_thread_holds_nothing_up() -> None:
    """It may not wait for the guard, whose holder may wait for that thread's compile."""
    with LLM(BUNDLED, options=SMALL) as llm:
        streams = [llm.stream("Once", max_tokens=40)]
        next(streams[0])
        with llm._guard:
            thread = threading.Thread(target=lambda: streams.pop().close(), name=THREAD)
            thread.start()
            thread.join(LONG)
            assert not thread.is_alive()
        assert llm.engine.has_work
        assert llm.generate("Once", **GREEDY)[0].text  # the next call ends it
        assert not llm.engine.has_work


def test_an_iterator_that_is_collected_by_a_compile_thread_ends_with_the_next_step() -> None:
    """An iterator that stays open computes nothing more for it."""
    with LLM(BUNDLED, options=SMALL) as llm:
        streams = [llm.stream(prompt, max_tokens=40, ignore_eos=True) for prompt in PROMPTS[:2]]
        for stream in streams:
            next(stream)
        thread = threading.Thread(target=lambda: streams.pop().close(), name=THREAD)
        thread.start()
        thread.join(LONG)
        assert len(llm._streams.unfinished) == 2
        for _ in range(4):  # the first few came before
            next(streams[0])
        assert len(llm._streams.unfinished) == 1


def test_an_iterator_that_is_collected_while_a_step_is_lowered_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call that waits for the lowered step has the guard for which the iterator would wait."""
    with LLM(BUNDLED, options=SMALL) as llm:
        streams = [llm.stream("Once", max_tokens=40)]
        next(streams[0])
        llm.runner.executables.background.forget()
        lower = llm.runner.lowering.step
        closing: list[threading.Thread] = []

        def lower_and_collect(bucket: Bucket) -> jax.stages.Lowered:
            if streams and threading.current_thread().name != THREAD:
                closing.append(threading.current_thread())
                streams.pop().close()
            return lower(bucket)

        monkeypatch.setattr(llm.runner.lowering, "step", lower_and_collect)
        warm_up = threading.Thread(target=llm.warm_up, daemon=True)
        warm_up.start()
        warm_up.join(LONG)
        assert not warm_up.is_alive()
        assert closing and warm_up not in closing
        assert not streams
        assert llm.generate("Once", **GREEDY)[0].text
        assert not llm.engine.has_work


def test_a_call_behind_one_that_was_interrupted_knows_what_is_compiled() -> None:
    """Ctrl-C came when the last step was compiled, before the engine was told."""
    told: list[str] = []

    def on_compile(done: int, total: int, what: str) -> None:
        told.append(what)
        if done == total and told.count("") == 1:
            raise KeyboardInterrupt

    options = replace(SMALL, decode_steps=4)
    with LLM(BUNDLED, options=options, on_compile=on_compile) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("Once", **GREEDY)
        assert llm.generate("Once", **GREEDY)[0].text


def test_threads_that_stream_at_once_get_steps_for_all_of_them() -> None:
    with LLM(BUNDLED, dtype="float32", options=SMALL) as llm:
        expected = [completion.text for completion in llm.generate(PROMPTS, **GREEDY)]
    with LLM(BUNDLED, dtype="float32", options=SMALL) as llm:
        texts = [""] * len(PROMPTS)

        def stream(i: int) -> None:
            for delta in llm.stream(PROMPTS[i], **GREEDY):
                texts[i] += delta.text

        threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        assert texts == expected


def test_steps_are_measured_again_when_nothing_is_compiled_beside_them() -> None:
    options = replace(FEW_STEPS, speculate="ngram", draft_tokens=3)
    with LLM(BUNDLED, options=options) as llm:
        llm.warm_up([llm.prepare("Once", SamplingParams(max_tokens=2))])
        measured: list[Bucket] = []
        measure = llm.steps._costs.measure
        llm.steps._costs.measure = lambda bucket: (measured.append(bucket), measure(bucket))[1]  # type: ignore[method-assign]
        llm.runner.compile_in_background(llm.runner.buckets.buckets)
        wait_until(lambda: not llm.steps.install() and not llm.runner.buckets_pending)
        concerned = {b for b in llm.runner.compiled if b.kind in ("decode", "verify")}
        assert set(measured) == concerned
        assert all(measured.count(bucket) >= 1 for bucket in concerned)
        assert sum(map(measured.count, concerned)) > len(concerned)


def test_steps_are_compiled_with_the_precision_of_the_engine_whatever_thread_compiles() -> None:
    with jax.default_matmul_precision("highest"):
        engine, runner = make_engine(BASE)
    texts: list[str] = []
    bucket = Bucket("decode", 2, 2)
    other = threading.Thread(target=lambda: texts.append(runner.lowering.step(bucket).as_text()))
    other.start()
    other.join()
    with jax.default_matmul_precision("highest"):
        assert texts == [runner.lowering.step(bucket).as_text()]
    assert "HIGHEST" in texts[0]
    engine.close()


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds, for LONG seconds at most."""
    end = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
