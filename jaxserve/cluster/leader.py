"""The host that plans: it compares the followers' facts with its own, and sends them every step."""

import hmac
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Literal, Never

import grpc
import jax

from jaxserve.cluster.compatibility import Facts, Judge, difference
from jaxserve.cluster.heartbeat import (
    BEAT,
    FAILED,
    PATIENCE,
    Heartbeat,
    PodFailure,
    print_failure,
)
from jaxserve.cluster.leading_runner import LeadingRunner
from jaxserve.cluster.message_auth import MessageChain, proof_of
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.cluster.v1 import cluster_pb2_grpc as rpc
from jaxserve.errors import ConfigError
from jaxserve.flag_errors import flag_error

# A plan that admits long prompts with penalties has megabytes. Messages to the leader keep the
# default limit of 4 MiB, which also holds for unknown callers: the digests of 262,000 tensors fit.
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
EXTRA_THREADS = 8  # for calls that turn out not to be a follower's: each stream takes one
LEAVE_SECONDS = 5.0  # that followers have to leave after they were told to
LEAVE_AFTER_FAILURE_SECONDS = 2.0

Outbox = SimpleQueue[pb.FollowResponse | None]


class Leader(rpc.ClusterServiceServicer):
    """Host 0 of a pod. As a context manager it ends the pod; an exception ends it as failed.

    `hosts` counts all hosts, this one included. The control stream listens on `port`, or on any
    free port if it is 0, which the attribute `port` then has. `exit` ends the process.
    """

    leads: Literal[True] = True
    host: Final = 0

    def __init__(
        self, hosts: int, port: int, secret: bytes, exit: Callable[[int], object] = os._exit
    ):
        self._followers = range(1, hosts)
        self._secret = secret
        # Guards the chain and the four fields below, which threads of gRPC and of the engine
        # share: an order gets its number and enters all outboxes in one go.
        self._changed = threading.Condition()
        self._chain = MessageChain(secret)
        self._outboxes: dict[int, Outbox] = {}
        self._left: set[int] = set()  # followers whose streams have ended
        self._facts: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
        self._ending = False
        self._heartbeat = Heartbeat(self._beat, self._failed, exit=exit)
        self._on_failure: Callable[[PodFailure], None] = print_failure
        self._on_eviction: Callable[[str], None] = self._fail_by_eviction
        self._on_facts: Callable[[], None] = lambda: None
        self._server = grpc.server(ThreadPoolExecutor(hosts + EXTRA_THREADS), options=OPTIONS)
        rpc.add_ClusterServiceServicer_to_server(self, self._server)
        try:
            self.port: int = self._server.add_insecure_port(f"[::]:{port}")
        except RuntimeError:
            problem = "the leader cannot listen there (is it taken?)"
            raise flag_error("--control-port", port, problem) from None
        self.new_runner = partial(LeadingRunner, self)

    # ---- the followers

    def wait_for_followers(self) -> None:
        """Wait until all followers have called, then watch their heartbeats."""
        self._server.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._outboxes) == len(self._followers))
        self._heartbeat.start(map(_name, self._followers))

    def Follow(
        self, request_iterator: Iterator[pb.FollowRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.FollowResponse]:
        """Serve one follower's stream for as long as the pod lasts."""
        hello = next(request_iterator).hello
        if not hmac.compare_digest(hello.proof, proof_of(self._secret, hello.host)):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the proof is not one of this pod")
        with self._changed:
            if hello.host not in self._followers or hello.host in self._outboxes:
                context.abort(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"host {hello.host} is here, or none of this pod",
                )
            outbox: Outbox = SimpleQueue()
            self._outboxes[hello.host] = outbox
            self._changed.notify_all()
        listening = threading.Thread(
            target=self._listen, args=(hello.host, request_iterator), daemon=True
        )
        listening.start()
        yield from iter(outbox.get, None)

    def _listen(self, host: int, requests: Iterator[pb.FollowRequest]) -> None:
        try:
            for request in requests:
                self._heartbeat.hear(_name(host))
                self._take(host, request)
        except Exception as error:  # gRPC does not document what a broken stream raises here
            reason = f" ({error})" if str(error) else ""
        else:
            reason = ""
        with self._changed:
            self._left.add(host)
            self._changed.notify_all()
            ending = self._ending
        self._outboxes[host].put(None)
        if not ending:
            self._heartbeat.fail(PodFailure(f"{_name(host)} is gone{reason}"))

    def _take(self, host: int, request: pb.FollowRequest) -> None:
        match request.WhichOneof("kind"):
            case "facts":
                facts = request.facts
                with self._changed:
                    self._facts[facts.stage][host] = dict(
                        zip(facts.names, facts.values, strict=True)
                    )
                    self._changed.notify_all()
                self._on_facts()
            case "farewell" if self._ending:
                pass
            case "farewell" if request.farewell.exit_code:
                reason = f"{_name(host)} has ended: {request.farewell.reason}"
                self._heartbeat.fail(PodFailure(reason, request.farewell.exit_code))
            case "farewell":
                self._on_eviction(f"{_name(host)} is told to end: {request.farewell.reason}")

    def _fail_by_eviction(self, reason: str) -> None:
        self._heartbeat.fail(PodFailure(reason))

    def _beat(self) -> None:
        for outbox in list(self._outboxes.values()):
            outbox.put(pb.FollowResponse())

    # ---- orders

    def order(self, **kind: Any) -> None:
        """Send an order to all followers; `kind` is one field of pb.Order."""
        order = pb.Order(**kind).SerializeToString()
        with self._changed:
            number, digest = self._chain.add(order)
            response = pb.FollowResponse(number=number, order=order, digest=digest)
            for outbox in self._outboxes.values():
                outbox.put(response)

    def told(self, value: Callable[[], str]) -> str:
        """Return a value of host 0 on every host. Each of them calls it; host 0 calls `value`."""
        found = value()
        self.order(told=pb.Told(value=found))
        return found

    def all_same(self, stage: str, value: Callable[[], str]) -> bool:
        """Return whether all hosts give one value that is not empty; each of them calls it."""
        mine = value()
        same = bool(mine) and all(f[stage] == mine for f in self._stated(stage).values())
        self.told(lambda: "same" if same else "")
        return same

    def agree(self, stage: str, facts: Callable[[], Facts], judge: Judge | None = None) -> None:
        """Wait until every host has stated its facts at this stage.

        Without `judge` they are compared with this host's.

        Raises:
            ConfigError: A host differs. It is raised on all hosts.
        """
        stated = self._stated(stage)
        judge = judge or partial(_difference, facts())
        for host, theirs in sorted(stated.items()):
            if found := judge(host, theirs):
                self._refuse(f"{_name(host)} differs from the leader in {found}")
        self.order(agreed=pb.Agreed(stage=stage))

    def _stated(self, stage: str) -> dict[int, Facts]:
        """Wait until every follower has stated its facts at this stage; return them by host."""
        with self._changed:
            stated = self._facts[stage]
            self._changed.wait_for(lambda: len(stated) == len(self._followers))
            del self._facts[stage]
        return stated

    def stated_by_now(self, stage: str) -> list[Facts] | None:
        """Return the facts that the followers have stated at this stage; None until all have."""
        with self._changed:
            stated = self._facts.get(stage, {})
            return list(stated.values()) if len(stated) == len(self._followers) else None

    def on_facts(self, call: Callable[[], None]) -> None:
        """Call a function whenever a follower states facts, on a thread that it must not block."""
        self._on_facts = call

    def _refuse(self, problem: str) -> Never:
        self._heartbeat.stop()
        self._ending = True
        self.order(refused=pb.Refused(problem=problem))
        raise ConfigError(problem)

    def expect_steps(self) -> None:
        """Take a silent host for gone after PATIENCE from now on: loading has ended."""
        self._heartbeat.patience = PATIENCE

    # ---- ends

    def watch(
        self, lost: Callable[[PodFailure], None], evicted: Callable[[str], None], grace: float
    ) -> None:
        """Set the callbacks for the end of the pod.

        `lost` is called with a failure, and the process ends `grace` seconds later. `evicted` is
        called with the reason when a follower's process was asked to end.
        """
        self._on_failure = lost
        self._on_eviction = evicted
        self._heartbeat.grace = grace

    def _failed(self, failure: PodFailure) -> None:
        self._on_failure(failure)
        self._end(failure.exit_code)

    @contextmanager
    def delaying_failure(self) -> Iterator[None]:
        """Delay an exception of the block until a lost host would be noticed and named.

        A step fails when a host is gone; the host's name is the better reason.
        """
        try:
            yield
        except Exception:
            time.sleep(2 * BEAT)
            raise

    def _end(self, code: int) -> None:
        with self._changed:
            if self._ending:
                return
            self._ending = True
        self.order(stop=pb.Stop(exit_code=code))

    def fail(self) -> None:
        """End the pod because this process fails, and wait until the followers are gone.

        If this process ended before a follower, jax would abort that one with a stack trace.
        """
        self._heartbeat.stop()
        self._end(FAILED)
        self._wait_for_ends(LEAVE_AFTER_FAILURE_SECONDS)
        # A stream ends a moment before its process does.
        time.sleep(LEAVE_AFTER_FAILURE_SECONDS / 4)

    def _wait_for_ends(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._left) == len(self._followers), seconds)

    def __enter__(self) -> "Leader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None:
            return self.fail()
        self._end(0)
        self._wait_for_ends(LEAVE_SECONDS)
        self._heartbeat.stop()
        self._server.stop(0)
        jax.distributed.shutdown()


def _difference(mine: Facts, host: int, theirs: Facts) -> str | None:
    return difference(mine, theirs)


def _name(host: int) -> str:
    return f"host {host}"
