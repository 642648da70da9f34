"""Two hundred requests with remote prefill give the tokens of one engine.

Tier (b): answers agree up to a step whose two best tokens, noise and penalties included, lie closer
than the bound.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet

from jaxserve.completion import Completion
from jaxserve.config import EngineOptions
from jaxserve.llm import LLM
from jaxserve.loading.digests import WeightDigests
from jaxserve.request import Request
from jaxserve.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxserve.server.core.incoming_request import IncomingRequest
from jaxserve.structure import Structure
from tests.jaxserve.letters import END, LETTERS, with_letters
from tests.jaxserve.server.disaggregation.pair import (
    MeshFrom,
    Server,
    compile_largest,
    joined,
    serving,
)
from tests.jaxserve.server.disaggregation.tier_b import check

OPTIONS = EngineOptions(
    max_batch=4, step_tokens=32, page_size=4, cache_tokens=8192, max_context=112
)
BOUNDS = {
    "auto": 1e-4,
    "int8": 0.05,
    "fp8": 0.1,
}  # of log-probabilities between executables, by pages
THRESHOLD = 24
AT_ONCE = 6
PLACES = ("nowhere", "prefill", "decode", "both")  # where a prompt's beginning was computed before
STRUCTURES = (
    Structure.of("regex", "[a-f]{3,9}-[0-4]{2,5}"),
    Structure.of("choice", ["bad", "bed", "face", "fade", "cafe"]),
    Structure.of(
        "json_schema",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "bed": {"enum": ["cafe", "face", 12]}},
            "required": ["a", "bed"],
            "additionalProperties": False,
        },
    ),
)


@dataclass(frozen=True)
class Side:
    """One of the two servers; `options` extend those of both."""

    tensor: int = 1
    page_size: int = 4
    data: int = 1
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """structured: every how many requests follow a grammar; 0: none.

    whole: the least share of the prompts that are found whole in the end. There are few pages for a
    window: what one of them holds may be needed for others before it has left, and then nothing of
    its prompt is of use.
    """

    model: str
    count: int
    prefill: Side = Side()
    decode: Side = Side(page_size=6)
    kv: str = "auto"
    structured: int = 0
    whole: float = 1.0


NGRAM: dict[str, Any] = {"speculate": "ngram", "draft_tokens": 3}
CASES = {
    "latent pages": Case("deepseek_v2_lite", 30, Side(), Side(tensor=2, page_size=6)),
    "copied heads, drafts and grammars": Case(
        "llama_gqa", 70, Side(tensor=2), Side(tensor=4, page_size=8, options=NGRAM), structured=2
    ),
}
# By `make test-slow`. Of the first three, test_local_mesh and test_page_exchange have the parts.
MORE = {
    "page sizes": Case("llama_gqa", 40),
    "8-bit pages": Case("llama_gqa", 30, Side(page_size=8), Side(tensor=2), kv="int8"),
    "windows": Case("gemma2_caps", 30, whole=0.3),
    "8-bit windows": Case(
        "gpt_oss_head_dim", 60, Side(tensor=4), Side(page_size=8), kv="int8", whole=0.3
    ),
    "latent pages of 8 bits": Case("deepseek_v2_lite", 60, Side(tensor=4, page_size=8), kv="fp8"),
    "a draft model": Case(
        "llama_gqa",
        60,
        Side(),
        Side(page_size=8, options={"speculate": "draft", "draft_tokens": 3}),
        structured=4,
    ),
    "lanes": Case(
        "mistral_window", 60, Side(data=2), Side(data=2, tensor=2, page_size=6), whole=0.3
    ),
    "several decodes as one": Case(
        "llama_gqa", 60, Side(), Side(page_size=8, options={"decode_steps": 3})
    ),
    "evicted before it is used": Case(
        "llama_gqa", 60, Side(), Side(options={"cache_tokens": 192} | NGRAM), whole=0.0
    ),
}


def cases() -> Iterator[ParameterSet]:
    for name, case in (CASES | MORE).items():
        yield pytest.param(case, id=name, marks=[] if name in CASES else [pytest.mark.slow])


@dataclass(frozen=True)
class Asked:
    """place: see PLACES; or "short", where it is not handed over."""

    prompt: tuple[int, ...]
    params: SamplingParams
    place: str

    def call(self, **params: Any) -> IncomingRequest:
        return IncomingRequest(prompt=self.prompt, params=replace(self.params, **params))


class Traffic:
    """The requests of a case, and the prompts that were computed before."""

    def __init__(self, case: Case):
        self._rng = np.random.default_rng(len(case.model) + case.count)
        self._precise = BOUNDS[case.kv] < 1e-3
        self.beginnings = {place: self._letters(16, THRESHOLD) for place in PLACES}
        self.asked = [
            self._request(i, bool(case.structured) and i % case.structured == 0)
            for i in range(case.count)
        ]

    def _letters(self, least: int, below: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, len(LETTERS), self._rng.integers(least, below)).tolist())

    def _request(self, i: int, structured: bool) -> Asked:
        params = self._structured() if structured else self._free()
        if i % 10 == 9:
            return Asked(self._letters(4, THRESHOLD), params, "short")
        place = PLACES[i // 2 % len(PLACES)]
        begin = self._letters(16, THRESHOLD) if place == "nowhere" else self.beginnings[place]
        return Asked(begin + self._letters(THRESHOLD + 8, 65), params, place)

    def _free(self) -> SamplingParams:
        ends = (
            {"ignore_eos": True}
            if self._sometimes(0.6)
            else {"stop": self._stop()}
            if self._sometimes(0.5)
            else {}
        )
        least = {"min_tokens": 3} if self._sometimes(0.2) else {}
        return self._params(**ends, **least, max_tokens=int(self._rng.integers(4, 20)))

    def _structured(self) -> SamplingParams:
        return self._params(
            structure=STRUCTURES[self._rng.integers(len(STRUCTURES))], max_tokens=24
        )

    def _params(self, **fields: Any) -> SamplingParams:
        """Return greedy or seeded parameters, with each kind of processing now and then."""
        if self._sometimes(0.5):
            fields |= {"temperature": 0.0}
        else:
            fields |= {"temperature": float(self._rng.uniform(0.4, 1.3))} | (
                self._truncated() if self._precise else {}
            )
        if self._sometimes(0.3):
            fields |= {
                "presence_penalty": 0.7,
                "frequency_penalty": float(self._rng.uniform(-0.5, 1.5)),
            }
        if self._sometimes(0.2):
            fields |= {"logit_bias": {int(token): 2.0 for token in self._rng.integers(0, END, 3)}}
        if self._sometimes(0.4):
            fields |= {"logprobs": int(self._rng.integers(0, MAX_LOGPROBS + 1))}
        return SamplingParams(
            **fields, n=2 if self._sometimes(0.15) else 1, seed=int(self._rng.integers(0, 2**63))
        )

    def _truncated(self) -> dict[str, Any]:
        """Where log-probabilities agree to a few digits, a truncation may keep one token more."""
        kinds = ({}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05})
        return kinds[self._rng.integers(len(kinds))]

    def _stop(self) -> list[str]:
        return ["".join(LETTERS[i] for i in self._rng.integers(0, len(LETTERS), 1))]

    def _sometimes(self, share: float) -> bool:
        return bool(self._rng.random() < share)


def opened(folder: Path, case: Case, side: Side, first: int = 0, **options: Any) -> LLM:
    """first: of its devices."""
    chosen = replace(
        OPTIONS, **{"page_size": side.page_size, "kv": case.kv} | side.options | options
    )
    draft = folder if chosen.speculate == "draft" else None
    mesh = MeshFrom(data=side.data, tensor=side.tensor, first=first)
    digests = WeightDigests()  # which servers compare
    llm = LLM(folder, options=chosen, mesh=mesh, draft_model=draft, digests=digests)
    compile_largest(llm)
    return llm


@pytest.mark.system
@pytest.mark.parametrize("case", list(cases()))
def test_tokens_are_those_of_one_engine(case: Case, tmp_path: Path) -> None:
    folder = with_letters(case.model, tmp_path / "model")
    traffic = Traffic(case)
    with opened(folder, case, Side(page_size=case.prefill.page_size), prefix_cache=False) as alone:
        expected = asyncio.run(ask_alone(alone, traffic))
    with (
        opened(folder, case, case.prefill, page_exchange=True) as prefill,
        opened(
            folder, case, case.decode, case.prefill.data * case.prefill.tensor, page_exchange=True
        ) as decode,
    ):
        asyncio.run(ask_both(prefill, decode, traffic, expected, case))


type Answers = list[tuple[Request, tuple[Completion, ...]]]


async def ask_alone(llm: LLM, traffic: Traffic) -> Answers:
    async with serving(llm) as server:
        return await server.ask_all(
            [asked.call(logprobs=MAX_LOGPROBS) for asked in traffic.asked], AT_ONCE
        )


async def ask_both(
    prefill: LLM, decode: LLM, traffic: Traffic, expected: Answers, case: Case
) -> None:
    async with joined(prefill, decode, THRESHOLD) as (one, other):
        await compute_beginnings(one, other, traffic)
        found = await other.ask_all([asked.call() for asked in traffic.asked], AT_ONCE)
        await one.at_rest()
        await other.at_rest()
        check_answers(found, expected, BOUNDS[case.kv])
        check_cached(found, traffic, prefill, decode, case.whole)
        check_metrics(one, other, traffic, case.whole)


async def compute_beginnings(prefill: Server, decode: Server, traffic: Traffic) -> None:
    params = SamplingParams(max_tokens=1)
    for place, prompt in traffic.beginnings.items():
        if place in ("prefill", "both"):
            await prefill.ask(IncomingRequest(prompt=prompt, params=params, prefill=True))
        if place in ("decode", "both"):
            await decode.ask(IncomingRequest(prompt=prompt, params=params))
        assert (await prefill.cached(prompt) > 8) == (place in ("prefill", "both"))
        assert (await decode.cached(prompt) > 8) == (place in ("decode", "both"))


def check_answers(found: Answers, expected: Answers, bound: float) -> None:
    compared = total = 0
    for (request, mine), (_, theirs) in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            compared += check(one, other, request, bound)
            total += len(other.token_ids)
    assert compared > 0.9 * total, (
        f"{compared} of {total} tokens were compared: too many were close calls"
    )


def check_cached(found: Answers, traffic: Traffic, prefill: LLM, decode: LLM, share: float) -> None:
    """Check that a share of the prompts has just the pages that the prefill server could give."""
    here = prefill.runner.config.page_size
    there = decode.runner.config.page_size
    whole = list[bool]()
    for asked, (_, (completion, *_)) in zip(traffic.asked, found, strict=True):
        if asked.place != "short":
            reach = min(len(asked.prompt) // here * here, len(asked.prompt) - 1) // there * there
            assert completion.timings.cached_tokens <= reach
            whole.append(completion.timings.cached_tokens == reach)
    assert sum(whole) >= share * len(whole), f"{sum(whole)} of {len(whole)}"
    assert share or not all(whole), "this case is meant to lose some"


def check_metrics(prefill: Server, decode: Server, traffic: Traffic, share: float) -> None:
    short = sum(asked.place == "short" for asked in traffic.asked)
    assert decode.number("disaggregation_decisions_total", decision="local_short") == short + 2
    handed_over = len(traffic.asked) - short
    failed = decode.total("disaggregation_failures_total")
    assert decode.number("disaggregation_decisions_total", decision="remote") == handed_over
    assert failed <= (1 - share) * handed_over
    assert (
        not failed or decode.number("disaggregation_failures_total", reason="not_found") == failed
    ), "evicted"
    assert (
        decode.number("disaggregation_received_bytes_total")
        == prefill.number("disaggregation_sent_bytes_total")
        > 0
    )
    assert prefill.number("disaggregation_pieces_total", fate="fetched") == prefill.total(
        "disaggregation_pieces_total"
    )
    if speculation := decode.llm.engine.scheduler.speculation:
        assert speculation.drafted >= speculation.accepted > 0
