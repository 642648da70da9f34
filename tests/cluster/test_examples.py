"""The examples for Ray, as programs of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ray import serve

from tests.cluster.simulated import MODEL, NAME, SECONDS, SimulatedCluster, eventually
from tests.cluster.test_batches import answers, line

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PORT = 8129


def start(cluster: SimulatedCluster, *command: str) -> "subprocess.Popen[bytes]":
    """Start a Python program on the cluster."""
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    return subprocess.Popen([sys.executable, *command], env=environment)


def example(name: str) -> str:
    return str(ROOT / "examples" / name)


def test_a_batch_is_answered_and_goes_on(cluster: SimulatedCluster, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    folder = tmp_path / "answers"
    for lines in (20, 30):
        requests.write_text("\n".join(map(line, range(lines))))
        arguments = [str(requests), str(folder), "--model", MODEL, "--chips", "4"]
        assert start(cluster, example("ray_batch.py"), *arguments).wait(SECONDS) == 0
        found = [answer["custom_id"] for answer in answers(folder)]
        assert sorted(found) == sorted(f"line-{i}" for i in range(lines))


ARGUMENTS = [f"model={MODEL}", "replicas=[1, 2]", 'resources={"TPU": 4}']
ASKED = f"--model {MODEL} --chips 4 --most 1 --port {PORT}".split()


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ([example("ray_serve.py"), *ASKED], PORT),
        (["-m", "ray.serve.scripts", "run", "jaxserve.ray:build", *ARGUMENTS], 8000),
    ],
)
def test_a_model_is_served(cluster: SimulatedCluster, command: list[str], port: int) -> None:
    program = start(cluster, *command)

    def answer() -> str:
        request = {"model": NAME, "prompt": "One day", "max_tokens": 4}
        try:
            reply = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=request)
        except httpx.TransportError:
            return ""
        return json.loads(reply.text)["choices"][0]["text"] if reply.is_success else ""

    try:
        assert eventually(answer)
    finally:
        program.send_signal(signal.SIGINT)
        program.wait(SECONDS)
        serve.shutdown()  # an application goes on without the program that has started it
