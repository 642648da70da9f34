"""Rows of Ray Data, answered by an AsyncLLM in each of some actors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray.data

from jaxserve.errors import RequestError
from jaxserve.ray import generate_rows
from tests.cluster.simulated import (
    CHIPS,
    MODEL,
    OPTIONS,
    SimulatedCluster,
    kill,
    processes,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ACTOR = "ray::MapWorker(MapBatches(RowGenerator))"
Texts = Callable[[Sequence[str], int], list[str]]


def answering(rows: list[dict[str, Any]], **options: Any) -> ray.data.Dataset:
    """Return a dataset that answers numbered rows, each with the most probable text."""
    numbered = ray.data.from_items([{"number": i, **row} for i, row in enumerate(rows)])
    fixed = {"resources": CHIPS, "options": OPTIONS, "temperature": 0.0}
    return generate_rows(numbered, MODEL, **fixed, **options)


def generate(rows: list[dict[str, Any]], **options: Any) -> dict[int, dict[str, Any]]:
    """Return the answered rows by their number."""
    answered = answering(rows, **options).take_all()
    assert sorted(row["number"] for row in answered) == list(range(len(rows)))
    return {row["number"]: row for row in answered}


def test_rows_are_answered_as_alone_though_an_actor_is_killed(
    cluster: SimulatedCluster, texts: Texts
) -> None:
    prompts = [f"Story {i}: once upon a time" for i in range(500)]
    answered = answering([{"prompt": prompt} for prompt in prompts], replicas=2, max_tokens=12)
    rows = {}
    for row in answered.iter_rows():
        if len(rows) == 100:
            kill(processes(ACTOR)[0])
        assert row["number"] not in rows
        rows[row["number"]] = row
    assert not any(row["error"] for row in rows.values())
    assert [rows[i]["generated_text"] for i in range(500)] == texts(prompts, 12)


def test_the_error_of_a_row_is_its_own(cluster: SimulatedCluster, texts: Texts) -> None:
    question = [{"role": "user", "content": "What is 7 plus 5?"}]
    bad = {
        "row has neither prompt nor messages": {"other": 1},
        "row has prompt and messages": {"prompt": "a", "messages": question},
        "sampling has an unknown field: SamplingParams has no keyword 'temprature'": {
            "prompt": "a",
            "sampling": {"temprature": 1.0},
        },
        "temperature is 9.0; it must be between 0.0 and 2.0": {
            "prompt": "a",
            "sampling": {"temperature": 9.0},
        },
        "n is 2; a row has one answer (repeat the row)": {"prompt": "a", "sampling": {"n": 2}},
        "prompt: 6001 tokens and one of the answer exceed the context": {"prompt": "x " * 3000},
        "messages[0]": {"messages": [{"content": "a message of nobody"}]},
    }
    good = [
        {"prompt": "One day"},
        {"prompt": "One day", "sampling": {"max_tokens": 3}},
        {"messages": question},
    ]
    rows = generate([*bad.values(), *good], max_tokens=16)
    for i, error in enumerate(bad):
        assert (rows[i]["error"] or "").startswith(error), rows[i]
        assert rows[i]["generated_text"] is None
    answers = [rows[len(bad) + i] for i in range(len(good))]
    assert [row["generated_text"] for row in answers[:2]] == [
        *texts(["One day"], 16),
        *texts(["One day"], 3),
    ]
    assert answers[1]["finish_reason"] == "length"
    assert answers[1]["output_tokens"] == 3
    assert answers[2]["prompt_tokens"] > 7


def test_prompts_of_the_wrong_type(cluster: SimulatedCluster) -> None:
    rows = generate([{"prompt": [72, 101]}, {"prompt": [72, 10**6]}], max_tokens=2)
    assert rows[0]["output_tokens"] == 2
    assert rows[1]["error"].startswith("prompt has ")
    rows = generate([{"prompt": True}], max_tokens=2)
    assert rows[0]["error"].startswith("prompt is True")


def test_parameters_of_all_rows_are_checked_at_once() -> None:
    with pytest.raises(RequestError, match="top_p is 2"):
        generate_rows(ray.data.from_items([]), MODEL, top_p=2.0)


def test_a_column_that_answers_would_hide(cluster: SimulatedCluster) -> None:
    with pytest.raises(Exception, match="the rows have a column seed already; rename it"):
        generate([{"prompt": "a", "seed": 1}])


def test_a_model_that_is_not_there(cluster: SimulatedCluster) -> None:
    rows = generate_rows(ray.data.from_items([{"prompt": "a"}]), "/not/here", resources=CHIPS)
    with pytest.raises(Exception, match="/not/here: there is no such folder"):
        rows.take_all()
