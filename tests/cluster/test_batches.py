"""Batch files as Ray Data datasets, answered by servers of two hosts each."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray.data
from ray.data.checkpoint import CheckpointConfig
from ray.util.placement_group import placement_group_table

from jaxserve.errors import ConfigError
from jaxserve.ray import Place, answer_requests, read_requests, write_answers
from jaxserve.ray.reservations import REMOVED
from tests.cluster.simulated import (
    CHIPS,
    DEVICES,
    MODEL,
    NAME,
    ON_TWO_HOSTS,
    SERVE,
    SimulatedCluster,
    eventually,
    kill,
    processes,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROWS = 500
TOKENS = 12
OF_A_SERVER = ("jaxserve serve", NAME)
ACTOR = "ray::MapWorker(MapBatches(RequestAnswerer))"
TWO_HOSTS = Place(hosts=2, resources=CHIPS)


def line(number: int, **body: Any) -> str:
    """Return a line of a batch, which asks how a story goes on."""
    fixed = {"model": NAME, "prompt": prompt(number), "max_tokens": TOKENS, "temperature": 0}
    request = {"custom_id": f"line-{number}", "url": "/v1/completions", "body": {**fixed, **body}}
    return json.dumps(request)


def prompt(number: int) -> str:
    return f"Story {number}: once upon a time"


def answers(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of all files."""
    files = sorted(folder.glob("*.jsonl")) if folder.exists() else []
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def answered(batch: Path, folder: Path, **options: Any) -> None:
    """Answer a batch file into a folder."""
    asked = read_requests(str(batch))
    served = answer_requests(
        asked, [*SERVE, *ON_TWO_HOSTS], place=TWO_HOSTS, environment=DEVICES, **options
    )
    write_answers(served, str(folder))


def test_every_line_is_answered_once_though_a_host_and_a_replica_are_killed(
    cluster: SimulatedCluster, tmp_path: Path, texts: Callable[[Sequence[str], int], list[str]]
) -> None:
    batch = tmp_path / "requests.jsonl"
    bad = ['{"custom_id": "no-url"}', line(ROWS, temperature=9)]
    batch.write_text("\n".join([*map(line, range(ROWS)), *bad]))
    folder = tmp_path / "answers"

    def kill_two() -> None:
        eventually(lambda: len(answers(folder)) > 50)
        kill(processes(*OF_A_SERVER, "--host-index 1")[0])
        eventually(lambda: len(answers(folder)) > 150)
        kill(processes(ACTOR)[0])

    killer = threading.Thread(target=kill_two)
    killer.start()
    answered(batch, folder, replicas=2, batch_size=16)
    killer.join()

    found = {answer["custom_id"]: answer for answer in answers(folder)}
    assert len(found) == len(answers(folder)) == ROWS + 2
    assert found["no-url"]["error"]["message"].startswith(f"line {ROWS + 1}: url is None")
    assert found[f"line-{ROWS}"]["response"]["status_code"] == 400
    alone = texts([prompt(i) for i in range(ROWS)], TOKENS)
    bodies = [found[f"line-{i}"]["response"]["body"] for i in range(ROWS)]
    assert [body["choices"][0]["text"] for body in bodies] == alone
    eventually(lambda: not processes(*OF_A_SERVER))


def reserved() -> set[str]:
    """Return the names of reservations that the cluster keeps."""
    groups = placement_group_table().values()
    return {group["name"] for group in groups if group["state"] != REMOVED}


def test_a_job_that_was_stopped_goes_on(cluster: SimulatedCluster, tmp_path: Path) -> None:
    batch = tmp_path / "requests.jsonl"
    batch.write_text("\n".join(map(line, range(64))))
    folder = tmp_path / "answers"
    reserved_before = reserved()
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "done"), delete_checkpoint_on_success=False
    )
    try:
        answered(batch, folder, batch_size=16)
        before = {file.name for file in folder.glob("*.jsonl")}
        assert len(answers(folder)) == 64
        batch.write_text("\n".join(map(line, range(96))))
        answered(batch, folder, batch_size=16)
    finally:
        context.checkpoint_config = None
    eventually(lambda: reserved() <= reserved_before)
    assert before < {file.name for file in folder.glob("*.jsonl")}
    assert sorted(answer["custom_id"] for answer in answers(folder)) == sorted(
        f"line-{i}" for i in range(96)
    )


def test_a_server_that_cannot_start_is_one_line(cluster: SimulatedCluster, tmp_path: Path) -> None:
    batch = tmp_path / "requests.jsonl"
    batch.write_text(line(0))
    asked = read_requests(str(batch))
    served = answer_requests(asked, ["serve", "/not/here"], place=Place(resources=CHIPS))
    with pytest.raises(Exception, match=r"host 0 \(.*\): /not/here: there is no such folder"):
        served.take_all()


@pytest.mark.parametrize(
    "arguments", [["generate", MODEL], [MODEL], ["serve", MODEL, "--token-file", "a"]]
)
def test_arguments_that_are_not_those_of_a_server(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="give those of a server, `serve MODEL`, without"):
        answer_requests(ray.data.from_items([]), arguments)
