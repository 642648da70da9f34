"""The stream between a leader and its followers, in one process.

Hosts join, agree, send orders, get lost and say farewell.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve.checkpoints.hub.names import HubModel, model_of_flag
from jaxserve.cluster import follower as following
from jaxserve.cluster import heartbeat
from jaxserve.cluster import leader as leading
from jaxserve.cluster.compatibility import Facts, difference
from jaxserve.cluster.follower import Follower
from jaxserve.cluster.heartbeat import FAILED, Heartbeat, PodFailure
from jaxserve.cluster.hub_model import model_of_pod
from jaxserve.cluster.leader import Leader
from jaxserve.cluster.message_auth import SECRET_BYTES
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.errors import ConfigError, EngineError

SECRET = b"x" * SECRET_BYTES
FACTS = {"--max-batch": "4", "the model": "abc"}


@dataclass
class FakeExit:
    """Stands in for the end of a process that is only a thread."""

    codes: list[int] = field(default_factory=list)
    called: threading.Event = field(default_factory=threading.Event)

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.called.set()

    def wait(self) -> int:
        assert self.called.wait(60)
        return self.codes[0]


@dataclass
class Pod:
    leader: Leader
    followers: list[Follower]
    exits: list[FakeExit]  # the leader's first
    pool: ThreadPoolExecutor

    def agree(self, stage: str, *facts: Facts) -> "list[Future[None]]":
        hosts = [self.leader, *self.followers]
        return [
            self.pool.submit(host.agree, stage, lambda own=own: own)
            for host, own in zip(hosts, facts, strict=True)
        ]


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT", 0.05)
    monkeypatch.setattr(leading, "LEAVE_SECONDS", 60.0)


@pytest.fixture
def pod(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Pod]:
    """Yield a pod of a leader and two followers that have joined."""
    exits = [FakeExit() for _ in range(3)]
    server_pool = ThreadPoolExecutor()
    monkeypatch.setattr(leading, "ThreadPoolExecutor", lambda threads: server_pool)
    leader = Leader(3, 0, SECRET, exits[0])
    followers = [Follower(f"127.0.0.1:{leader.port}", host, SECRET, exits[host]) for host in (1, 2)]
    with ThreadPoolExecutor() as pool:
        joining = [
            pool.submit(leader.wait_for_followers),
            *(pool.submit(follower.call) for follower in followers),
        ]
        for future in joining:
            future.result(60)
        yield Pod(leader, followers, exits, pool)
        leader._ending = True
        for follower in followers:
            follower._leaving = True
            follower._outbox.put(None)
        leader._server.stop(0).wait()
        server_pool.shutdown()
        for host in (leader, *followers):
            host._heartbeat.stop()
            host._heartbeat._thread.join()  # it may have something to say, while somebody listens
        for follower in followers:
            follower._channel.close()


def next_order(follower: Follower) -> pb.Order:
    return follower._orders.get(timeout=60)


class Clock:
    """A clock for heartbeats, turned on by a beat whenever each host has heard of its peers.

    heard: pairs of a host's heartbeat and the name of a peer that it has to hear of.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *heard: tuple[Heartbeat, str]) -> None:
        self.time = 100.0
        self._wanted = set(heard)
        self._heard: set[tuple[Heartbeat, str]] = set()
        self._hear = Heartbeat.hear
        module = SimpleNamespace(monotonic=lambda: self.time, sleep=time.sleep)
        monkeypatch.setattr(heartbeat, "time", module)
        for host in {host for host, _ in heard}:
            for peer in host._heard:
                host.hear(peer)
        monkeypatch.setattr(Heartbeat, "hear", lambda host, peer: self._note(host, peer))

    def _note(self, host: Heartbeat, peer: str) -> None:
        self._hear(host, peer)
        self._heard.add((host, peer))
        if self._heard >= self._wanted:
            self._heard.clear()
            self.time += heartbeat.BEAT


def test_every_host_is_told_what_the_leader_found(pod: Pod) -> None:
    asked: list[str] = []

    def found() -> str:
        asked.append("once")
        return "org/name@commit"

    hosts = [pod.leader, *pod.followers]
    told = [future.result(60) for future in [pod.pool.submit(h.told, found) for h in hosts]]
    assert told == ["org/name@commit"] * 3 and asked == ["once"]


def test_a_pod_without_the_model_ends(pod: Pod) -> None:
    waiting = pod.pool.submit(pod.followers[0].told, str)
    pod.leader._end(0)
    with pytest.raises(EngineError, match="the leader has ended the pod"):
        waiting.result(60)


