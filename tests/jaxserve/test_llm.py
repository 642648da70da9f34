"""The library's door, on the bundled model."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM, EngineOptions, SamplingParams
from jaxserve.errors import (
    CapacityError,
    ChatError,
    ConfigError,
    ContextLengthError,
    EngineError,
    RequestError,
    RequestIdInUseError,
)
from jaxserve.sharding.mesh import MeshSpec
from jaxserve.tokenizer import completion_text

BUNDLED = Path(__file__).parents[2] / "checkpoints" / "bundled" / "tiny-chat-draft"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ bos_token + message.role + ': ' + message.content + eos_token }}{% endfor %}{{ bos_token "
    "+ 'assistant:' }}"
)
HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = EngineOptions(max_batch=4, step_tokens=64, page_size=16, cache_tokens=1024)
STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    with LLM(BUNDLED, options=OPTIONS, chat_template=template) as llm:
        yield llm
        assert not llm.engine.has_work
        llm.engine.scheduler.check_invariants()
        assert llm.engine.scheduler.lanes[0].running == []


def test_generate(llm: LLM) -> None:
    (done,) = llm.generate([STORY], GREEDY)
    tokenizer = llm.model.tokenizer
    assert done.prompt == STORY and list(done.prompt_token_ids) == tokenizer.encode(STORY)
    assert len(done.token_ids) == 24 and done.finish_reason == "length"
    assert done.text == completion_text(tokenizer, done.prompt_token_ids, done.token_ids)
    assert done.logprobs is None and done.prompt_logprobs is None and done.error is None
    assert 0 < done.timings.queue < done.timings.ttft < done.timings.total and done.timings.tpot > 0


def test_stream_joins_to_generate(llm: LLM) -> None:
    deltas = list(llm.stream(STORY, GREEDY))
    (whole,) = llm.generate([STORY], GREEDY)
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == list(whole.token_ids)
    assert [d.completion is not None for d in deltas] == [False] * (len(deltas) - 1) + [True]


def test_order_of_prompts_and_choices(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=1, seed=1, n=2, max_tokens=n, ignore_eos=True)
        for n in (12, 3, 7)
    ]
    prompts = [STORY, "The dog", "A cat"]
    done = llm.generate(prompts, params)
    assert [(c.prompt, c.index) for c in done] == [(p, i) for p in prompts for i in range(2)]
    assert [len(c.token_ids) for c in done] == [12, 12, 3, 3, 7, 7]
    assert done[0].token_ids != done[1].token_ids, "choices of one seed draw different noise"


def test_seed(llm: LLM) -> None:
    first, again, other = (
        llm.generate([STORY], SamplingParams(seed=seed, max_tokens=16))[0]
        for seed in (5, 5, 2**40 + 5)
    )
    assert first.token_ids == again.token_ids != other.token_ids
    drawn = llm.generate([STORY], SamplingParams(max_tokens=16))[0]
    repeated = llm.generate([STORY], SamplingParams(max_tokens=16, seed=drawn.seed))[0]
    assert drawn.token_ids == repeated.token_ids, "the seed that was drawn is reported"


def test_token_ids_as_prompt(llm: LLM) -> None:
    ids = llm.model.tokenizer.encode(STORY)
    done = llm.generate([ids, np.array(ids, np.uint16), STORY], GREEDY)
    assert len({(c.prompt_token_ids, c.token_ids, c.text) for c in done}) == 1
    assert all(type(token) is int for c in done for token in c.prompt_token_ids)


def test_stop_string_across_tokens(llm: LLM) -> None:
    (free,) = llm.generate([STORY], GREEDY)
    stop = free.text[9:14]
    cut = free.text.index(stop)
    for include, expected in ((False, free.text[:cut]), (True, free.text[: cut + len(stop)])):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=[stop], include_stop=include, logprobs=0
        )
        (done,) = llm.generate([STORY], params)
        assert done.text == expected
        assert done.finish_reason == "stop" and done.stopped_by == stop
        assert done.token_ids == free.token_ids[: len(done.token_ids)] and len(done.token_ids) < 24
        assert done.logprobs is not None and len(done.logprobs) == len(done.token_ids)
        streamed = "".join(d.text for d in llm.stream(STORY, params))
        assert streamed == expected


@pytest.fixture(scope="module")
def together() -> Iterator[LLM]:
    """An engine with eight decodes in a launch."""
    with LLM(BUNDLED, options=replace(OPTIONS, decode_steps=8)) as llm:
        llm.warm_up([llm.prepare(STORY, GREEDY)])  # else the first decodes go one by one
        yield llm


@pytest.mark.parametrize("place", [3, 9, 14])
def test_a_stop_string_among_several_decodes(llm: LLM, together: LLM, place: int) -> None:
    """Wherever in a launch it is completed: the same end, and pieces that join to it."""
    (free,) = llm.generate([STORY], GREEDY)
    params = SamplingParams(
        temperature=0, max_tokens=24, stop=[free.text[place : place + 5]], logprobs=0
    )
    (one_by_one,) = llm.generate([STORY], params)
    deltas = list(together.stream(STORY, params))
    assert any(use.launches for bucket, use in together.runner.padding.items() if bucket.steps == 8)
    assert not together.engine.has_work
    done = deltas[-1].completion
    assert done is not None and (done.text, done.token_ids) == (
        one_by_one.text,
        one_by_one.token_ids,
    )
    assert [t for d in deltas for t in d.token_ids] == list(done.token_ids)
    assert "".join(d.text for d in deltas) == done.text
    assert done.logprobs is not None and [entry.token for entry in done.logprobs] == list(
        done.token_ids
    )


def test_stop_token_and_ignore_eos(llm: LLM) -> None:
    (free,) = llm.generate([STORY], GREEDY)
    third = free.token_ids[2]
    first_at = free.token_ids.index(third) + 1
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop_token_ids=[third], include_stop=include
        )
        (done,) = llm.generate([STORY], params)
        assert done.token_ids == free.token_ids[:first_at] and done.stopped_by == third
        shown = done.token_ids if include else done.token_ids[:-1]
        assert done.text == completion_text(llm.model.tokenizer, done.prompt_token_ids, shown)
    eos = llm.model.eos_ids[0]
    only_eos = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[eos])
    (ended,) = llm.generate([STORY], only_eos)
    assert ended.token_ids == (eos,) and ended.finish_reason == "stop" and ended.text == ""
    ignoring = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=[eos], ignore_eos=True)
    assert llm.generate([STORY], ignoring)[0].token_ids == (eos,) * 5


def test_min_tokens_holds_the_end_back(llm: LLM) -> None:
    eos = llm.model.eos_ids[0]
    wants_out = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, logit_bias={eos: 100.0})
    (done,) = llm.generate([STORY], wants_out)
    assert len(done.token_ids) == 5 and done.token_ids[-1] == eos and eos not in done.token_ids[:-1]


def test_echo_and_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, echo=True, logprobs=2, prompt_logprobs=3)
    (done,) = llm.generate([STORY], params)
    (plain,) = llm.generate([STORY], SamplingParams(temperature=0, max_tokens=4))
    assert done.text == STORY + plain.text and done.token_ids == plain.token_ids
    assert done.logprobs is not None and done.prompt_logprobs is not None
    assert [entry.token for entry in done.prompt_logprobs] == list(done.prompt_token_ids[1:])
    assert [entry.token for entry in done.logprobs] == list(done.token_ids)
    for entry in done.logprobs:
        assert len(entry.top) == 2 and entry.top[0] == (entry.token, entry.logprob)
    assert all(len(entry.top) == 3 and entry.logprob <= 0 for entry in done.prompt_logprobs)
    assert "".join(d.text for d in llm.stream(STORY, params)) == done.text


def test_prefix_hits_are_reported_and_change_nothing(llm: LLM) -> None:
    long = STORY + " there was a little dog" * 8
    params = SamplingParams(temperature=0, max_tokens=12, seed=0)
    llm.engine.scheduler.flush_cache()
    (cold,) = llm.generate([long], params)
    (warm,) = llm.generate([long], params)
    assert cold.timings.cached_tokens == 0 and warm.timings.cached_tokens >= 16
    assert cold.token_ids == warm.token_ids


def test_two_streams_at_once(llm: LLM) -> None:
    alone = [llm.generate([p], GREEDY)[0].text for p in (STORY, "The dog")]
    one = llm.stream(STORY, GREEDY)
    two = llm.stream("The dog", GREEDY)
    texts = ["", ""]
    for a, b in zip(one, two, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    texts[0] += "".join(d.text for d in one)
    texts[1] += "".join(d.text for d in two)
    assert texts == alone


def test_a_stream_that_joins_others_has_its_steps_compiled(llm: LLM) -> None:
    """Each alone needs small steps; together they need more rows and tokens than any of them
    said."""
    with LLM(BUNDLED, options=OPTIONS) as fresh:
        streams = [fresh.stream(prompt, GREEDY) for prompt in (STORY, "The dog" * 10, "A cat")]
        texts = [next(stream).text for stream in streams]
        texts = [
            text + "".join(d.text for d in stream)
            for text, stream in zip(texts, streams, strict=True)
        ]
        assert fresh.runner.compiles_after_ready == 0
    assert texts == [c.text for c in llm.generate([STORY, "The dog" * 10, "A cat"], GREEDY)]


def test_the_last_piece_before_a_stop_string_has_its_token(llm: LLM) -> None:
    (free,) = llm.generate([STORY], GREEDY)
    params = SamplingParams(temperature=0, max_tokens=24, stop=[free.text[9:14]])
    deltas = list(llm.stream(STORY, params))
    assert deltas[-1].completion is not None
    assert [t for d in deltas for t in d.token_ids] == list(deltas[-1].completion.token_ids)


def test_prepared_twice_is_an_id_twice(llm: LLM) -> None:
    prepared = llm.prepare(STORY, GREEDY)
    with pytest.raises(RequestIdInUseError, match="is in flight already"):
        list(llm.run([prepared, prepared]))
    open_one = llm.run([prepared])
    first = next(open_one)
    with pytest.raises(RequestIdInUseError):
        list(llm.run([prepared]))
    assert first.text + "".join(d.text for d in open_one) == llm.generate([STORY], GREEDY)[0].text
    again = [d.completion for d in llm.run([prepared])]
    assert again[-1] is not None and again[-1].text == llm.generate([STORY], GREEDY)[0].text


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream(STORY, SamplingParams(max_tokens=200, n=3))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    llm.engine.scheduler.check_invariants()
    assert llm.generate([STORY], GREEDY)[0].finish_reason == "length"


def test_more_prompts_than_rows_and_pages(llm: LLM) -> None:
    """32 prompts on 4 rows and a pool that they overrun."""
    prompts = [f"{STORY} number {i}" for i in range(32)]
    alone = [
        llm.generate([p], SamplingParams(temperature=0, max_tokens=8))[0].text for p in prompts[:4]
    ]
    done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert [c.text for c in done[:4]] == alone
    assert {c.finish_reason for c in done} <= {"length", "stop"}


@pytest.mark.system
def test_chat(llm: LLM) -> None:
    conversation = [
        *HELLO,
        {"role": "assistant", "content": "Hi </s>"},
        {"role": "user", "content": "Bye"},
    ]
    (done,) = llm.chat(conversation, GREEDY)
    assert done.prompt == "<s>user: Hello</s><s>assistant: Hi </s></s><s>user: Bye</s><s>assistant:"
    assert [i for i in done.prompt_token_ids if i < 3] == [1, 2, 1, 2, 1, 2, 1], (
        "a name in a message is text"
    )
    assert (
        done.text
        == completion_text(llm.model.tokenizer, done.prompt_token_ids, done.token_ids)
        != ""
    )
    same = llm.generate([conversation, done.prompt_token_ids], GREEDY)
    assert [c.token_ids for c in same] == [done.token_ids] * 2
    assert "".join(delta.text for delta in llm.stream(conversation, GREEDY)) == done.text


@pytest.mark.system
def test_chat_of_several_conversations(llm: LLM) -> None:
    others = [[{"role": "system", "content": "Tell"}, *HELLO], HELLO]
    params = [SamplingParams(temperature=0, max_tokens=n, n=2) for n in (3, 4)]
    done = llm.chat(others, params)
    assert [(c.prompt[:7], c.index, len(c.token_ids)) for c in done] == [
        ("<s>syst", 0, 3), ("<s>syst", 1, 3), ("<s>user", 0, 4), ("<s>user", 1, 4)
    ]  # fmt: skip
    assert llm.chat_template == TEMPLATE


@pytest.mark.system
@pytest.mark.parametrize(
    ("messages", "kind", "message"),
    [
        ([], RequestError, r"^messages is empty"),
        ("Hello", RequestError, r"^messages is 'Hello'"),
        (
            [*HELLO, {"role": 1, "content": ""}],
            RequestError,
            r"^messages\[1\]\.role is 1; it must be a string",
        ),
        (
            [HELLO, [*HELLO, {"role": "user"}]],
            RequestError,
            r"^messages\[1\]\[1\]\.content is missing",
        ),
        ([HELLO, []], RequestError, r"^messages\[1\] is empty"),
        (
            [*HELLO, {"role": "tool", "content": "x"}],
            ChatError,
            r"refuses: no tools$",
        ),
        (
            [{"role": "user", "content": "word " * 2000}],
            ContextLengthError,
            r"^messages: .* exceed the context",
        ),
    ],
)
def test_conversation_that_is_refused(llm: LLM, messages, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        llm.chat(messages, GREEDY)
    assert "\n" not in str(caught.value) and not llm.engine.has_work


def test_chat_without_a_template(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.model"):
        shutil.copy(BUNDLED / name, tmp_path / name)
    with LLM(tmp_path, options=OPTIONS) as bare:
        for use in (
            lambda: bare.chat(HELLO),
            lambda: bare.stream(HELLO),
            lambda: bare.chat_template,
        ):
            with pytest.raises(
                ChatError, match="has no chat template; give one with --chat-template FILE"
            ):
                use()
        assert bare.generate([STORY], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ([], SamplingParams(), RequestError, "has no tokens"),
        (
            [1, 5000],
            SamplingParams(),
            RequestError,
            "has 5000 as entry 1; the vocabulary has ids 0 to",
        ),
        ([1, -1], SamplingParams(), RequestError, "has -1 as entry 1"),
        ([1, "x"], SamplingParams(), RequestError, "has 'x' as entry 1; it must be an integer"),
        ([1, True], SamplingParams(), RequestError, "has True as entry 1; it must be an integer"),
        (b"Once", SamplingParams(), RequestError, "is b'Once'; give a list of token ids"),
        (None, SamplingParams(), RequestError, "is None; give a list of token ids"),
        (
            "\ud800",
            SamplingParams(),
            RequestError,
            "cannot be tokenized: character 0 is half a surr",
        ),
        (
            [1] * 5000,
            SamplingParams(),
            ContextLengthError,
            "prompt.*: 5000 tokens exceed the context of 2048",
        ),
        (STORY, SamplingParams(max_tokens=100000), ContextLengthError, "lower max_tokens"),
        (
            STORY,
            SamplingParams(logit_bias={9999: 1.0}),
            RequestError,
            "logit_bias has 9999 as entry 0",
        ),
        (
            STORY,
            SamplingParams(allowed_token_ids=[-3]),
            RequestError,
            "allowed_token_ids has -3 as entry 0",
        ),
        (
            STORY,
            SamplingParams(stop_token_ids=[77777]),
            RequestError,
            "stop_token_ids has 77777 as entry 0",
        ),
    ],
)
def test_prompt_that_is_refused(
    llm: LLM, prompt, params: SamplingParams, kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        llm.generate([STORY, prompt], params)
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_work, "nothing of the call runs"


def test_params_and_prompts_must_match(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params has 2 entries for 1 prompts"):
        llm.generate([STORY], [GREEDY, GREEDY])


def test_a_single_text_needs_no_list(llm: LLM) -> None:
    (done,) = llm.generate(STORY, GREEDY)
    (listed,) = llm.generate([STORY], GREEDY)
    assert done.token_ids == listed.token_ids
    with pytest.raises(RequestError, match=r"^prompts: 10001 tokens"):
        llm.generate("a" * 10000)


def test_keywords_override_the_parameters(llm: LLM) -> None:
    (whole,) = llm.generate(STORY, GREEDY)
    for params in (None, GREEDY, [GREEDY]):
        (done,) = llm.generate(STORY, params, temperature=0, max_tokens=5)
        assert done.token_ids == whole.token_ids[:5]
    (answer,) = llm.chat(HELLO, GREEDY, max_tokens=3)
    assert len(answer.token_ids) == 3
    assert len([d for d in llm.stream(STORY, GREEDY, max_tokens=4) if d.token_ids]) == 4
    with pytest.raises(RequestError, match="temperature is -1"):
        llm.generate(STORY, temperature=-1)


def test_axes_and_context_without_other_classes() -> None:
    with LLM(BUNDLED, max_context=128, data=2, options=OPTIONS) as spread:
        assert spread.runner.config.max_context == 128
        assert repr(spread) == (
            "<LLM tiny-chat-draft: llama, 0.4 M parameters, bfloat16, context 128, 2x1x1 cpu>"
        )
    with pytest.raises(ConfigError, match="mesh 1x1x2 is given, and 2x1x1 as data, expert, tensor"):
        LLM(BUNDLED, data=2, mesh=MeshSpec(tensor=2))
    with pytest.raises(ConfigError, match="max_context is 128, and 64 in options; give one"):
        LLM(BUNDLED, max_context=128, options=EngineOptions(max_context=64))


def test_prompt_that_no_pool_holds() -> None:
    refused = pytest.raises(CapacityError, match="can never fit the page pool of 64 tokens")
    with (
        LLM(BUNDLED, options=EngineOptions(max_batch=2, page_size=16, cache_tokens=64)) as small,
        refused,
    ):
        small.generate([[1] * 80], SamplingParams(max_tokens=1))


def test_close_frees_the_device() -> None:
    before = {id(x) for x in jax.live_arrays()}
    llm = LLM(BUNDLED, options=OPTIONS)
    assert len({id(x) for x in jax.live_arrays()} - before) > 20
    llm.close()
    assert not {id(x) for x in jax.live_arrays()} - before


def test_closed_twice_and_used_afterwards() -> None:
    llm = LLM(BUNDLED, options=OPTIONS)
    stream = llm.stream(STORY, GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for use in (
        lambda: next(stream),
        lambda: llm.generate([STORY]),
        lambda: llm.chat(HELLO),
        llm.warm_up,
        lambda: llm.prepare(STORY),
    ):
        with pytest.raises(EngineError, match="the engine is closed"):
            use()


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("launch", MemoryError),
        ("collect", KeyboardInterrupt),
        pytest.param("launch", KeyboardInterrupt, marks=pytest.mark.slow),
        pytest.param("collect", MemoryError, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_breaks_ends_the_engine_and_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch, where: str, kind: type[BaseException]
) -> None:
    def broken(*_: object) -> None:
        raise kind

    before = {id(x) for x in jax.live_arrays()}
    with LLM(BUNDLED, options=OPTIONS) as llm:
        one = llm.stream(STORY, GREEDY)
        two = llm.stream("The dog", GREEDY)
        next(one)
        next(two)
        monkeypatch.setattr(llm.runner, where, broken)
        with pytest.raises(kind):
            list(one)
        for use in (lambda: list(two), lambda: llm.generate([STORY], GREEDY)):
            with pytest.raises(EngineError, match="interrupted or failed; close the engine"):
                use()
    assert not {id(x) for x in jax.live_arrays()} - before


def test_bfloat16_agrees_with_float32(llm: LLM) -> None:
    """Only activations and pages are rounded: weights are equal, products accumulate in float32."""
    assert str(llm.model.params["embed"].dtype) == "bfloat16", "auto keeps what is stored"
    story = STORY + llm.generate([STORY], SamplingParams(temperature=0, max_tokens=100))[0].text
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (rounded,) = llm.generate([story], params)
    with LLM(BUNDLED, dtype="float32", options=OPTIONS) as exact_llm:
        (exact,) = exact_llm.generate([story], params)
    pairs = list(zip(rounded.prompt_logprobs or (), exact.prompt_logprobs or (), strict=True))
    assert len(pairs) > 50 and max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.25
    assert np.mean([abs(a.logprob - b.logprob) for a, b in pairs]) < 0.02
