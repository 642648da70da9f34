"""Prompts computed on one mesh and decoded on another one of the same process: the tokens are those
of one engine.
"""

import asyncio
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from jaxserve import LLM, EngineOptions
from jaxserve.cluster.bootstrap import SingleHost
from jaxserve.cluster.transfer.prefill import PrefillPrompt
from jaxserve.engine.buckets import SEGMENTS_ON_DEVICE
from jaxserve.engine.device.page_store import PagesRead, PageStore
from jaxserve.errors import ConfigError, EngineError, ModelError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server import model_loader
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.server.disaggregation.flags import Meshes
from jaxserve.server.disaggregation.local_mesh import places
from jaxserve.server.disaggregation.policy import Policy
from jaxserve.server.flags import parse
from jaxserve.server.lifecycle import FAILED
from jaxserve.server.serving_state import PrefillEngine
from jaxserve.sharding.mesh import MeshSpec
from tests.jaxserve.engine.test_families_on_meshes import check
from tests.jaxserve.engine.test_page_exchange import House, Side
from tests.jaxserve.server.disaggregation.two_meshes import GREEDY, joined, taken
from tests.jaxserve.server.harness import running, until
from tests.jaxserve.server.test_lifecycle import living
from tests.jaxserve.server.test_serve_process import DRAFT, get, launch

# ---- engines


def tensor(size: int, first: int, kv: str = "auto") -> Side:
    return Side((1, 1, size), kv=kv, first=first)


def no_host(*_: object) -> None:
    raise AssertionError("keys and values went through the host")


