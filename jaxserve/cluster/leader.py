"""The host that plans: it listens for the followers, compares what they run with, and sends them
every step.
"""

import hmac
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Never

import grpc
import jax

from jaxserve.cluster.compatibility import Facts, difference, facts_of_steps
from jaxserve.cluster.encoding import buckets_to_proto, plan_to_proto
from jaxserve.cluster.heartbeat import BEAT, FAILED, PATIENCE, Loss, Pulse, say
from jaxserve.cluster.message_auth import Chain, proof_of
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.cluster.v1 import cluster_pb2_grpc as rpc
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.executables import Progress
from jaxserve.engine.device.runner import DeviceRunner, Launched
from jaxserve.engine.plan import StepOutput, StepPlan
from jaxserve.errors import ConfigError

# A plan of long penalised prompts has megabytes; what followers say is short, and whoever else
# calls has the default.
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
STRANGERS = 8  # threads for calls that turn out not to be a follower's
FAREWELL = 5.0  # seconds that followers have to leave, once they were told to
FLIGHT = 2.0  # the same when the leader fails

Outbox = SimpleQueue[pb.FollowResponse | None]


class Leader(rpc.ClusterServiceServicer):
    """Host 0. A context: leaving it ends the pod, in order if no exception is what ends it.

    hosts: of the pod, this one included. port: of the control stream; 0: any, see `port`. exit:
    ends the process.
    """

    leads: Literal[True] = True

    def __init__(
        self, hosts: int, port: int, secret: bytes, exit: Callable[[int], object] = os._exit
    ):
        self._followers = range(1, hosts)
        self._secret, self._chain = secret, Chain(secret)
        self._changed = threading.Condition()  # of everything below, and of the chain
        self._outboxes: dict[int, Outbox] = {}
        self._left: set[int] = set()
        self._facts: dict[str, dict[int, dict[str, str]]] = defaultdict(dict)
        self._ending = False
        self._pulse = Pulse(self._beat, self._lost, exit=exit)
        self._on_loss: Callable[[Loss], None] = say
        self._on_eviction: Callable[[str], None] = lambda reason: self._pulse.lose(Loss(reason))
        self._server = grpc.server(ThreadPoolExecutor(hosts + STRANGERS), options=OPTIONS)
        rpc.add_ClusterServiceServicer_to_server(self, self._server)
        try:
            self.port: int = self._server.add_insecure_port(f"[::]:{port}")
        except RuntimeError:
            raise ConfigError(f"--control-port {port}: cannot listen (is it taken?)") from None
        self.new_runner = partial(LeadingRunner, self)

    # ---- the followers

    def wait_for_followers(self) -> None:
        """Until all of them have called."""
        self._server.start()
        with self._changed:
            self._changed.wait_for(lambda: len(self._outboxes) == len(self._followers))
        self._pulse.start(map(_name, self._followers))

    def Follow(
        self, request_iterator: Iterator[pb.FollowRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.FollowResponse]:
        """One follower's stream, for as long as there is a pod."""
        hello = next(request_iterator).hello
        if not hmac.compare_digest(hello.proof, proof_of(self._secret, hello.host)):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the proof is not one of this pod")
        with self._changed:
            if hello.host not in self._followers or hello.host in self._outboxes:
                context.abort(
                    grpc.StatusCode.ALREADY_EXISTS,
                    f"host {hello.host} is here, or none of this pod",
                )
            outbox = self._outboxes[hello.host] = SimpleQueue()
            self._changed.notify_all()
        listening = threading.Thread(
            target=self._listen, args=(hello.host, request_iterator), daemon=True
        )
        listening.start()
        yield from iter(outbox.get, None)

    def _listen(self, host: int, requests: Iterator[pb.FollowRequest]) -> None:
        try:
            for request in requests:
                self._pulse.hear(_name(host))
                self._take(host, request)
        except Exception as error:  # what a broken stream raises here is gRPC's own affair
            reason = f" ({error})" if str(error) else ""
        else:
            reason = ""
        with self._changed:
            self._left.add(host)
            self._changed.notify_all()
            ending = self._ending
        self._outboxes[host].put(None)
        if not ending:
            self._pulse.lose(Loss(f"{_name(host)} is gone{reason}"))

    def _take(self, host: int, request: pb.FollowRequest) -> None:
        match request.WhichOneof("kind"):
            case "facts":
                facts = request.facts
                with self._changed:
                    self._facts[facts.stage][host] = dict(
                        zip(facts.names, facts.values, strict=True)
                    )
                    self._changed.notify_all()
            case "farewell" if self._ending:
                pass
            case "farewell" if request.farewell.exit_code:
                reason = f"{_name(host)} has ended: {request.farewell.reason}"
                self._pulse.lose(Loss(reason, request.farewell.exit_code))
            case "farewell":
                self._on_eviction(f"{_name(host)} is told to end: {request.farewell.reason}")

    def _beat(self) -> None:
        for outbox in list(self._outboxes.values()):
            outbox.put(pb.FollowResponse())

    # ---- orders

    def order(self, **kind: Any) -> None:
        """The same order for all, after those before it. One field of pb.Order."""
        order = pb.Order(**kind).SerializeToString()
        with self._changed:
            number, digest = self._chain.add(order)
            response = pb.FollowResponse(number=number, order=order, digest=digest)
            for outbox in self._outboxes.values():
                outbox.put(response)

    def agree(self, stage: str, facts: Callable[[], Facts]) -> None:
        """Until every host has stated its facts at this stage; ConfigError, on all hosts, when they
        differ.
        """
        with self._changed:
            stated = self._facts[stage]
            self._changed.wait_for(lambda: len(stated) == len(self._followers))
            del self._facts[stage]
        mine = facts()
        for host, theirs in sorted(stated.items()):
            if problem := difference(mine, theirs):
                self._refuse(f"{_name(host)} differs from the leader in {problem}")
        self.order(agreed=pb.Agreed(stage=stage))

    def _refuse(self, problem: str) -> Never:
        self._pulse.stop()
        self._ending = True
        self.order(refused=pb.Refused(problem=problem))
        raise ConfigError(problem)

    def serves(self) -> None:
        """Steps follow: from now on a host is missed soon."""
        self._pulse.patience = PATIENCE

    # ---- ends

    def watch(
        self, lost: Callable[[Loss], None], evicted: Callable[[str], None], grace: float
    ) -> None:
        """lost: told that a host is gone; the process ends `grace` seconds later. evicted: that one
        is told to end.
        """
        self._on_loss, self._on_eviction, self._pulse.grace = lost, evicted, grace

    def _lost(self, loss: Loss) -> None:
        self._on_loss(loss)
        self._end(loss.exit_code)

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Around what fails if a host is gone: it is missed, and named, before the failure itself
        is.
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
        """Send the followers away, since this process fails; afterwards they are gone.

        Should this process end before one of them, jax would abort that one with a stack trace.
        """
        self._pulse.stop()
        self._end(FAILED)
        self._wait_for_ends(FLIGHT)
        time.sleep(FLIGHT / 4)

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
        self._wait_for_ends(FAREWELL)
        self._pulse.stop()
        self._server.stop(0)
        jax.distributed.shutdown()


class LeadingRunner(DeviceRunner):
    """The leader's runner: what it compiles and launches, the followers are told before."""

    def __init__(self, leader: Leader, *args: Any):
        super().__init__(*args)
        self._leader = leader

    def warm_up(
        self, buckets: Iterable[Bucket], progress: Progress = lambda done, total, what: None
    ) -> None:
        """Compile these steps on every host."""
        buckets = tuple(buckets)
        if self.executables.has(buckets):
            return
        self._leader.order(compile=buckets_to_proto(buckets))
        super().warm_up(buckets, progress)
        self._leader.agree("compiled", partial(facts_of_steps, buckets))
        self._leader.serves()

    def launch(self, plan: StepPlan) -> Launched:
        self._leader.order(plan=plan_to_proto(plan))
        with self._leader.blaming():
            return super().launch(plan)

    def collect(self, plan: StepPlan, handle: Launched) -> StepOutput:
        with self._leader.blaming():
            return super().collect(plan, handle)


def _name(host: int) -> str:
    return f"host {host}"
