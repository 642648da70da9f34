"""Single situations of a scheduler, each small enough to follow by hand.

Any traffic at all is in test_scheduler_properties.py.
"""

import dataclasses
import itertools
import json

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.events import Finish, FinishReason
from jaxserve.engine.plan import FED_BACK, LanePlan, StepPlan
from jaxserve.engine.row_fields import MAX_INT32, NO_TOKEN
from jaxserve.errors import (
    CapacityError,
    ContextLengthError,
    NonFiniteLogitsError,
    RequestError,
    RequestIdInUseError,
)
from jaxserve.request import Request, ThoughtBudget
from jaxserve.sampling_params import SamplingParams
from tests.fake_model import naive
from tests.jaxserve.engine.host.driver import PROMPT, Driver, config_of, request


def next_plan(driver: Driver) -> StepPlan | None:
    """Run a step and return the plan that it launches, if any."""
    before = len(driver.plans)
    driver.step()
    return driver.plans[before] if len(driver.plans) > before else None


def next_lane_plan(driver: Driver) -> LanePlan:
    plan = next_plan(driver)
    assert plan is not None
    return plan.lanes[0]


# ---- The arithmetic itself


def test_the_arithmetic_by_hand() -> None:
    """1*(5+1) + 2*(6+1) + seed 1 = 21, then + 3*(21+1) = 87, then + 4*(87+1) = 439 = 4*97 + 51."""
    params = SamplingParams(seed=1, max_tokens=3)
    assert naive(Request(id="a", prompt=(5, 6), params=params), 0, 1, 3) == [21, 87, 51]
    driver = Driver(config_of())
    driver.submit(Request(id="a", prompt=(5, 6), params=params))
    driver.run()
    assert driver.results["a", 0].tokens == [21, 87, 51]


# ---- Chunks


def test_a_prompt_is_cut_by_the_budget_and_decodes_run_ahead() -> None:
    driver = Driver(config_of(step_tokens=4))
    driver.submit(request(max_tokens=3))
    chunks = []
    while plan := next_plan(driver):
        lane = plan.lanes[0]
        chunks.append(
            (
                plan.kind,
                lane.starts,
                lane.sizes,
                lane.samples,
                lane.tokens,
                [f[2] for f in lane.fresh],
            )
        )
    assert chunks == [
        ("prefill", [0], [4], [0], [5, 6, 7, 8], [0]),
        ("prefill", [4], [4], [0], [9, 10, 11, 12], [1]),
        ("prefill", [8], [2], [1], [13, 14], [2]),
        ("decode", [10], [1], [1], [FED_BACK], []),
        ("decode", [11], [1], [1], [FED_BACK], []),
    ]
    assert driver.results["a", 0].finish == Finish(FinishReason.LENGTH)


def test_decodes_go_before_prompts_within_the_budget() -> None:
    driver = Driver(config_of(step_tokens=8))
    driver.submit(request("a", max_tokens=8))
    driver.step()
    driver.step()  # 8 tokens, then 2 and the first sample
    driver.submit(request("b", prompt=tuple(range(20, 40))))
    lane = next_lane_plan(driver)
    assert (lane.rows, lane.starts, lane.sizes, lane.samples) == ([0, 1], [10, 0], [1, 7], [1, 0])
    assert lane.tokens == [FED_BACK, *range(20, 27)]


def test_an_end_that_is_read_late_wastes_one_token_and_frees_its_pages_after_it() -> None:
    driver = Driver(config_of(prefix_cache=False))
    first = naive(request(), 0, 1, 1)[0]
    driver.submit(dataclasses.replace(request(), eos_ids=(first,)))
    assert driver.step() == []
    events = driver.step()  # launches the decode after it, then reads the end token
    assert events[0].finish == Finish(FinishReason.STOP, stopped_by=first)
    assert (
        len(driver.scheduler.lanes[0].running) == 1
        and driver.scheduler.lanes[0].available_pages() == 32 - 3
    )
    assert driver.step() == [] and not driver.scheduler.has_work
    assert driver.scheduler.lanes[0].available_pages() == 32


