"""Every step that an engine can plan has a bucket, among those compiled for its prompts too."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, EngineOptions, Pool, resolve
from jaxserve.engine.buckets import (
    Bucket,
    BucketPlan,
    by_gain,
    choose,
    page_counts,
    required,
    split_pages,
)
from jaxserve.engine.plan import StepKind
from jaxserve.errors import EngineError
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.jaxserve.engine.host.driver import Driver, config_of


def bucket_sizes(plan: BucketPlan, kind: str) -> list[tuple[int, int]]:
    return [(b.rows, b.tokens) for b in plan.buckets if b.kind == kind]


def test_sizes_double_and_end_at_the_limit() -> None:
    plan = BucketPlan.of(config_of(max_batch=6, step_tokens=100))
    assert bucket_sizes(plan, "decode") == [(1, 1), (2, 2), (4, 4), (6, 6)]
    assert bucket_sizes(plan, "prefill") == [(6, 16), (6, 32), (6, 64), (6, 96), (6, 100)]
    assert bucket_sizes(plan, "score") == [(6, 100)]


def test_the_smallest_engine_has_one_of_each() -> None:
    plan = BucketPlan.of(config_of(max_batch=1, step_tokens=1))
    assert [str(b) for b in plan.buckets] == ["decode[1]", "prefill[1x16]", "score[1x16]"]


def test_no_step_has_fewer_rows_than_asked() -> None:
    assert [
        str(b) for b in BucketPlan.of(config_of(max_batch=1, step_tokens=1, min_rows=2)).buckets
    ] == [
        "decode[2]",
        "prefill[2x16]",
        "score[2x16]",
    ]
    assert bucket_sizes(BucketPlan.of(config_of(max_batch=6, min_rows=2)), "decode") == [
        (2, 2),
        (4, 4),
        (6, 6),
    ]


def test_deterministic_engines_have_one_of_each() -> None:
    plan = BucketPlan.of(config_of(max_batch=64, step_tokens=2048, deterministic=True))
    assert [str(b) for b in plan.buckets] == ["decode[64]", "prefill[64x2048]", "score[64x2048]"]


def test_models_that_embed_have_nothing_else() -> None:
    plan = BucketPlan.of(config_of(max_batch=6, step_tokens=100, embeds=True))
    assert [str(b) for b in plan.buckets] == [
        f"embed[6x{tokens}]" for tokens in (16, 32, 64, 96, 100)
    ]
    plan = BucketPlan.of(config_of(max_batch=64, step_tokens=2048, deterministic=True, embeds=True))
    assert [str(b) for b in plan.buckets] == ["embed[64x2048]"]


@pytest.mark.parametrize("prefer", ["latency", "balanced", "throughput"])
def test_presets_compile_few_steps(prefer: str) -> None:
    options = EngineOptions(prefer=prefer)  # type: ignore[arg-type]
    config = resolve(options, max_positions=131072, lanes=1, affordable_tokens=10**6)
    assert len(BucketPlan.of(config).buckets) <= 40


def test_the_smallest_bucket_that_holds_a_step_is_chosen() -> None:
    buckets = BucketPlan.of(config_of(max_batch=8, step_tokens=64)).buckets
    assert choose(buckets, "decode", 3, 3) == Bucket("decode", 4, 4)
    assert choose(buckets, "prefill", 3, 17) == Bucket("prefill", 8, 32)
    assert choose(buckets, "prefill", 8, 64) == Bucket("prefill", 8, 64)
    assert choose(reversed(buckets), "prefill", 1, 1) == Bucket("prefill", 8, 16)


@pytest.mark.parametrize(("rows", "tokens"), [(9, 9), (1, 65)])
def test_a_step_that_no_bucket_holds_is_an_error(rows: int, tokens: int) -> None:
    buckets = BucketPlan.of(config_of(max_batch=8, step_tokens=64)).buckets
    with pytest.raises(
        EngineError, match=f"no compiled prefill step holds {rows} rows and {tokens} tokens"
    ):
        choose(buckets, "prefill", rows, tokens)


@settings(max_examples=200, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 5000), st.booleans(), st.data())
def test_every_size_up_to_the_limits_has_a_bucket(
    rows: int, tokens: int, deterministic: bool, data: st.DataObject
) -> None:
    tokens = max(rows, tokens)
    buckets = BucketPlan.of(
        config_of(max_batch=rows, step_tokens=tokens, deterministic=deterministic)
    ).buckets
    r = data.draw(st.integers(1, rows))
    t = data.draw(st.integers(r, tokens))
    step_kinds: tuple[StepKind, ...] = ("prefill", "score")
    for kind in step_kinds:
        bucket = choose(buckets, kind, r, t)
        assert bucket.rows >= r and bucket.tokens >= t
    assert r <= choose(buckets, "decode", r, r).rows <= (rows if deterministic else 2 * r)


def test_how_many_decodes_are_launched_as_one() -> None:
    def decode_steps(**options: object) -> int:
        resolved = resolve(
            EngineOptions(**options), max_positions=64, lanes=1, affordable_tokens=10**5
        )  # type: ignore[arg-type]
        return resolved.decode_steps

    assert [decode_steps(prefer=prefer) for prefer in ("latency", "balanced", "throughput")] == [
        1,
        1,
        8,
    ]
    assert decode_steps(prefer="throughput", deterministic=True) == 1
    assert decode_steps(prefer="throughput", max_batch=2, step_tokens=4) == 4
    assert decode_steps(decode_steps=3) == 3


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 9), st.integers(0, 8))
def test_fresh_pages_hold_the_worst_chunks(sizes: list[int], page_size: int, offset: int) -> None:
    """Fresh pages suffice for chunks that begin at any position of a page."""
    begun = sum(
        -(-(offset % page_size + size) // page_size) - (offset % page_size > 0) for size in sizes
    )
    assert begun <= Bucket("prefill", len(sizes), sum(sizes)).fresh_pages(page_size)
    rows = len(sizes)
    assert begun <= Bucket("decode", rows, rows, steps=max(sizes)).fresh_pages(page_size)


# ---- what some prompts can reach


def test_reachable_leaves_out_what_cannot_happen() -> None:
    config = config_of(max_batch=8, step_tokens=64)
    plan = BucketPlan.of(config)
    alone = plan.reachable([(20, 100)], config=config, score=False)
    assert [str(b) for b in alone] == ["decode[1]", "prefill[8x32]"]
    scored = plan.reachable([(20, 100)], config=config, score=True)
    assert [str(b) for b in scored] == ["decode[1]", "prefill[8x32]", "score[8x64]"]
    together = BucketPlan.of(config_of(max_batch=8, step_tokens=64, decode_steps=8))
    for output, steps in ((8, [1]), (9, [1, 8])):  # the first token is the prompt's step's
        found = together.reachable([(20, output)], config=config, score=False)
        assert [b.steps for b in found if b.kind == "decode"] == steps
    three = plan.reachable([(20, 4), (5, 4), (5, 4)], config=config, score=False)
    assert [str(b) for b in three] == [
        "decode[1]",
        "decode[2]",
        "decode[4]",
        "prefill[8x16]",
        "prefill[8x32]",
        "prefill[8x64]",
    ]
    embedding = config_of(max_batch=8, step_tokens=64, embeds=True)
    found = BucketPlan.of(embedding).reachable([(20, 0), (5, 0)], config=embedding, score=False)
    assert [str(b) for b in found] == ["embed[8x16]", "embed[8x32]"]


PROMPTS = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 12), st.sampled_from([None, None, 0])),
    min_size=1,
    max_size=5,
)


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    deterministic = draw(st.booleans())
    embeds = draw(st.booleans())
    return config_of(
        max_batch=draw(st.integers(1, 5)),
        step_tokens=draw(st.integers(5, 40)),
        decode_steps=1 if deterministic or embeds else draw(st.sampled_from([1, 3, 5])),
        num_pages=draw(st.integers(9, 20)),
        lanes=draw(st.integers(1, 2)),
        prefix_cache=draw(st.booleans()),
        deterministic=deterministic,
        embeds=embeds,
    )


@settings(max_examples=150, derandomize=True)
@given(configs(), PROMPTS)
def test_prompts_never_leave_what_is_reachable_for_them(
    config: EngineConfig, prompts: list[tuple[int, int, int | None]]
) -> None:
    """Every step finds a bucket among those compiled for the prompts, however they run.

    Prompts are preempted, chunked, mixed and scored.
    """
    driver = Driver(config)
    if config.embeds:
        prompts = [(length, 0, None) for length, _, _ in prompts]
    for number, (length, most, scores) in enumerate(prompts):
        params = SamplingParams(max_tokens=most or None, prompt_logprobs=scores, seed=number)
        driver.submit(
            Request(id=str(number), prompt=tuple(range(number, number + length)), params=params)
        )
    driver.run()
    score = any(scores is not None for _, _, scores in prompts)
    buckets = BucketPlan.of(config).reachable([p[:2] for p in prompts], config=config, score=score)
    assert set(buckets) <= set(BucketPlan.of(config).buckets)
    for plan in driver.plans:
        choose(buckets, plan.kind, plan.num_rows, plan.num_tokens, plan.steps)


def test_buckets_are_plain_values() -> None:
    assert dataclasses.astuple(Bucket("decode", 2, 2)) == ("decode", 2, 2, 1, 0)


# ---- Pages that travel at once


@pytest.mark.parametrize(
    ("page_size", "context", "counts"),
    [
        (64, 8192, (8, 2, 1)),
        (128, 8192, (4, 1)),
        (1024, 8192, (1,)),
        (16, 8192, (32, 8, 2, 1)),
        (16, 60, (4, 1)),
    ],
)
def test_numbers_of_pages_that_add_up_to_any(
    page_size: int, context: int, counts: tuple[int, ...]
) -> None:
    config = dataclasses.replace(
        config_of(), page_size=page_size, max_context=context, pools=(Pool(8),)
    )
    assert page_counts(config) == counts
    for pages in range(100):
        parts = list(split_pages(pages, config))
        assert (
            sum(parts) == pages
            and set(parts) <= set(counts)
            and parts == sorted(parts, reverse=True)
        )


ENGINES = {
    "balanced": config_of(max_batch=16, step_tokens=512),
    "several decodes": config_of(max_batch=64, step_tokens=2048, decode_steps=8),
    "drafts": config_of(max_batch=8, step_tokens=64, speculate="ngram", draft_tokens=7),
    "draft model": config_of(max_batch=8, step_tokens=64, speculate="draft", draft_tokens=3),
    "embeddings": config_of(max_batch=8, step_tokens=256, embeds=True),
    "deterministic": config_of(max_batch=16, step_tokens=512, deterministic=True),
}


@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_the_required_buckets_hold_every_step_and_none_can_be_left_out(
    config: EngineConfig,
) -> None:
    planned = BucketPlan.of(config).buckets
    found = required(planned)
    singles = [bucket for bucket in planned if bucket.steps == 1]
    assert all(any(one.holds(bucket) for one in found) for bucket in singles)
    assert len(found) == len({bucket.kind for bucket in planned})
    for bucket in singles:
        chosen = choose(found, bucket.kind, bucket.rows, bucket.tokens, drafts=bucket.drafts)
        assert chosen.holds(bucket)


def test_what_a_compiled_bucket_holds_is_not_required() -> None:
    planned = BucketPlan.of(config_of(max_batch=16, step_tokens=512)).buckets
    compiled = [Bucket("decode", 16, 16), Bucket("prefill", 16, 256)]
    assert list(map(str, required(planned, compiled))) == ["prefill[16x512]", "score[16x512]"]
    smaller = [bucket for bucket in planned if bucket.tokens <= 16]
    assert required(smaller, compiled) == ()


@pytest.mark.parametrize("config", ENGINES.values(), ids=ENGINES)
def test_every_other_bucket_comes_once(config: EngineConfig) -> None:
    planned = BucketPlan.of(config).buckets
    others = set(planned) - {*required(planned)}
    found = by_gain(others, required(planned))
    assert len(found) == len(others) and set(found) == others


def test_largest_gain_first() -> None:
    """Steps that nothing holds come first, then those that halve the most padding."""
    planned = BucketPlan.of(config_of(max_batch=16, step_tokens=512, decode_steps=4)).buckets
    first = required(planned)
    order = list(map(str, by_gain(set(planned) - {*first}, first)))
    assert order[:3] == ["decode[16] x 4", "prefill[16x128]", "decode[4]"]
    assert order.index("decode[4]") < order.index("decode[8]")
    assert order.index("prefill[16x64]") < order.index("prefill[16x384]")
