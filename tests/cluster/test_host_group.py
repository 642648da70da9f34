"""Engines over hosts of a Ray cluster: they come again, or say why they do not."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import ray

from jaxserve.errors import ConfigError, EngineError
from jaxserve.ray import HostGroup, Place
from jaxserve.ray.placement import PlacedHosts
from jaxserve.ray.reservations import ABANDONED_SECONDS
from tests.cluster.conftest import HOSTS
from tests.cluster.simulated import (
    CHIPS,
    DEVICES,
    NAME,
    ON_TWO_HOSTS,
    SECONDS,
    SERVE,
    SimulatedCluster,
    eventually,
    kill,
    parent,
    processes,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TWO_HOSTS = Place(hosts=2, resources=CHIPS)
OF_A_SERVER = ("jaxserve serve", NAME)


@pytest.fixture
def two_hosts(cluster: SimulatedCluster) -> Iterator[HostGroup]:
    with HostGroup([*SERVE, *ON_TWO_HOSTS], TWO_HOSTS, DEVICES) as group:
        yield group
    assert not processes(*OF_A_SERVER)


def answer(group: HostGroup) -> str:
    """Return the most probable text that follows a prompt."""
    request = {"model": NAME, "prompt": "One day", "max_tokens": 12, "temperature": 0}
    headers = {"authorization": f"Bearer {group.token}"}
    url = f"{group.ready(SECONDS)}/v1/completions"
    reply = httpx.post(url, json=request, headers=headers, timeout=SECONDS)
    reply.raise_for_status()
    return reply.json()["choices"][0]["text"]


def test_a_group_comes_again_after_a_host_was_killed(
    two_hosts: HostGroup, texts: Callable[[Sequence[str], int], list[str]]
) -> None:
    (alone,) = texts(["One day"], 12)
    assert answer(two_hosts) == alone
    url = two_hosts.url
    assert httpx.get(f"{url}/v1/models").status_code == 401  # the cluster can reach the port

    (follower,) = processes(*OF_A_SERVER, "--host-index 1")
    kill(follower)
    eventually(lambda: two_hosts.url != url)
    assert answer(two_hosts) == alone
    assert two_hosts.starts == 2


def test_a_host_that_is_silent_holds_up_nobody(two_hosts: HostGroup) -> None:
    two_hosts.ready(SECONDS)
    (leader,) = processes(*OF_A_SERVER, "--host-index 0")
    (follower,) = processes(*OF_A_SERVER, "--host-index 1")
    actor = parent(follower)
    os.kill(actor, signal.SIGSTOP)
    kill(leader)
    eventually(lambda: not two_hosts.url)
    os.kill(actor, signal.SIGCONT)
    assert two_hosts.ready(SECONDS)


def test_programs_end_with_the_process_that_watches_them(two_hosts: HostGroup) -> None:
    two_hosts.ready(SECONDS)
    for actor in processes("ray::HostProcess"):
        kill(actor)
    eventually(lambda: two_hosts.starts == 2)
    assert two_hosts.ready(SECONDS)
    assert len(processes(*OF_A_SERVER)) == 2


def test_a_program_that_ends_in_order_on_all_hosts(
    cluster: SimulatedCluster, tmp_path: Path, texts: Callable[[Sequence[str], int], list[str]]
) -> None:
    request = {"model": NAME, "prompt": "One day", "max_tokens": 12, "temperature": 0}
    line = {"custom_id": "a", "url": "/v1/completions", "body": request}
    (tmp_path / "in").write_text(json.dumps(line))
    files = ["--batch-file", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    program = ["generate", *SERVE[1:], *ON_TWO_HOSTS, *files]
    with HostGroup(program, TWO_HOSTS, DEVICES) as group:
        group.wait(SECONDS)
    answer = json.loads((tmp_path / "out").read_text())
    assert [answer["response"]["body"]["choices"][0]["text"]] == texts(["One day"], 12)
    assert group.starts == 1


def test_a_server_that_its_node_ends_comes_again(cluster: SimulatedCluster) -> None:
    with HostGroup(SERVE, Place(resources=CHIPS), DEVICES) as group:
        group.ready(SECONDS)
        (server,) = processes(*OF_A_SERVER)
        os.kill(server, signal.SIGTERM)
        eventually(lambda: group.starts == 2)
        assert group.ready(SECONDS)


def test_what_cannot_be_done_is_one_line_and_is_not_tried_again(cluster: SimulatedCluster) -> None:
    with HostGroup(["serve", "/not/here"], Place(resources=CHIPS), DEVICES) as group:
        with pytest.raises(ConfigError, match=r"^host 0 \(.*\): /not/here: there is no"):
            group.ready(SECONDS)
        assert group.starts == 1
        with pytest.raises(ConfigError):
            group.wait(SECONDS)


ODD = Place(hosts=2, resources={"odd": 1.0})


@pytest.fixture
def odd_hosts(cluster: SimulatedCluster, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Return a function that adds two nodes with the resource "odd".

    Python runs a program first on the second of them: what differs there.
    """
    nodes = []

    def add(program: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(program)
        nodes.append(cluster.add_node({"odd": 1.0}))
        nodes.append(cluster.add_node({"odd": 1.0}, env_vars={"PYTHONPATH": str(tmp_path)}))

    yield add
    for node in nodes:
        cluster.remove_node(node)


IS_JAXSERVE = "import sys, os\nis_jaxserve = sys.argv[:1] == ['-m'] and 'serve' in sys.argv\n"


def test_a_checkpoint_that_one_host_lacks(odd_hosts: Callable[[str], None]) -> None:
    missing = "if is_jaxserve: sys.argv[sys.argv.index('serve') + 1] = '/not/here'"
    odd_hosts(IS_JAXSERVE + missing)
    with (
        HostGroup([*SERVE, *ON_TWO_HOSTS], ODD, DEVICES) as group,
        pytest.raises(ConfigError, match=r"^host \d \(.*\): /not/here: there is no such folder"),
    ):
        group.ready(SECONDS)
    assert group.starts == 1


OTHER_RELEASE = """
from importlib import metadata
installed = metadata.version
metadata.version = lambda name: "0.1.9" if name == "jaxserve" else installed(name)
"""


def test_hosts_with_different_releases(odd_hosts: Callable[[str], None]) -> None:
    odd_hosts(OTHER_RELEASE)
    with (
        HostGroup([*SERVE, *ON_TWO_HOSTS], ODD, DEVICES) as group,
        pytest.raises(ConfigError, match="differs from the leader in the version of jaxserve"),
    ):
        group.ready(SECONDS)
    assert group.starts == 1


def test_what_fails_three_times_is_not_tried_again(
    cluster: SimulatedCluster, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(IS_JAXSERVE + "if is_jaxserve: os._exit(70)")
    place = Place(resources=CHIPS)
    with (
        HostGroup(SERVE, place, DEVICES | {"PYTHONPATH": str(tmp_path)}) as group,
        pytest.raises(EngineError, match="ended with exit code 70 before it was ready, 3 times"),
    ):
        group.ready(SECONDS)
    assert group.starts == 3


def test_hosts_that_the_cluster_does_not_have(cluster: SimulatedCluster) -> None:
    place = Place(hosts=2, resources={"TPU": 8}, seconds=0.5)
    wanted = r"the cluster does not have 2 hosts with TPU 8 after 0\.5 s"
    with HostGroup(SERVE, place) as group, pytest.raises(ConfigError, match=wanted):
        group.ready(SECONDS)


def placed(place: Place) -> PlacedHosts:
    """Return hosts of the cluster."""
    return PlacedHosts(place, time.monotonic() + SECONDS, threading.Event())


@ray.remote
class Reserver:
    """Reserves all simulated hosts."""

    def __init__(self) -> None:
        place = Place(hosts=HOSTS, resources=CHIPS)
        self._hosts = placed(place)

    def reserved(self) -> int:
        """Return the number of hosts."""
        return len(self._hosts.actors)


def test_hosts_of_an_actor_that_is_gone_are_given_back(cluster: SimulatedCluster) -> None:
    gone = Reserver.remote()
    assert ray.get(gone.reserved.remote()) == HOSTS
    waiting = Reserver.remote()
    lost = Reserver.remote()  # before it has hosts
    seconds = 2 * ABANDONED_SECONDS
    with (
        HostGroup(SERVE, Place(resources=CHIPS, seconds=seconds)) as group,
        pytest.raises(ConfigError, match="the cluster does not have 1 host with TPU 4"),
    ):
        group.ready(SECONDS)
    ray.kill(lost)
    ray.kill(gone)
    assert ray.get(waiting.reserved.remote()) == HOSTS
    ray.kill(waiting)
    placed(Place(resources=CHIPS)).free()


def test_a_group_that_nobody_waits_for_is_closed(cluster: SimulatedCluster) -> None:
    HostGroup(SERVE, Place(resources={"TPU": 8})).close()


def test_hosts_of_a_tpu_slice_are_in_the_order_of_its_workers(cluster: SimulatedCluster) -> None:
    nodes = []
    for worker in (2, 0, 3, 1):
        labels = {
            "ray.io/tpu-slice-name": "slice",
            "ray.io/tpu-worker-id": str(worker),
            "ray.io/tpu-topology": "4x4",
            "ray.io/tpu-pod-type": "v6e-16",
            "ray.io/accelerator-type": "TPU-V6E",
        }
        head = {"TPU-v6e-16-head": 1.0} if worker == 0 else {}
        found = {"TPU_NAME": "slice", "TPU_WORKER_ID": str(worker)}
        nodes.append(cluster.add_node(CHIPS | head, labels=labels, env_vars=found))
    hosts = placed(Place(tpu_slice=("4x4", "v6e")))
    try:
        workers = [ray.get(actor.tpu_worker.remote()) for actor in hosts.actors]
    finally:
        hosts.free()
        for node in nodes:
            cluster.remove_node(node)
    assert workers == [0, 1, 2, 3]
