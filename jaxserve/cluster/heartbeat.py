"""Heartbeats: no host of a pod outlives another for long.

A collective operation waits for ever for a host that is gone, and cannot be interrupted. So every
host sends a heartbeat each second, and ends its process when one of another host stays out.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FAILED = 70  # sysexits.h: an internal software error; a supervisor starts the pod again
BEAT = 1.0  # seconds between two heartbeats
PATIENCE = 5.0  # seconds without a heartbeat after which a host is taken for gone
# Longer while weights are loaded and steps compiled: no client waits for an answer then, and a
# library that converts a large array may keep every other thread of its process waiting.
LOADING_PATIENCE = 60.0


@dataclass(frozen=True)
class PodFailure:
    """The reason why the pod ends, in one line, and the process's exit code."""

    reason: str
    exit_code: int = FAILED


def print_failure(failure: PodFailure) -> None:
    print(f"error: {failure.reason}", file=sys.stderr, flush=True)


class Heartbeat:
    """Sends heartbeats and watches those of the peers; ends the process when a peer is lost.

    It has a thread of its own, because every other thread may hang. `send` sends a heartbeat to
    every peer and returns at once. `failed` is called with a failure; the process ends `grace`
    seconds later.
    """

    def __init__(
        self,
        send: Callable[[], None],
        failed: Callable[[PodFailure], None] = print_failure,
        grace: float = 0.0,
        exit: Callable[[int], object] = os._exit,
    ):
        self.grace = grace
        self.patience = LOADING_PATIENCE
        self._send = send
        self._failed = failed
        self._exit = exit
        self._heard: dict[str, float] = {}  # when a message of each peer came last
        self._failure: PodFailure | None = None
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self, peers: Iterable[str]) -> None:
        for peer in peers:
            self.hear(peer)
        self._thread.start()

    def hear(self, peer: str) -> None:
        """Note that a message of this peer has come."""
        self._heard[peer] = time.monotonic()

    def fail(self, failure: PodFailure) -> None:
        """End the process from the heartbeat's thread; for any thread, returns at once.

        The first of several failures is the one that is reported.
        """
        self._failure = self._failure or failure
        self._woken.set()

    def stop(self) -> None:
        """Stop watching the peers; a failure that is known ends the process all the same."""
        self._woken.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._woken.wait(BEAT):
            self._send()
            before = last
            last = time.monotonic()
            silent = [
                peer for peer, heard in list(self._heard.items()) if last - heard > self.patience
            ]
            # After a longer pause this process was itself stopped (a debugger, a suspended
            # machine), and messages of the peers wait to be read.
            was_running = last - before < 2 * BEAT
            if silent and was_running:
                self._failure = PodFailure(
                    f"{silent[0]} has sent no heartbeat for {self.patience:g} s"
                )
                break
        if self._failure:
            try:
                self._failed(self._failure)
            finally:
                time.sleep(self.grace)
                self._exit(self._failure.exit_code)