def test_columns_are_plain_data() -> None:
    driver = Driver(config_of())
    driver.submit(
        request(
            logit_bias={3: 1.5},
            allowed_token_ids=[1, 2],
            n=2,
            seed=2**64 - 1,
            repetition_penalty=1.2,
        )
    )
    driver.run()
    for plan in driver.plans:
        text = json.dumps(dataclasses.asdict(plan), default=bytes.hex)
        assert json.loads(text)["lanes"][0]["tokens"] == plan.lanes[0].tokens


# ---- Admissions


def test_an_admission_says_all_that_the_device_must_keep() -> None:
    params = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "repetition_penalty": 1.25,
        "logprobs": 3,
        "min_tokens": 2,
        "logit_bias": {4: -1.0},
        "allowed_token_ids": [4, 5, 6],
        "stop_token_ids": [6, 2],
        "seed": 77,
    }
    driver = Driver(config_of())
    budget = ThoughtBudget(30, end=8, closing=(7, 8), opening=(3,), gap=2)
    asked = dataclasses.replace(request(**params), eos_ids=(9, 1), thought_budget=budget)
    driver.submit(asked)
    plan = next_plan(driver)
    assert plan is not None
    (admission,) = plan.admissions
    sampling = dataclasses.asdict(admission.sampling)
    same = (
        "temperature top_k top_p min_p presence_penalty frequency_penalty repetition_penalty "
        "logprobs"
    )
    assert {name: sampling.pop(name) for name in same.split()} == {
        name: pytest.approx(params[name]) for name in same.split()
    }
    assert sampling == {
        "key": (0, 77),
        "choice": 0,
        "end_after": 12,
        "end_ids": (1, 2, 6, 9) + (NO_TOKEN,) * 44,
        "biased": 1,
        "masked": 1,
        "penalised": 1,
        "closes_at": 10 + 1 + 30,
        "closing": (7, 8) + (NO_TOKEN,) * 6,
        "thought_end": 8,
        "opens_at": 10,
        "opening": (3,) + (NO_TOKEN,) * 3,
        "gap": 2,
    }
    kept = dataclasses.asdict(admission)
    del kept["packed"]
    assert kept == {
        "lane": 0,
        "row": 0,
        "length": 0,
        "tables": ((),),
        "prompt_tokens": 10,
        "bias": ((4, -1.0),),
        "allowed": (4, 5, 6),
        "history": PROMPT,
    }


def test_the_highest_min_tokens_fits_the_device_behind_any_prompt() -> None:
    driver = Driver(config_of())
    driver.submit(request(min_tokens=MAX_INT32, max_tokens=None))
    plan = next_plan(driver)
    assert plan is not None
    assert [a.sampling.end_after for a in plan.admissions] == [MAX_INT32]


def test_a_cached_prefix_leaves_at_least_one_token_to_compute() -> None:
    driver = Driver(config_of())
    driver.submit(request("a", prompt=PROMPT[:8]))
    driver.run()
    driver.submit(request("same", prompt=PROMPT[:8]))
    driver.submit(request("longer", prompt=(*PROMPT[:8], 1)))
    driver.submit(request("other salt", prompt=PROMPT[:8], salt="x"))
    plan = next_plan(driver)
    assert plan is not None and [a.length for a in plan.admissions] == [4, 8, 0]
    # Chunks of a single token come first.
    assert plan.lanes[0].starts == [8, 4, 0] and plan.lanes[0].sizes == [1, 4, 8]
    driver.run()


def test_the_next_turn_finds_the_pages_of_the_answer() -> None:
    """Five pages of 4: prompt 10, answer 12, and its last token is in no page yet."""
    driver = Driver(config_of())
    driver.submit(request("a", max_tokens=12))
    driver.run()
    answer = tuple(driver.results["a", 0].tokens)
    assert len(answer) == 12
    driver.submit(request("b", prompt=(*PROMPT, *answer)))
    driver.run()
    times = driver.results["b", 0].times
    assert times is not None
    assert times.cached == 20


