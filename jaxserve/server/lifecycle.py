"""From an empty process to a server that is ready, and from there to its end.

loading --(every step compiled)--> ready --(SIGTERM, SIGINT, Drain)--> draining --> exit 0 any of
them --(the engine or a listener failed, or a step hangs)--> exit 70, for a supervisor to start it
again
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from jaxserve.errors import DrainingError, RestartingError
from jaxserve.server.readiness import Phase, Readiness
from jaxserve.server.serving_state import ServingState

FAILED = 70  # sysexits.h: an internal software error
GRACE = 1.0  # seconds for statuses to reach their clients
log = logging.getLogger(__name__)


@dataclass
class Lifecycle:
    """Runs a server on the event loop that it is made on. Times are seconds.

    stop_listening: closes the servers within the seconds that it is given. exit: ends the process
    at once. leaving: what other servers fetch with new calls, which have to be taken until it is
    fetched; see Role.
    """

    readiness: Readiness
    stop_listening: Callable[[float], Awaitable[None]]
    drain_timeout: float = 30.0
    step_timeout: float = 60.0
    exit: Callable[[int], object] = os._exit
    leaving: Callable[[], int] = lambda: 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _failure: BaseException | None = None

    def drain(self) -> None:
        """Begin to end: no new requests; those that run may finish."""
        self.readiness.set_draining()
        self._stop.set()

    def fail(self, error: BaseException) -> None:
        """The engine, or a listener, is lost: everybody is told, and the process ends."""
        if self._failure is None:
            log.critical("the server has failed", exc_info=error)
            self._failure = error
            self.readiness.set_failed()
            self._stop.set()

    def watch_signals(self) -> None:
        """The first SIGTERM or SIGINT drains, the second ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.readiness.phase is Phase.LOADING or self._stop.is_set():
            log.warning("ended by %s", number.name)
            self.exit(0 if self.readiness.phase is Phase.LOADING else 128 + number)
        log.info("draining after %s, for %g s at most", number.name, self.drain_timeout)
        self.drain()

    async def run(self, load: Callable[[], ServingState]) -> int:
        """Load, serve until told to stop, drain; returns the exit code. What `load` raises passes
        through.
        """
        served = await self._loaded(load)
        for thread in served.threads:
            thread.start()
        self.readiness.set_ready(served)
        watching = asyncio.create_task(self._watch(served))
        await self._stop.wait()
        until = time.monotonic() + self.drain_timeout
        if self._failure is None:
            await self._finish_requests(served, until)
        watching.cancel()
        if self._failure is not None:
            return await self._die(served)
        await self.stop_listening(
            max(GRACE, until - time.monotonic())
        )  # long answers may still be on their way
        for service in served.services:
            service.close()
        if not all([thread.close() for thread in served.threads]):
            log.error("the engine's step did not end")
            return FAILED
        return 0

    async def _loaded(self, load: Callable[[], ServingState]) -> ServingState:
        """What load returns; told to stop meanwhile, the process ends: a compiler cannot be
        interrupted.
        """
        loading = asyncio.create_task(asyncio.to_thread(load))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._stop.is_set():
            log.warning("told to end while loading")
            await self.stop_listening(GRACE)
            self.exit(0)
        return await loading

    async def _finish_requests(self, served: ServingState, until: float) -> None:
        """Until nothing runs, or the time is over, or the engine fails meanwhile."""
        while time.monotonic() < until and self._busy(served) and self._failure is None:
            await asyncio.sleep(min(0.05, self.drain_timeout))
        if served.service.in_flight and self._failure is None:
            log.warning("%d requests did not finish in time", served.service.in_flight)
            served.service.fail_all(
                DrainingError(f"the server ends; --drain-timeout {self.drain_timeout:g} has passed")
            )

    def _busy(self, served: ServingState) -> bool:
        return bool(served.service.in_flight or self.leaving())

    async def _die(self, served: ServingState) -> int:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        served.service.fail_all(
            RestartingError("the engine has failed; the server restarts (try again soon)")
        )
        await self.stop_listening(GRACE)
        return FAILED

    async def _watch(self, served: ServingState) -> None:
        """A step that does not end is a device that died."""
        while True:
            await asyncio.sleep(min(1.0, self.step_timeout / 4))
            if max(thread.stuck_for for thread in served.threads) > self.step_timeout:
                self.fail(
                    TimeoutError(f"a step takes longer than --step-timeout {self.step_timeout:g} s")
                )
