"""A hub of our own: two HTTP servers, one with the endpoints of the Hugging Face hub, and one that
stands for the CDN that large files lie on.

Every request is recorded. Faults can be ordered: connections that are cut, statuses, other bytes.
"""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils._detect_agent import _EMPTY_REGISTRY

LARGE = (".safetensors", ".model", ".bin")  # suffixes of files in git LFS


@dataclass(frozen=True)
class Request:
    """A request that came: to the hub, or to the CDN."""

    server: str
    method: str
    path: str
    headers: Mapping[str, str]


@dataclass
class HubRepo:
    """A model on the hub.

    files: of its newest commit, by path. refs: branches and tags with their commits. reader: the
    only token that may read it; empty where everybody may. gated: others are told so.
    """

    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=dict)
    reader: str = ""
    gated: bool = False

    def __post_init__(self) -> None:
        self.commit = sha1(repr(sorted(self.files.items())).encode()).hexdigest()
        self.refs.setdefault("main", self.commit)


@dataclass
class Faults:
    """What goes wrong, each as often as it is listed.

    cut: bytes after which the connection ends, by path. statuses: instead of an answer, by path or
    server. swapped: bytes that the CDN sends instead, by path, always. expired: statuses of the CDN
    for the addresses that are signed next, one each.
    """

    cut: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    statuses: dict[str, list[tuple[int, dict[str, str]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    swapped: dict[str, bytes] = field(default_factory=dict)
    expired: list[int] = field(default_factory=list)
    ignores_ranges: bool = False
    told_commit: str = ""  # instead of the right one, by `resolve`
    xet: str = ""  # address of Xet's server, where large files are said to lie there


class FakeHub:
    """Both servers. endpoint, cdn: their addresses. repos: by org/name."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.requests: list[Request] = []
        self.faults = Faults()
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(on_cdn)) for on_cdn in (False, True)
        ]
        self.endpoint, self.cdn = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def add(self, repo: str, folder: Path, **more: bytes) -> HubRepo:
        """Add a model with the files of a folder, and with more: name__suffix=bytes."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        files |= {name.replace("__", "."): content for name, content in more.items()}
        self.repos[repo] = HubRepo(files)
        return self.repos[repo]

    def tokens(self) -> dict[str, set[str | None]]:
        """Return the values of the Authorization header that each server was sent."""
        sent: dict[str, set[str | None]] = {"hub": set(), "cdn": set()}
        for request in self.requests:
            sent[request.server].add(request.headers.get("authorization"))
        return sent

    def bytes_of(self, file: str) -> int:
        """Return how many bytes of a file the CDN was asked for, by ranges."""
        asked = [
            request.headers["range"].removeprefix("bytes=").split("-")
            for request in self.requests
            if request.server == "cdn" and request.path.endswith(f"/{file}")
        ]
        return sum(int(stop) + 1 - int(start) for start, stop in asked)

    def fetched(self, *methods: str) -> list[str]:
        """Return the names of the files that were asked for, in their order."""
        return [
            request.path.rpartition("/")[2]
            for request in self.requests
            if "/resolve/" in request.path and request.method in (methods or ("GET",))
        ]

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        threads = [
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
            for server in self._servers
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server in self._servers:
                server.shutdown()
                server.server_close()
            for thread in threads:
                thread.join()

    def _handler(self, on_cdn: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _Answer(hub, self, on_cdn).give()

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


class _Answer:
    """The answer to one request."""

    def __init__(self, hub: FakeHub, handler: BaseHTTPRequestHandler, on_cdn: bool):
        self.hub = hub
        self.handler = handler
        self.on_cdn = on_cdn
        self.path = unquote(urlsplit(handler.path).path)
        self.query = parse_qs(urlsplit(handler.path).query)
        name = "cdn" if on_cdn else "hub"
        headers = {key.lower(): value for key, value in handler.headers.items()}
        hub.requests.append(Request(name, handler.command, self.path, headers))
        self.headers = headers
        self.name = name

    def give(self) -> None:
        statuses = self.hub.faults.statuses
        for key in (self.path.rpartition("/")[2], self.name):
            if statuses[key]:
                status, headers = statuses[key].pop(0)
                return self.send(status, headers)
        if self.on_cdn:
            return self.blob()
        for pattern, method in (
            (r"/api/models", self.search),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", self.info),
            (r"/api/models/([^/]+/[^/]+)/xet-read-token/([^/]+)", self.xet_token),
            (r"/api/models/([^/]+/[^/]+)/refs", self.refs),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.resolve),
        ):
            found = re.fullmatch(pattern, self.path)
            if found:
                return method(*found.groups())
        return self.send(404)

    # ---- the hub

    def search(self) -> None:
        author = self.query.get("author", [""])[0]
        search = self.query.get("search", [""])[0]
        names = [
            repo
            for repo in self.hub.repos
            if (not author or repo.startswith(f"{author}/")) and search.lower() in repo.lower()
        ]
        self.send_json([{"id": repo, "modelId": repo} for repo in names])

    def info(self, name: str, revision: str | None) -> None:
        repo = self.allowed(name, revision or "main")
        if repo:
            siblings = [_sibling(path, content) for path, content in repo.files.items()]
            sha = self.commit(repo, revision or "main")
            self.send_json({"id": name, "sha": sha, "siblings": siblings})

    def xet_token(self, name: str, revision: str) -> None:
        self.send(
            200,
            {
                "X-Xet-Cas-Url": self.hub.faults.xet,
                "X-Xet-Access-Token": "token",
                "X-Xet-Token-Expiration": str(2**33),
            },
        )

    def refs(self, name: str) -> None:
        repo = self.allowed(name, "main")
        if repo:
            branches = [
                {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit}
                for ref, commit in repo.refs.items()
            ]
            self.send_json({"branches": branches, "tags": [], "converts": []})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.allowed(name, revision)
        if not repo:
            return
        commit = self.hub.faults.told_commit or self.commit(repo, revision)
        headers = {"X-Repo-Commit": commit}
        if path not in repo.files:
            return self.send(404, headers | {"X-Error-Code": "EntryNotFound"})
        content = repo.files[path]
        if not path.endswith(LARGE):
            return self.send_range(path, content, headers | {"ETag": f'"{_blob_id(content)}"'})
        linked = {"X-Linked-Etag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        if self.hub.faults.xet:
            route = f"{self.hub.endpoint}/api/models/{name}/xet-read-token/{revision}"
            linked |= {"X-Xet-Hash": "ab" * 32, "X-Xet-Refresh-Route": route}
        expired = self.hub.faults.expired
        signature = f"expired-{expired.pop(0)}" if expired else "valid"
        location = f"{self.hub.cdn}/{_sha256(content)}/{path}?signature={signature}"
        return self.send(302, headers | linked | {"Location": location})

    def allowed(self, name: str, revision: str) -> HubRepo | None:
        """Return the repository, or answer why not."""
        repo = self.hub.repos.get(name)
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        if repo is None:
            self.send(401 if not token else 404, {"X-Error-Code": "RepoNotFound"})
        elif repo.reader and token != repo.reader:
            code = "GatedRepo" if repo.gated else "RepoNotFound"
            self.send(403 if token and repo.gated else 401, {"X-Error-Code": code})
            return None
        elif revision not in (*repo.refs, *repo.refs.values()):
            self.send(404, {"X-Error-Code": "RevisionNotFound"})
            return None
        return repo

    def commit(self, repo: HubRepo, revision: str) -> str:
        return repo.refs.get(revision, revision)

    # ---- the CDN

    def blob(self) -> None:
        signature, _, status = self.query.get("signature", [""])[0].partition("-")
        if signature == "expired":
            return self.send(int(status))
        digest, path = self.path.lstrip("/").split("/", 1)
        contents = [
            content
            for repo in self.hub.repos.values()
            for content in repo.files.values()
            if _sha256(content) == digest
        ]
        if not contents:
            return self.send(404)
        content = self.hub.faults.swapped.get(path, contents[0])
        return self.send_range(path, content, {"ETag": f'"{digest}"'})

    # ---- sending

    def send_json(self, value: Any) -> None:
        self.send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def send_range(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        status = 200
        if asked and not self.hub.faults.ignores_ranges:
            start = int(asked[1])
            stop = min(int(asked[2]) + 1 if asked[2] else len(content), len(content))
            headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            content = content[start:stop]
            status = 206
        cuts = self.hub.faults.cut[path]
        cut = cuts.pop(0) if cuts and self.handler.command == "GET" else None
        self.send(status, headers, content, cut)

    def send(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
        cut: int | None = None,
    ) -> None:
        handler = self.handler
        handler.send_response(status)
        for key, value in (headers or {}).items():
            handler.send_header(key, value)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content[:cut])
        handler.close_connection = handler.close_connection or cut is not None


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "rfilename": path,
        "size": len(content),
        "blobId": _blob_id(content),
    }
    if path.endswith(LARGE):
        entry["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 130}
    return entry


def _sha256(content: bytes) -> str:
    return sha256(content).hexdigest()


def _blob_id(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def fake_hub(cache: Path) -> Iterator[FakeHub]:
    """Run a hub, which huggingface_hub in this process uses with a cache of its own."""
    with FakeHub().running() as hub, pytest.MonkeyPatch.context() as patch:
        settings = {
            "ENDPOINT": hub.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_TOKEN_PATH": str(cache / "no token"),
        }
        for name, value in settings.items():
            patch.setattr(constants, name, value)
        # Else the first request of a process asks for a list of agents, and takes an ordered fault.
        patch.setattr("huggingface_hub.utils._detect_agent._registry", _EMPTY_REGISTRY)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            patch.delenv(name, raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        close_session()
        try:
            yield hub
        finally:
            close_session()
