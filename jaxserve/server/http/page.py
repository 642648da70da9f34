"""GET / and /page/...: a playground and the live view for people, as static files.

Nothing in them is secret: the page loads without a token, asks for it, and sends it as any other
client does.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parent.parent / "page"
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # kept, and asked for again by its ETag: the server may be a newer one by then
    "cache-control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether what lies at this path is shown without a token."""
    return path == "/" or path.startswith("/page/")


class Page:
    def __init__(self) -> None:
        self._files = StaticFiles(directory=FOLDER)

    async def index(self, request: Request) -> Response:
        return await self._send("index.html", request)

    async def file(self, request: Request) -> Response:
        return await self._send(request.path_params["path"], request)

    async def _send(self, path: str, request: Request) -> Response:
        response = await self._files.get_response(path, request.scope)
        response.headers.update(HEADERS)
        return response
