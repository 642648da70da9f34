"""A host that follows: it states its facts, then launches what the leader launches until it is sent
away.
"""

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

from jaxserve.cluster.compatibility import Facts, facts_of_steps
from jaxserve.cluster.encoding import buckets_from_proto, plan_from_proto
from jaxserve.cluster.heartbeat import BEAT, FAILED, PATIENCE, Loss, Pulse
from jaxserve.cluster.message_auth import Chain, proof_of
from jaxserve.cluster.v1 import cluster_pb2 as pb
from jaxserve.cluster.v1 import cluster_pb2_grpc as rpc
from jaxserve.engine.device.runner import DeviceRunner, Launched
from jaxserve.errors import ConfigError, EngineError

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
LEADER = "the leader"
FAREWELL = 0.5  # seconds for a reason to reach it


class Follower:
    """Any other host. A context: leaving it by an exception tells the leader of it.

    address: of the leader's control stream. host: this one's number. exit: ends the process.
    """

    leads: Literal[False] = False
    new_runner: Final = DeviceRunner

    def __init__(
        self, address: str, host: int, secret: bytes, exit: Callable[[int], object] = os._exit
    ):
        self._host, self._secret, self._chain = host, secret, Chain(secret)
        self._outbox: SimpleQueue[pb.FollowRequest | None] = SimpleQueue()
        self._orders: SimpleQueue[pb.Order] = SimpleQueue()
        self._leaving = False  # whatever comes then is not missed
        self._pulse = Pulse(self._beat, exit=exit)
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._listening = threading.Thread(target=self._listen, name="orders", daemon=True)

    def call(self) -> None:
        """Call the leader, which may still be on its way."""
        grpc.channel_ready_future(self._channel).result()
        self._send(hello=pb.Hello(host=self._host, proof=proof_of(self._secret, self._host)))
        self._pulse.start([LEADER])
        self._listening.start()

    def _send(self, **kind: Any) -> None:
        self._outbox.put(pb.FollowRequest(**kind))

    def _beat(self) -> None:
        self._send(beat=pb.Beat())

    def _listen(self) -> None:
        reason = ""
        stream = rpc.ClusterServiceStub(self._channel).Follow(
            iter(self._outbox.get, None)
        )  # ends if it is forgotten
        try:
            for response in stream:
                self._pulse.hear(LEADER)
                if response.number:
                    self._take(response)
        except EngineError as error:
            self._give_up(str(error))
        except grpc.RpcError as error:
            reason = f" ({error.details()})"  # type: ignore[attr-defined]
        if not self._leaving:
            self._pulse.lose(Loss(f"{LEADER} is gone{reason}"))

    def _take(self, response: pb.FollowResponse) -> None:
        self._chain.check(response.number, response.order, response.digest)
        order = pb.Order.FromString(response.order)
        if self._leaving:
            return
        if order.stop.exit_code:  # a step that runs here may wait for another host for ever
            self._pulse.lose(Loss(f"{LEADER} has ended the pod", order.stop.exit_code))
        if order.WhichOneof("kind") in ("refused", "stop"):
            self._leaving = True
            self._pulse.stop()
        self._orders.put(order)

    def _give_up(self, reason: str) -> None:
        self._leaving = True
        self._send(farewell=pb.Farewell(exit_code=FAILED, reason=reason))
        time.sleep(FAREWELL)
        self._pulse.lose(Loss(reason))

    # ---- what the program says

    def agree(self, stage: str, facts: Callable[[], Facts]) -> None:
        """State this host's facts and wait until all hosts have; ConfigError when they are not the
        same.
        """
        mine = facts()
        self._send(facts=pb.Facts(stage=stage, names=list(mine), values=list(mine.values())))
        order = self._orders.get()
        match order.WhichOneof("kind"):
            case "refused":
                raise ConfigError(order.refused.problem)
            case "stop":
                raise EngineError(f"{LEADER} has ended the pod")

    def leave(self) -> None:
        """This process is told to end: the leader is to drain first."""
        self._send(farewell=pb.Farewell(reason="SIGTERM"))

    # ---- what the leader says

    def follow(self, runner: DeviceRunner) -> int:
        """Launch what the leader launches until it ends the pod; the exit code it ends with.

        As the leader does, one step ahead of the devices: step n is complete before n + 2 is
        launched.
        """
        before: Launched | None = None
        while True:
            order = self._orders.get()
            match order.WhichOneof("kind"):
                case "compile":
                    buckets = buckets_from_proto(order.compile)
                    runner.warm_up(buckets)
                    self.agree("compiled", partial(facts_of_steps, buckets))
                    self._pulse.patience = PATIENCE
                    # what is there stays: full collections need not walk it between two steps
                    gc.freeze()
                case "plan":
                    before = self._launch(runner, order.plan, before)
                case "stop":
                    return order.stop.exit_code

    def _launch(self, runner: DeviceRunner, plan: pb.StepPlan, before: Launched | None) -> Launched:
        try:
            launched = runner.launch(plan_from_proto(plan))
            if before:
                before.output.block_until_ready()
        except Exception as error:
            traceback.print_exc()
            time.sleep(2 * BEAT)  # where another host is gone, the leader has the better reason
            self._give_up(f"a step failed: {error}")
            raise
        return launched

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not self._leaving:
            self._send(farewell=pb.Farewell(exit_code=FAILED, reason=str(error)))
        self._leaving = True
        self._pulse.stop()
        self._outbox.put(None)
        self._listening.join(2 * BEAT)
        if error is None:
            jax.distributed.shutdown()
