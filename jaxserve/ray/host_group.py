"""One engine over several hosts of a Ray cluster, which is started again after a host was lost."""

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Self
from urllib.parse import urlsplit

import ray
from ray.exceptions import RayError

from jaxserve.cli.exits import BAD_INPUT
from jaxserve.errors import ConfigError, EngineError
from jaxserve.ray.host_process import Ended
from jaxserve.ray.host_program import HostProgram
from jaxserve.ray.placement import NotWantedError, Place, PlacedHosts
from jaxserve.ray.program_ends import ProgramEnds, first_line, lost

START_TRIES = 3  # in a row, of a program that ends before it is ready
POLL_SECONDS = 0.2
OTHERS_SECONDS = 15.0  # for the other hosts to notice that one is gone
TERM_SECONDS = 60.0  # from SIGTERM to SIGKILL
STOP_SECONDS = 10.0  # for the actors to say that the program has ended
KILL_SECONDS = 2.0  # for the group's thread to give the hosts back
RESERVE_SECONDS = 1.0  # between two tries to reserve hosts
LONG_SECONDS = 300.0  # of a program that is no server, after which its failure is not its start's
CANNOT_LISTEN = "nothing can listen on"  # in the error of a server whose port is taken
log = logging.getLogger(__name__)


class HostGroup:
    """A jaxserve program that runs on one host, or as one engine on several.

    A thread of this process watches it. When a host is lost, the program ends with exit code 70 on
    the others, and all are started again: on the same hosts if those are there, else on new ones.
    After exit code 2, which says that it cannot be done, it is never started again, and neither is
    what ends three times in a row before it is ready (or within five minutes, if it is no server).
    A server that nobody has closed is started again after exit code 0 as well.

    Args:
        arguments: Program and arguments, as behind `jaxserve` in a shell: ["serve", "org/name",
            "--tensor", "8"]. Flags that say which hosts there are belong to the group. A server
            without --http-port takes a free port, and one without --token-file a random token.
        place: Hosts on which it runs.
        environment: Variables for the processes, beside those of Ray's workers.

    Attributes:
        token: Token that the server asks for; empty where the arguments have --token-file.
        starts: How often the program was started.

    Raises:
        ConfigError: An argument is for the group to say.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        place: Place | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        self._program = HostProgram(tuple(arguments))
        self.token = secrets.token_urlsafe() if self._program.wants_token else ""
        self._place = place or Place()
        self._environment = dict(environment or {})
        self.starts = 0
        self._hosts: PlacedHosts | None = None
        self._closing = threading.Event()
        self._killed = threading.Event()
        self._changed = threading.Condition()
        self._url = ""  # of the server while it is ready
        self._has_ended = False
        self._error: Exception | None = None  # why it has ended
        self._thread = threading.Thread(target=self._run, name="host group", daemon=True)
        self._thread.start()

    # ---- for any thread

    def ready(self, timeout: float | None = None) -> str:
        """Wait until the server takes requests, and return its address as http://HOST:PORT.

        Args:
            timeout: Seconds to wait; None waits until it is ready or has ended.

        Raises:
            ConfigError: It cannot be done: exit code 2, no such hosts in the cluster, or the
                program is no server.
            EngineError: It has failed several times in a row, or has ended.
            TimeoutError: The time is over.
        """
        if not self._program.serves:
            raise ConfigError("the program of this group is no server; call wait instead of ready")
        with self._changed:
            self._changed.wait_for(lambda: self._url or self._has_ended, timeout)
            if self._url:
                return self._url
            if self._error:
                raise self._error
            if self._has_ended:
                raise EngineError("the server has ended")
            raise TimeoutError(f"the server is not ready after {timeout:g} s")

    @property
    def url(self) -> str:
        """Address of the server while it is ready; empty otherwise."""
        return self._url

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the program has ended in order on all hosts.

        Args and errors as `ready` has them.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_ended, timeout):
                raise TimeoutError(f"the program still runs after {timeout:g} s")
            if self._error:
                raise self._error

    def close(self) -> None:
        """End the program, with SIGTERM at first, and give the hosts back."""
        self._closing.set()
        self._thread.join()

    def kill(self) -> None:
        """End the program with SIGKILL and give the hosts back, without a reply of their actors.

        For an actor that Ray is about to end: `close` would wait for replies of other actors, which
        no longer come, and a thread that still calls Ray then makes it abort.
        """
        self._killed.set()
        self._closing.set()
        self._thread.join(KILL_SECONDS)
        if self._thread.is_alive() and self._hosts:
            self._hosts.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- for the thread of the group

    def _run(self) -> None:
        error = None
        try:
            with suppress(NotWantedError):
                self._run_until_done()
        except Exception as failure:
            error = failure
            log.error("%s", error)
        try:
            if self._hosts:
                self._hosts.free()
        finally:
            with self._changed:
                self._error = error
                self._url = ""
                self._has_ended = True
                self._changed.notify_all()

    def _tell(self, url: str) -> None:
        with self._changed:
            self._url = url
            self._changed.notify_all()

    def _run_until_done(self) -> None:
        """Run the program, again and again, until it has ended in order or cannot be run."""
        failed = 0  # starts in a row
        while not self._closing.is_set():
            hosts = self._placed()
            was_ready, ends = self._run_once(hosts)
            self._tell("")
            # A server that nobody has closed was ended by its node, as before maintenance.
            in_order = not self._program.serves and not any(end.code for end in ends)
            if self._closing.is_set() or in_order:
                return
            failed = 0 if was_ready else failed + 1
            self._check_ends(ends, failed, hosts.addresses)

    def _placed(self) -> PlacedHosts:
        """Return hosts that live: those of before, or new ones."""
        if self._hosts and not self._hosts.alive:
            log.warning("a host is gone; asking the cluster for another one")
            self._hosts.free()
            self._hosts = None
        until = time.monotonic() + self._place.seconds
        while not self._hosts:
            try:
                self._hosts = PlacedHosts(self._place, until, self._closing)
            except RayError as error:
                problem = f"hosts could not be reserved: {first_line(error)}"
                log.warning("%s", problem)
                if self._closing.wait(RESERVE_SECONDS):
                    raise NotWantedError from None
                if time.monotonic() > until or not ray.is_initialized():
                    raise EngineError(problem) from None
        return self._hosts

    def _run_once(self, hosts: PlacedHosts) -> tuple[bool, list[Ended]]:
        """Run the program until it has ended everywhere.

        Returns whether it was ready, and its end on every host.
        """
        try:
            url = self._start(hosts)
        except RayError as error:  # it has not been started everywhere
            self._stop(hosts)
            return False, [lost(error)]
        ends = ProgramEnds(hosts.actors)
        was_ready = self._watch(ends, url)
        if self._killed.is_set():
            raise NotWantedError
        self._wait_for_others(ends)
        self._stop(hosts)
        return was_ready, ends.at_last()

    def _start(self, hosts: PlacedHosts) -> str:
        """Start the program on all hosts, and return the address of its server to come."""
        self.starts += 1
        free = ray.get(hosts.actors[0].free_ports.remote(3))
        starts = []
        for number, actor in enumerate(hosts.actors):
            arguments = self._program.of_host(number, hosts.addresses, free)
            token = self.token if number == 0 else ""
            starts.append(actor.start.remote(arguments, self._environment, token))
        ray.get(starts)
        log.info("started on %s", ", ".join(hosts.addresses))
        return self._program.url(hosts.addresses[0], free[2]) if self._program.serves else ""

    def _watch(self, ends: ProgramEnds, url: str) -> bool:
        """Wait until the program ends on a host or the group is closed.

        Returns whether it got under way: the server was ready, or another program ran for long.
        """
        was_ready = False
        began = time.monotonic()
        while not self._closing.is_set():
            if not ray.is_initialized():
                raise EngineError("Ray was shut down while the group was open; close it first")
            known = ends.look()
            # A program ends in order on one host after the other.
            if any(end and end.code for end in known) or all(known):
                break
            if url and not was_ready and _is_ready(url):
                was_ready = True
                log.info("ready at %s", url)
                self._tell(url)
            self._closing.wait(POLL_SECONDS)
        return was_ready or (not url and time.monotonic() - began > LONG_SECONDS)

    def _wait_for_others(self, ends: ProgramEnds) -> None:
        """Wait a while for ends of their own on the other hosts, which say more than SIGKILL."""
        until = time.monotonic() + OTHERS_SECONDS
        while time.monotonic() < until and not all(ends.look()):
            if self._closing.wait(POLL_SECONDS):
                return

    def _stop(self, hosts: PlacedHosts) -> None:
        seconds = TERM_SECONDS if self._closing.is_set() else 0.0
        stops = [actor.stop.remote(seconds) for actor in hosts.actors]
        # A host that is lost does not answer; its actor is killed when the hosts are given back.
        ray.wait(stops, num_returns=len(stops), timeout=seconds + STOP_SECONDS)

    def _check_ends(self, ends: Sequence[Ended], failed: int, addresses: Sequence[str]) -> None:
        """Log how the program ended, and raise the error of one that is not started again."""
        named = [
            (f"host {number} ({address})", end)
            # Where the program was not started everywhere there is one end only.
            for number, (address, end) in enumerate(zip(addresses, ends, strict=False))
        ]
        named.sort(key=lambda pair: pair[1].code == 0)  # failures first
        for host, end in named:
            log.warning("%s ended with exit code %d: %s", host, end.code, end.reason)
        for host, end in named:
            # A port of the group's own choice that somebody else has taken since is no mistake.
            if end.code == BAD_INPUT and CANNOT_LISTEN not in end.reason:
                raise ConfigError(f"{host}: {end.reason}")
        if failed == START_TRIES:
            host, end = named[0]
            raise EngineError(
                f"{host} ended with exit code {end.code} before it was ready, {failed} times in a "
                f"row: {end.reason}"
            )


def _is_ready(url: str) -> bool:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=1.0)
    with closing(connection), suppress(OSError, HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == HTTPStatus.OK
    return False