CASES = [
    pytest.param("llama_gqa", 4, 2, "auto", id="copied heads, once each"),
    pytest.param(
        "gpt_oss_head_dim",
        *(2, 4, "int8"),
        id="windows in 8 bits, copies made",
        marks=pytest.mark.slow,
    ),
    pytest.param("deepseek_v2_lite", 4, 2, "auto", id="latent pages", marks=pytest.mark.slow),
    pytest.param("gpt_oss_head_dim", 2, 2, "auto", id="windows", marks=pytest.mark.slow),
    pytest.param(
        "llama_gqa", 4, 4, "int8", id="8 bits, copies on both sides", marks=pytest.mark.slow
    ),
    pytest.param(
        "deepseek_v2_lite", 1, 4, "fp8", id="latent pages in 8 bits", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("case", "here", "there", "kv"), CASES)
def test_pages_go_from_device_to_device(
    case: str, here: int, there: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, without the host, without a compile; and what is generated from them is what it
    has to be.
    """
    one = House(case, tensor(here, 0, kv))
    other = House(case, tensor(there, 4, kv))
    assert not {*one.runner.mesh.devices.flat} & {*other.runner.mesh.devices.flat}
    assert one.runner.pages.transfer_format == other.runner.pages.transfer_format
    before = one.runner.compiles_after_ready
    arriving = other.engine.transfers.receive(other.prompt)
    with monkeypatch.context() as patched:
        patched.setattr(PagesRead, "to_host", no_host)
        for outgoing in one.parts("prefill", arriving.cached, 4):
            for staged in arriving.move(outgoing, timeout=60):
                arriving.install(staged)
                other.engine.scheduler.check_invariants()
    sent, found = (house.pieces("again", 0, 4, compute=False) for house in (one, other))
    for mine, theirs in zip(sent, found, strict=True):
        for name, array in mine.arrays.items():
            np.testing.assert_array_equal(theirs.arrays[name].view(np.uint8), array.view(np.uint8))
    outcome = other.ask("decode", other.prompt, max_tokens=32, logprobs=20)
    assert outcome.last and outcome.last.times and outcome.last.times.cached == 20
    if kv == "auto":
        check(outcome, other.golden, 0)
    assert (one.runner.compiles_after_ready, other.runner.compiles_after_ready) == (before, 0)
    one.engine.close()
    other.engine.close()


# ---- servers

OPTIONS = EngineOptions(
    max_batch=4, step_tokens=64, page_size=16, max_context=256, page_exchange=True
)


def load(size: int, first: int, options: EngineOptions = OPTIONS) -> LLM:
    devices = jax.devices()[first:]
    llm = LLM(DRAFT, dtype="float32", options=options, mesh=MeshSpec(tensor=size), devices=devices)
    largest = {
        bucket.kind: bucket
        for bucket in sorted(llm.runner.buckets.buckets)
        if bucket.kind != "score"
    }
    llm.runner.warm_up(largest.values())
    return llm


@pytest.fixture(scope="module")
def decoder() -> Iterator[LLM]:
    with load(2, 4) as llm:
        yield llm


@pytest.fixture(scope="module", params=[1, 4], ids=["through the host", "from device to device"])
def prefiller(request: pytest.FixtureRequest, decoder: LLM) -> Iterator[LLM]:
    with load(request.param, 0) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with load(1, 7, replace(OPTIONS, page_exchange=False)) as llm:
        yield llm


def prompts(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple(np.random.default_rng(n).integers(5, 2000, n).tolist()) for n in lengths]


def answer_of(llm: LLM, prompt: tuple[int, ...], params: SamplingParams) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate([list(prompt)], params)]


def test_tokens_are_those_of_one_engine(prefiller: LLM, decoder: LLM, alone: LLM) -> None:
    """Short and long, greedy and seeded, several choices, together; the long ones were computed on
    the other mesh.
    """
    seeded = SamplingParams(temperature=1.0, seed=7, max_tokens=12, n=2, ignore_eos=True)
    asked = [
        (prompt, params) for prompt in prompts(20, 70, 150, 200) for params in (GREEDY, seeded)
    ]
    expected = [answer_of(alone, prompt, params) for prompt, params in asked]

    async def main() -> None:
        async with joined(prefiller, decoder) as both:
            answers = await asyncio.gather(
                *(both.ask(prompt, params, str(i)) for i, (prompt, params) in enumerate(asked))
            )
            assert [[one.token_ids for one in answer] for answer in answers] == expected
            assert (
                both.number("decisions_total", decision="remote")
                == both.number("seconds_count")
                == 6
            )
            assert both.number("decisions_total", decision="local_short") == 2
            token = 3 * 2 * 2 * 16 * 4  # bytes: in each layer keys and values of two heads, float32
            assert both.number("received_bytes_total") == 2 * token * sum(
                n // 16 * 16 for n in (70, 150, 200)
            )
            assert [one.token_ids for one in await both.ask(asked[-1][0], seeded, "7")] == expected[
                -1
            ]
            assert both.number("decisions_total", decision="local_short") == 3  # its pages are here
            await both.at_rest()

    asyncio.run(main())


def test_whoever_goes_away_leaves_nothing(
    prefiller: LLM, decoder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While pages are on their way, and before: all places on both meshes are free again."""

    async def main() -> None:
        began = threading.Event()
        go_on = threading.Event()

        def slowly(store: PageStore, *args: Any) -> None:
            began.set()
            assert go_on.wait(60)
            write(store, *args)

        write = PageStore.write_pages
        async with joined(prefiller, decoder) as both:
            monkeypatch.setattr(PageStore, "write_pages", slowly)
            for delay in (None, 0.0, 0.003, 0.01, 0.03):
                task = asyncio.create_task(both.ask(*prompts(200), salt=str(delay)))
                if delay is None:
                    await until(began.is_set)
                else:
                    await asyncio.sleep(delay)
                task.cancel()
                await asyncio.wait((task,), timeout=60)
                # A fast machine may have answered within the delay.
                assert task.done() and (task.cancelled() or delay)
                go_on.set()
                await both.at_rest()
            await both.ask(prompts(100)[0])
            assert both.number("failures_total", reason="cancelled") >= 1
            await both.at_rest()

    asyncio.run(main())


def test_what_came_and_nobody_took_is_dropped(prefiller: LLM, decoder: LLM) -> None:
    async def main() -> None:
        async with joined(prefiller, decoder) as both:
            prompt = PrefillPrompt(token_ids=prompts(200)[0], salt=both.salt, page_size=16)
            async with aclosing(
                both.mesh.compute(prompt, asyncio.get_running_loop().time() + 600)
            ) as arrivals:
                assert (await anext(arrivals)).nbytes > 0
                assert taken(both.engines[0].transfers.slots) > 0
            await both.at_rest()

    asyncio.run(main())


def test_who_goes_away_while_pages_wait_to_be_read_ends_that(prefiller: LLM, decoder: LLM) -> None:
    """Other prompts have all places on the devices, the prompt is computed, and no step follows."""

    async def main() -> None:
        async with joined(prefiller, decoder) as both:
            engine = both.engines[0]
            for _ in range(SEGMENTS_ON_DEVICE):
                engine.transfers.slots.acquire()
            task = asyncio.create_task(both.ask(*prompts(200)))
            await until(lambda: engine.transfers._exports and not both.prefill.service.in_flight)
            task.cancel()
            await until(lambda: not engine.transfers._exports)
            engine.transfers.slots.release(SEGMENTS_ON_DEVICE)
            await both.at_rest()

    asyncio.run(main())


def test_what_fails_on_the_way_is_computed_here(
    prefiller: LLM, decoder: LLM, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("lost")

    (prompt,) = prompts(200)
    expected = answer_of(alone, prompt, GREEDY)

    async def main() -> None:
        async with joined(prefiller, decoder) as both:
            for way in ("move_pages", "upload_pages"):
                monkeypatch.setattr(PageStore, way, fail)
            assert [one.token_ids for one in await both.ask(prompt)] == expected
            assert both.number("failures_total", reason="internal") == 1
            await both.at_rest()
            monkeypatch.undo()
            assert [one.token_ids for one in await both.ask(prompt, salt="again")] == expected
            assert both.number("seconds_count") == 1
            await both.at_rest()

    asyncio.run(main())


# ---- the server's life


@pytest.mark.system
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_the_end_of_either_engine_is_the_end(tmp_path: Path, how: str) -> None:
    """Here of the one that clients do not see."""

    async def main() -> None:
        (tmp_path / "other").mkdir()
        hang = threading.Event()

        def hook(number: int) -> None:
            if how == "raises":
                raise ValueError("the device is gone")
            hang.wait()

        async with (
            running(tmp_path, opened=False) as server,
            running(tmp_path / "other", opened=False) as other,
        ):
            server.served = replace(
                server.served, prefill=PrefillEngine(other.service, other.served.thread, None)
            )  # type: ignore[arg-type]
            async with living(server, step_timeout=0.2) as (lifecycle, task):
                other.failed = lifecycle.fail
                other.runner.hook = hook
                other.served.thread.submit(
                    (await other.service.answer(IncomingRequest(prompt=(1, 2, 3)))).prepared.request
                )
                try:
                    assert await asyncio.wait_for(task, 60) == FAILED
                finally:
                    hang.set()

    asyncio.run(main())


def test_both_engines_are_closed_in_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "other").mkdir()
        async with (
            running(tmp_path, opened=False) as server,
            running(tmp_path / "other", opened=False) as other,
        ):
            server.served = replace(
                server.served, prefill=PrefillEngine(other.service, other.served.thread, None)
            )  # type: ignore[arg-type]
            async with living(server) as (lifecycle, task):
                lifecycle.drain()
                assert await asyncio.wait_for(task, 60) == 0
                assert not any(
                    thread._thread.is_alive()
                    for thread in (server.served.thread, other.served.thread)
                )

    asyncio.run(main())


# ---- whole servers

BOTH = ("--prefill-mesh", "4", "--decode-mesh", "4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deterministic": True}, "--deterministic is given; pages of another"),
        ({"prefix_cache": False}, "--no-prefix-cache"),
    ],
)
def test_engines_that_cannot_exchange_pages_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(1, 0, replace(OPTIONS, **changes))


