"""Heartbeats: every host says each second that it lives, and none outlives a host of its pod for
long.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FAILED = 70  # sysexits.h: an internal software error; a supervisor starts the pod again
BEAT = 1.0  # seconds between two heartbeats
PATIENCE = 5.0  # seconds without one
# The same while weights are loaded and steps compiled: nobody waits for an answer then, and a
# library that converts a large array may keep every other thread of its process waiting.
LOADING_PATIENCE = 60.0


@dataclass(frozen=True)
class Loss:
    """Why the pod ends, in one line, and with which exit code."""

    reason: str
    exit_code: int = FAILED


def say(loss: Loss) -> None:
    print(f"error: {loss.reason}", file=sys.stderr, flush=True)


class Pulse:
    """Watches the peers from a thread of its own, and ends the process from there when one is lost.

    Whatever else the process does may hang: a collective whose peer has gone cannot be interrupted.
    send: sends a heartbeat to every peer, and returns at once. lost: told of the loss; `grace`
    seconds later the process ends.
    """

    def __init__(
        self,
        send: Callable[[], None],
        lost: Callable[[Loss], None] = say,
        grace: float = 0.0,
        exit: Callable[[int], object] = os._exit,
    ):
        self.lost, self.grace = lost, grace
        self.patience = LOADING_PATIENCE
        self._send, self._exit = send, exit
        self._heard: dict[str, float] = {}
        self._loss: Loss | None = None
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self, peers: Iterable[str]) -> None:
        for peer in peers:
            self.hear(peer)
        self._thread.start()

    def hear(self, peer: str) -> None:
        """A message of this peer has come."""
        self._heard[peer] = time.monotonic()

    def lose(self, loss: Loss) -> None:
        """End the process; the first loss is the one that is told. From any thread; returns at
        once.
        """
        self._loss = self._loss or loss
        self._woken.set()

    def stop(self) -> None:
        """Nobody is missed any more; a loss that is known ends the process all the same."""
        self._woken.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._woken.wait(BEAT):
            self._send()
            before, last = last, time.monotonic()
            late = [
                peer for peer, heard in list(self._heard.items()) if last - heard > self.patience
            ]
            if (
                late and last - before < 2 * BEAT
            ):  # a process that was itself stopped meanwhile cannot tell
                self._loss = Loss(f"{late[0]} has sent no heartbeat for {self.patience:g} s")
                break
        if self._loss:
            try:
                self.lost(self._loss)
            finally:
                time.sleep(self.grace)
                self._exit(self._loss.exit_code)
