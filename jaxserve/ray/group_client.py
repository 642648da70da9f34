"""Client of a group of hosts, which waits while they are started again."""

import asyncio
import logging
from contextlib import suppress

import httpx

from jaxserve.generate.batch_format import BatchRequest, answer_line, failure_line
from jaxserve.ray.host_group import HostGroup

STARTS = 5  # of the server, in which a request is tried; it may be what ends the engine
FIRST_WAIT = 0.1  # seconds until a request is tried again
LONGEST_WAIT = 5.0  # seconds; each wait is twice the one before
LOOK_SECONDS = 1.0  # between two looks whether the server of a request is still there
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)
log = logging.getLogger(__name__)


class GroupClient:
    """Sends requests to the server of a group of hosts.

    Args:
        group: Group that serves.
    """

    def __init__(self, group: HostGroup):
        self._group = group
        self._headers = {"content-type": "application/json"}
        if group.token:
            self._headers["authorization"] = f"Bearer {group.token}"
        # Addresses of hosts are those within the cluster, which no proxy of the environment knows.
        self._http = httpx.AsyncClient(timeout=None, limits=UNLIMITED, trust_env=False)
        self._asking = asyncio.Lock()

    async def answer(self, request: BatchRequest) -> bytes:
        """Return the line of the answer to a request, an error included.

        Raises:
            ConfigError: The server was started again, which cannot be done.
            EngineError: The server has failed several times in a row.
        """
        starts: set[int] = set()
        wait = FIRST_WAIT
        while True:
            url = await self._url()
            starts.add(self._group.starts)
            if len(starts) > STARTS:
                problem = f"the engine was lost {STARTS} times while it worked on this request"
                return failure_line(request, "engine_lost", problem)
            reply = await self._post(url, request)
            if reply is not None and reply.headers.get("x-should-retry") != "true":
                request_id = reply.headers.get("x-request-id", "")
                return answer_line(request, reply.status_code, reply.content, request_id)
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def _url(self) -> str:
        """Return the server's address, once it is ready."""
        async with self._asking:  # one thread waits, however many requests do
            return await asyncio.to_thread(self._group.ready)

    async def _post(self, url: str, request: BatchRequest) -> httpx.Response | None:
        """Return the reply to a request; None if the server was lost.

        A node that is gone closes no connection: the group knows it by the end of its actors.
        """
        posting = asyncio.ensure_future(
            self._http.post(url + request.url, content=request.body, headers=self._headers)
        )
        while not posting.done() and self._group.url == url:
            await asyncio.wait({posting}, timeout=LOOK_SECONDS)
        if not posting.done():
            posting.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await posting
            return None
        try:
            return posting.result()
        except httpx.TransportError as error:
            log.warning("%s: %s", url, error)
            return None