def test_choices_share_the_pages_of_the_prompt() -> None:
    driver = Driver(config_of())
    driver.submit(request(n=3))
    driver.run()
    assert [(a.sampling.choice, a.length) for plan in driver.plans for a in plan.admissions] == [
        (0, 0),
        (1, 8),
        (2, 8),
    ]
    assert (
        driver.results["a", 1].tokens == naive(request(), 1, 1, 4) != driver.results["a", 0].tokens
    )


def test_choices_do_not_wait_for_a_leader_that_was_stopped() -> None:
    driver = Driver(config_of(step_tokens=4))
    driver.submit(request(n=2))
    driver.step()
    driver.stop("a", 0)
    driver.run()
    assert driver.results["a", 1].finish == Finish(FinishReason.LENGTH)


def test_the_lane_that_has_the_prefix_is_chosen_then_the_one_with_more_pages() -> None:
    driver = Driver(config_of(lanes=2))
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", (1, 2, 3))):
        driver.submit(request(name, prompt=prompt))
        driver.step()
        if name == "a":
            driver.run()
    lanes = [a.lane for plan in driver.plans for a in plan.admissions]
    assert lanes[1] == lanes[0] and lanes[2] != lanes[0]
    driver.run()


def test_no_request_overtakes_the_first_that_waits() -> None:
    driver = Driver(config_of(num_pages=4, max_context=16))
    driver.submit(request("running", prompt=PROMPT[:8], max_tokens=8))
    driver.step()
    driver.submit(request("large", prompt=tuple(range(20, 32)), max_tokens=1))
    driver.submit(request("small", prompt=(1,), max_tokens=1))
    driver.submit(request("urgent", prompt=(2,), max_tokens=1, priority=-1))
    driver.run()
    order = [driver.results[name, 0].finish for name in ("running", "large", "small", "urgent")]
    assert all(order)
    admitted = [a.prompt_tokens for plan in driver.plans for a in plan.admissions]
    assert admitted == [8, 1, 12, 1]  # running, urgent, large, small


# ---- Ends


def test_end_tokens_before_min_tokens_do_not_end() -> None:
    """The device bars end tokens until min_tokens; the next token may be the end."""
    allowed = tuple(range(40))
    plain = naive(request(allowed_token_ids=allowed), 0, 1, 4)
    driver = Driver(config_of())
    asked = request(min_tokens=2, max_tokens=30, allowed_token_ids=allowed)
    driver.submit(dataclasses.replace(asked, eos_ids=allowed))
    driver.run()
    result = driver.results["a", 0]
    assert (
        result.finish == Finish(FinishReason.STOP, stopped_by=plain[2])
        and result.tokens == plain[:3]
    )


def test_abort_ends_every_choice_once_wherever_it_is() -> None:
    driver = Driver(config_of(max_batch=2))
    driver.submit(request("waits", prompt=(1, 2, 3), n=4, max_tokens=20))
    for _ in range(3):
        driver.step()
    driver.abort("waits")
    driver.abort("waits")
    driver.abort("unknown")
    events = driver.step()
    assert sorted(e.index for e in events if e.finish) == [0, 1, 2, 3]
    assert {e.finish.reason for e in events if e.finish} == {FinishReason.ABORT}
    driver.run()


def test_a_row_that_is_not_finite_ends_alone_and_is_not_cached() -> None:
    driver = Driver(config_of(), spoils=lambda number, lane, row: number == 1 and row == 0)
    driver.submit(request("bad"))
    driver.submit(request("good", prompt=PROMPT[::-1]))
    driver.run()
    finish = driver.results["bad", 0].finish
    assert (
        finish is not None
        and finish.reason == FinishReason.ERROR
        and isinstance(finish.error, NonFiniteLogitsError)
    )
    assert (
        str(finish.error)
        == "request 'bad', choice 0: the logits after 10 tokens are NaN or infinite"
    )
    assert driver.results["good", 0].finish == Finish(FinishReason.LENGTH)
    driver.submit(request("again"))
    driver.run()
    assert driver.results["again", 0].cuts[0] == ("prefill", 0, 10)