def test_a_failed_pod_ends_hosts_by_its_exit_code(
    pod: Pod, capfd: pytest.CaptureFixture[str]
) -> None:
    """A host's main thread, which waits for orders, cannot end the process with another code."""
    pod.leader._end(FAILED)
    assert [ended.wait() for ended in pod.exits[1:]] == [FAILED] * 2
    assert capfd.readouterr().err.count("the leader has ended the pod") == 2
    assert all(host._orders.empty() for host in pod.followers)


@pytest.mark.parametrize(
    ("theirs", "given", "problem"),
    [
        ("", "org/name", "the leader has a folder"),
        ("org/other@1", "org/name", "the leader has org/other"),
        ("org/name@1", "/folder", "the leader has org/name"),
    ],
)
def test_hosts_name_one_model(theirs: str, given: str, problem: str) -> None:
    follower = SimpleNamespace(told=lambda value: theirs)
    with pytest.raises(ConfigError, match=problem):
        model_of_pod(follower, model_of_flag(given))  # type: ignore[arg-type]


def test_hosts_load_the_commit_of_the_leader() -> None:
    follower = SimpleNamespace(told=lambda value: "org/name@1234")
    found = model_of_pod(follower, HubModel("org/name", "main"))  # type: ignore[arg-type]
    assert found == HubModel("org/name", "1234")
    follower = SimpleNamespace(told=lambda value: "")
    assert model_of_pod(follower, Path("/folder")) == Path("/folder")  # type: ignore[arg-type]


def test_hosts_that_agree_go_on(pod: Pod) -> None:
    for stage in ("start", "engine"):
        for future in pod.agree(stage, FACTS, FACTS, FACTS):
            future.result(60)


def test_one_that_differs_is_refused_on_all_hosts_in_one_line(pod: Pod) -> None:
    differing = FACTS | {"the model": "xyz"}
    for future in pod.agree("start", FACTS, FACTS, differing):
        with pytest.raises(ConfigError) as caught:
            future.result(60)
        assert (
            str(caught.value) == "host 2 differs from the leader in the model: xyz there, abc here"
        )


def test_the_first_difference_is_named() -> None:
    assert difference(FACTS, dict(FACTS)) is None
    assert difference(FACTS, {"--max-batch": "2"}) == "--max-batch: 2 there, 4 here"
    assert difference(FACTS, {"--max-batch": "4"}) == "the model: none there, abc here"
    assert difference(FACTS, FACTS | {"more": "1"}) == "more: 1 there, none here"


def test_a_difference_may_have_a_meaning_of_its_own(pod: Pod) -> None:
    """Only the leader judges; a host's facts need not be equal to the leader's."""
    seen: dict[int, Facts] = {}

    def judge(host: int, theirs: Facts) -> str | None:
        seen[host] = theirs
        return "the weight norm" if theirs["part"] == "2" else None

    hosts = [pod.leader, *pod.followers]
    asked = [
        pod.pool.submit(host.agree, "weight", lambda host=host: {"part": f"{host.host}"}, judge)
        for host in hosts
    ]
    for future in asked:
        with pytest.raises(ConfigError, match="host 2 differs from the leader in the weight norm"):
            future.result(60)
    assert seen == {1: {"part": "1"}, 2: {"part": "2"}}


@pytest.mark.parametrize(
    ("values", "same"),
    [
        (("a", "a", "a"), True),
        (("a", "a", "b"), False),
        (("b", "a", "a"), False),
        (("",) * 3, False),
    ],
)
def test_every_host_knows_whether_values_are_the_same(
    pod: Pod, values: tuple[str, ...], same: bool
) -> None:
    hosts = [pod.leader, *pod.followers]
    asked = [
        pod.pool.submit(host.all_same, "files", lambda value=value: value)
        for host, value in zip(hosts, values, strict=True)
    ]
    assert [future.result(60) for future in asked] == [same] * 3


def test_orders_come_to_all_in_their_order(pod: Pod) -> None:
    for number in range(50):
        pod.leader.order(plan=b"%d" % number)
    for follower in pod.followers:
        assert [next_order(follower).plan for _ in range(50)] == [
            b"%d" % number for number in range(50)
        ]