def test_only_who_decodes_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is the same for both engines."""
    asked: list[dict[str, Any]] = []

    def load_nothing(model: Path, *, devices: Any, mesh: Any, on_load: Any, **asks: Any) -> None:
        asked.append(asks)
        raise ConfigError("that is enough")

    monkeypatch.setattr(model_loader, "LLM", load_nothing)
    drafts = (
        "--speculate",
        "draft",
        "--draft-model",
        "small",
        "--draft-tokens",
        "3",
        "--kv",
        "int8",
    )
    options = parse(["--model", "m", *BOTH, *drafts])
    loader = model_loader.ModelLoader(
        options, Console(stderr=True), SingleHost(), None, ExitStack()
    )
    for place in places(Meshes(4, 4, Policy(1, 1), 1.0), jax.devices()):
        with pytest.raises(ConfigError, match="enough"):
            loader.open(place)
    assert all(asks.pop("digests") for asks in asked)
    prefill, decode = (asks.pop("options") for asks in asked)
    assert [asks.pop("draft_model") for asks in asked] == [None, Path("small")] and asked[
        0
    ] == asked[1]
    assert prefill == replace(decode, speculate="off", draft_tokens=None)
    assert (
        decode.page_exchange
        and decode.speculate == "draft"
        and decode.draft_tokens == 3
        and decode.kv == "int8"
    )


def test_a_model_that_changes_between_its_two_meshes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DRAFT, folder)
    sizes = ("--max-batch", "2", "--step-tokens", "32", "--page-size", "16", "--max-context", "64")
    options = parse(["--model", str(folder), *BOTH, *sizes])
    first, second = places(Meshes(4, 2, Policy(1, 1), 1.0), jax.devices())
    with ExitStack() as resources:
        console = Console(stderr=True)
        loader = model_loader.ModelLoader(options, console, SingleHost(), None, resources)
        loader.open(first)
        tensors = load_file(folder / "model.safetensors")
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][5, 7] += 1
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=f"{name} has changed since the prefill mesh"):
            loader.open(second)


# ---- the process


@pytest.mark.system
def test_serve_with_two_meshes(alone: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    process = launch(
        "--prefill-mesh",
        "4",
        "--decode-mesh",
        "2",
        "--prefill-threshold",
        "64",
        "--page-size",
        "16",
    )
    (prompt,) = prompts(200)
    try:
        with process.client() as client:
            answer = client.generate(list(prompt), temperature=0, max_tokens=12, ignore_eos=True)
            assert client.server_info().compiles_after_ready == 0
            assert answer.usage.cached_prompt_tokens == 192
        assert [tuple(answer.choices[0].token_ids)] == answer_of(alone, prompt, GREEDY)
        metrics = get(f"{process.http}/metrics").decode()
        assert 'jaxserve:disaggregation_decisions_total{decision="remote"} 1.0' in metrics
        assert "jaxserve:disaggregation_seconds_count 1" in metrics
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code == 0, text
    assert (
        "prefill  data 1 x expert 1 x tensor 4 on cpu" in text
        and "pages    from device to device" in text
    )