def test_an_id_is_free_again_when_its_last_event_was_handed_out() -> None:
    driver = Driver(config_of())
    driver.submit(request(max_tokens=8))
    with pytest.raises(RequestIdInUseError, match="request id 'a' is in flight already"):
        driver.engine.submit(request())
    first = naive(request(), 0, 1, 1)[0]
    driver.run()
    driver.submit(dataclasses.replace(request(), eos_ids=(first,)))
    while not driver.results["a", 0].finish:
        driver.step()
    # The client may know of the end before the last step launched with the sequence is over.
    driver.submit(request())
    driver.run()


def test_an_id_is_not_free_before_its_last_event_was_handed_out() -> None:
    """The end of an aborted request must not be taken for the end of a new one with its id."""
    driver = Driver(config_of())
    driver.submit(request())
    driver.abort("a")
    with pytest.raises(RequestIdInUseError):
        driver.engine.submit(request())
    driver.step()
    driver.submit(request())
    driver.run()
    assert driver.results["a", 0].finish == Finish(FinishReason.LENGTH)


def test_times_are_in_order_and_say_what_happened() -> None:
    driver = Driver(config_of(page_size=2, num_pages=8, max_context=16))
    driver.engine = Engine(driver.scheduler, driver, clock=itertools.count(1.0).__next__)
    for name, prompt in (("a", PROMPT[:4]), ("b", PROMPT[4:9])):
        driver.submit(request(name, prompt=prompt, max_tokens=8))
    driver.run()
    driver.submit(request("like b", prompt=PROMPT[4:9]))
    driver.run()
    for name, cached, preempted in (("a", 0, False), ("b", 0, True), ("like b", 4, False)):
        times = driver.results[name, 0].times
        assert (
            times is not None
            and 0 < times.submitted < times.admitted < times.first_token < times.finished
        )
        assert times.cached == cached and (times.preemptions > 0) == preempted


# ---- Refusals


@pytest.mark.parametrize(
    ("length", "max_tokens", "error", "text"),
    [
        (0, 1, RequestError, "prompt has no tokens"),
        (
            16,
            1,
            ContextLengthError,
            "prompt: 16 tokens and one of the answer exceed the context of 16",
        ),
        (10, 7, ContextLengthError, "prompt: 10 tokens and max_tokens 7 exceed the context of 16"),
        (
            16,
            None,
            ContextLengthError,
            "prompt: 16 tokens and one of the answer exceed the context of 16",
        ),
        (
            10,
            3,
            CapacityError,
            "prompt: 10 tokens and max_tokens 3 can never fit the page pool of 12",
        ),
        (
            12,
            None,
            CapacityError,
            "prompt: 12 tokens and one of the answer can never fit the page pool of 12",
        ),
    ],
)
def test_what_can_never_run_is_refused(
    length: int, max_tokens: int | None, error: type[RequestError], text: str
) -> None:
    driver = Driver(config_of(max_context=16, num_pages=3))
    with pytest.raises(error) as caught:
        driver.submit(request(prompt=tuple(range(length)), max_tokens=max_tokens))
    assert str(caught.value).startswith(text) and caught.value.field == "prompt"
    assert not driver.engine.has_work


@pytest.mark.parametrize(("length", "max_tokens", "made"), [(11, None, 1), (4, None, 8), (4, 8, 8)])
def test_max_tokens_left_open_takes_what_context_and_pool_leave(
    length: int, max_tokens: int | None, made: int
) -> None:
    driver = Driver(config_of(max_context=16, num_pages=3))
    driver.submit(request(prompt=tuple(range(length)), max_tokens=max_tokens))
    driver.run()
    assert len(driver.results["a", 0].tokens) == made


def test_plain_decodes_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path looks at no sequence by itself once all stream, at page borders neither."""
    driver = Driver(config_of())
    for name in "abc":
        driver.submit(request(name, max_tokens=20))
    while (
        not all(seq.streaming for seq in driver.scheduler.lanes[0].running)
        or driver.scheduler.waiting
    ):
        driver.step()
    monkeypatch.setattr(driver.scheduler, "_schedule", lambda *arguments: pytest.fail("one by one"))
    driver.run()
    assert sum(plan.kind == "decode" for plan in driver.plans) >= 19