def test_an_order_that_was_changed_ends_the_follower_and_the_pod(
    pod: Pod, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The farewell has its time: until the leader has ended.
    monkeypatch.setattr(
        following, "time", SimpleNamespace(sleep=lambda seconds: pod.exits[0].wait())
    )
    response = pb.FollowResponse(
        number=1, order=pb.Order(plan=b"plan").SerializeToString(), digest=b"?" * 32
    )
    pod.leader._outboxes[1].put(response)
    assert [ended.wait() for ended in pod.exits] == [FAILED] * 3
    assert pod.followers[0]._orders.empty()
    assert (
        "error: host 1 has ended: order 1 is not the one that the leader sent"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    "host, secret", [(3, SECRET), (0, SECRET), (1, SECRET), (1, b"y" * SECRET_BYTES)]
)
def test_strangers_and_doubles_are_turned_away(pod: Pod, host: int, secret: bytes) -> None:
    ended = FakeExit()
    stranger = Follower(f"127.0.0.1:{pod.leader.port}", host, secret, ended)
    stranger.call()
    assert ended.wait() == FAILED
    stranger._outbox.put(None)
    stranger._channel.close()
    pod.leader.order(plan=b"plan")
    assert next_order(pod.followers[0]).plan == b"plan" and not pod.exits[0].codes


@pytest.mark.system
def test_a_broken_stream_ends_everybody_at_once(
    pod: Pod, capfd: pytest.CaptureFixture[str]
) -> None:
    failures: list[PodFailure] = []
    pod.leader.watch(failures.append, lambda reason: None, grace=0.2)
    pod.followers[0]._leaving = True
    began = time.monotonic()
    pod.followers[0]._channel.close()
    assert pod.exits[0].wait() == FAILED and pod.exits[2].wait() == FAILED
    assert time.monotonic() - began > 0.2
    assert failures[0].reason.startswith("host 1 is gone")
    assert "error: the leader has ended the pod" in capfd.readouterr().err


def test_a_leader_that_goes_takes_its_followers_along(pod: Pod) -> None:
    pod.leader._ending = True
    pod.leader._server.stop(0)
    assert [ended.wait() for ended in pod.exits[1:]] == [FAILED] * 2


def test_silence_ends_the_process(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that hangs keeps its connections open."""
    leader, first, second = (host._heartbeat for host in (pod.leader, *pod.followers))
    Clock(monkeypatch, (leader, "host 1"), (first, "the leader"))
    leader.patience = 0.4
    second.stop()  # no heartbeats any more, no messages either
    failures: list[PodFailure] = []
    pod.leader.watch(failures.append, lambda reason: None, grace=0)
    assert pod.exits[0].wait() == pod.exits[1].wait() == FAILED
    assert [failure.reason for failure in failures] == ["host 2 has sent no heartbeat for 0.4 s"]


def test_heartbeats_keep_the_pod(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    leader, *followers = (host._heartbeat for host in (pod.leader, *pod.followers))
    clock = Clock(
        monkeypatch,
        *((leader, f"host {number}") for number in (1, 2)),
        *((follower, "the leader") for follower in followers),
    )
    for each in (leader, *followers):
        each.patience = 0.4
    end = clock.time + 1.5
    while clock.time < end:
        time.sleep(0.01)
    assert not any(ended.codes for ended in pod.exits)


def test_who_was_stopped_itself_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that slept for 30 s hears of the others again before it judges them."""
    now = [100.0]
    beats = 0
    ended = FakeExit()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def send() -> None:
        nonlocal beats
        beats += 1
        watch.hear("a")
        now[0] += 30 if beats == 3 else 0.05

    watch = Heartbeat(send, exit=ended)
    watch.patience = 5
    watch.start(["a"])
    while beats < 6:
        threading.Event().wait(0.01)
    watch.stop()
    assert now[0] > 130 and not ended.codes


def test_a_follower_that_has_to_go_is_reported(pod: Pod) -> None:
    reasons: list[str] = []
    pod.leader.watch(lambda failure: None, reasons.append, grace=0)
    pod.followers[1].leave()
    while not reasons:
        time.sleep(0.01)
    assert reasons == ["host 2 is told to end: SIGTERM"] and not pod.exits[0].codes


def test_an_end_in_order(pod: Pod) -> None:
    def follow(follower: Follower) -> int:
        with follower:
            return follower.follow(None)  # type: ignore[arg-type]

    ends = [pod.pool.submit(follow, follower) for follower in pod.followers]
    with pod.leader:
        pass
    assert [end.result(60) for end in ends] == [0, 0]
    assert not any(ended.codes for ended in pod.exits)


def test_a_leader_that_fails_sends_its_followers_away(pod: Pod) -> None:
    with pytest.raises(EngineError, match="lost"), pod.leader:
        raise EngineError("lost")
    assert [ended.wait() for ended in pod.exits[1:]] == [FAILED] * 2


def test_a_follower_that_fails_says_why(pod: Pod, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError), pod.followers[0]:
        raise ConfigError("--model /nowhere: there is no such folder")
    assert pod.exits[0].wait() == pod.exits[2].wait() == FAILED
    assert (
        "error: host 1 has ended: --model /nowhere: there is no such folder\n"
        in capfd.readouterr().err
    )


def test_a_taken_port_is_one_line(pod: Pod) -> None:
    refused = f"--control-port is {pod.leader.port}; the leader cannot listen"
    with pytest.raises(ConfigError, match=refused):
        Leader(2, pod.leader.port, SECRET)
