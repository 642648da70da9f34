"""A host that follows: it launches the steps that the leader launches, until the pod ends."""

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Literal

import grpc
import jax

from jaxserve.cluster.compatibility import Facts, Judge, compiled_stage, facts_of_steps
from jaxserve.cluster.encoding import buckets_from_proto, plan_from_bytes
from jaxserve.cluster.heartbeat import BEAT, FAILED, PATIENCE, Heartbeat, PodFailure
from jaxserve.cluster.message_auth import MessageChain, proof_of
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.cluster.v1 import cluster_pb2_grpc as rpc
from jaxserve.engine.buckets import Bucket
from jaxserve.engine.device.runner import DeviceRunner, Launched
from jaxserve.errors import ConfigError, EngineError

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
LEADER = "the leader"
FAREWELL_SECONDS = 0.5  # for a reason to reach the leader before this process ends


class Follower:
    """Any host of a pod but the first.

    `address` is that of the leader's control stream, `host` the number of this host, and `exit`
    ends the process. As a context manager it tells the leader of an exception that leaves the
    block.

    Orders arrive on a thread of their own and wait in a queue, which `agree` and `follow` read on
    the main thread.
    """

    leads: Literal[False] = False
    new_runner: Final = DeviceRunner

    def __init__(
        self, address: str, host: int, secret: bytes, exit: Callable[[int], object] = os._exit
    ):
        self.host: Final = host
        self._secret = secret
        self._chain = MessageChain(secret)
        self._outbox: SimpleQueue[pb.FollowRequest | None] = SimpleQueue()
        self._orders: SimpleQueue[pb.Order] = SimpleQueue()
        self._leaving = False  # from then on, the stream's end is no failure
        self._heartbeat = Heartbeat(self._beat, exit=exit)
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._listening = threading.Thread(target=self._listen, name="orders", daemon=True)

    def call(self) -> None:
        """Call the leader and introduce this host; waits until the leader listens."""
        grpc.channel_ready_future(self._channel).result()
        self._send(hello=pb.Hello(host=self.host, proof=proof_of(self._secret, self.host)))
        self._heartbeat.start([LEADER])
        self._listening.start()

    def _send(self, **kind: Any) -> None:
        self._outbox.put(pb.FollowRequest(**kind))

    def _beat(self) -> None:
        self._send(beat=pb.Beat())

    def _listen(self) -> None:
        reason = ""
        # The name keeps the stream alive: gRPC cancels a call that is garbage collected.
        stream = rpc.ClusterServiceStub(self._channel).Follow(iter(self._outbox.get, None))
        try:
            for response in stream:
                self._heartbeat.hear(LEADER)
                if response.number:  # 0 is a heartbeat
                    self._take(response)
        except EngineError as error:
            self._give_up(str(error))
        except grpc.RpcError as error:
            reason = f" ({error.details()})"  # type: ignore[attr-defined]
        if not self._leaving:
            self._heartbeat.fail(PodFailure(f"{LEADER} is gone{reason}"))

    def _take(self, response: pb.FollowResponse) -> None:
        self._chain.check(response.number, response.order, response.digest)
        order = pb.Order.FromString(response.order)
        if self._leaving:
            return
        if order.stop.exit_code:
            # Not through the queue: the main thread may wait for ever in a step for another host,
            # and would otherwise end the process first, with an exit code of its own.
            self._leaving = True
            self._heartbeat.fail(PodFailure(f"{LEADER} has ended the pod", order.stop.exit_code))
            return
        if order.WhichOneof("kind") in ("refused", "stop"):
            self._leaving = True
            self._heartbeat.stop()
        self._orders.put(order)

    def _give_up(self, reason: str) -> None:
        self._leaving = True
        self._send(farewell=pb.Farewell(exit_code=FAILED, reason=reason))
        time.sleep(FAREWELL_SECONDS)
        self._heartbeat.fail(PodFailure(reason))

    # ---- to the leader

    def told(self, value: Callable[[], str]) -> str:
        """Wait for the value that host 0 tells, and return it; `value` is called there alone."""
        return self._next_order().told.value

    def all_same(self, stage: str, value: Callable[[], str]) -> bool:
        """Return whether all hosts give one value that is not empty; each of them calls it."""
        self._state(stage, {stage: value()})
        return bool(self._next_order().told.value)

    def agree(self, stage: str, facts: Callable[[], Facts], judge: Judge | None = None) -> None:
        """State this host's facts and wait until all hosts agree.

        Args:
            judge: Function that is called on the leader alone.

        Raises:
            ConfigError: The facts differ.
        """
        self._state(stage, facts())
        self._next_order()

    def _state(self, stage: str, facts: Facts) -> None:
        self._send(facts=pb.Facts(stage=stage, names=list(facts), values=list(facts.values())))

    def _state_compiled(self, bucket: Bucket, is_compiled: bool) -> None:
        problem = {} if is_compiled else {"problem": "it was not compiled"}
        self._state(compiled_stage(bucket), problem)

    def _next_order(self) -> pb.Order:
        """Wait for an order before the steps; an error is raised if it ends the pod."""
        order = self._orders.get()
        match order.WhichOneof("kind"):
            case "refused":
                raise ConfigError(order.refused.problem)
            case "stop":
                raise EngineError(f"{LEADER} has ended the pod")
        return order

    def leave(self) -> None:
        """Tell the leader that this process was asked to end: it then drains and ends the pod."""
        self._send(farewell=pb.Farewell(reason="SIGTERM"))

    # ---- from the leader

    def follow(self, runner: DeviceRunner) -> int:
        """Launch the leader's steps until it ends the pod; return the exit code.

        This host runs one step ahead of its devices, as the leader does: step n is complete before
        step n + 2 is launched.
        """
        before: Launched | None = None
        while True:
            order = self._orders.get()
            match order.WhichOneof("kind"):
                case "compile":
                    buckets = buckets_from_proto(order.compile)
                    runner.warm_up(buckets)
                    self.agree("compiled", partial(facts_of_steps, buckets))
                    self._heartbeat.patience = PATIENCE
                    # What exists by now stays to the end. Frozen, it is not walked by full
                    # garbage collections between two steps.
                    gc.freeze()
                case "compile_beside":
                    buckets = buckets_from_proto(order.compile_beside)
                    runner.compile_in_background(buckets, on_end=self._state_compiled)
                case "install":
                    buckets = buckets_from_proto(order.install)
                    self._with_all(partial(runner.install_all, buckets))
                case "plan":
                    before = self._launch(runner, order.plan, before)
                case "stop":
                    return order.stop.exit_code

    def _launch(self, runner: DeviceRunner, plan: bytes, before: Launched | None) -> Launched:
        def launch() -> Launched:
            launched = runner.launch(plan_from_bytes(plan))
            if before:
                before.output.block_until_ready()
            return launched

        return self._with_all(launch)

    def _with_all[T](self, launch: Callable[[], T]) -> T:
        """Launch what all hosts launch, and tell the leader if that fails."""
        try:
            return launch()
        except Exception as error:
            traceback.print_exc()
            # A step fails on every host when one is gone. The leader then ends the pod within two
            # heartbeats and names that host, which is the better reason.
            time.sleep(2 * BEAT)
            self._give_up(f"a step failed: {error}")
            raise

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not self._leaving:
            self._send(farewell=pb.Farewell(exit_code=FAILED, reason=str(error)))
        self._leaving = True
        self._heartbeat.stop()
        self._outbox.put(None)
        self._listening.join(2 * BEAT)
        if error is None:
            jax.distributed.shutdown()
