"""The page for people: its files, its headers, and a live view that agrees with /metrics."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.metrics_core import Metric

from jaxserve.server.core.limits import Limits
from jaxserve.server.http import page
from jaxserve.server.observe.metrics import Metrics
from jaxserve.server.serving_state import StepUse
from tests.jaxserve.server.harness import until
from tests.jaxserve.server.http.harness import Http, serving
from tests.jaxserve.server.observe.test_metrics import values

FILES = sorted(path.name for path in page.FOLDER.iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "javascript", ".svg": "image/svg+xml"}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
BODY = {"prompt": "The quick brown fox", "max_tokens": 8, "seed": 1}


@asynccontextmanager
async def watching(http: Http, **options: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Open /live and parse its messages."""

    async def messages(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        async for line in response.aiter_lines():
            if line:
                assert line.startswith("data: ")
                yield json.loads(line[6:])

    async with http.raw.stream("GET", "/live", **options) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield messages(response)


# ---- the files


def test_every_file_is_sent_as_what_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            for path, name in [("/", "index.html"), *((f"/page/{name}", name) for name in FILES)]:
                response = await http.raw.get(path)
                assert response.content == (page.FOLDER / name).read_bytes(), path
                assert TYPES[Path(name).suffix] in response.headers["content-type"], path
                assert response.headers["content-security-policy"] == POLICY, path
                assert response.headers["referrer-policy"] == "no-referrer", path
                assert response.headers["x-content-type-options"] == "nosniff", path
                again = await http.raw.get(
                    path, headers={"if-none-match": response.headers["etag"]}
                )
                assert (again.status_code, again.content) == (304, b""), path
                assert again.headers["content-security-policy"] == POLICY, path

    asyncio.run(main())


def test_nothing_outside_of_the_folder_is_sent(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            outside = (
                "../limits.py",
                "%2e%2e/limits.py",
                "..%2flimits.py",
                "/etc/passwd",
                "%2fetc%2fpasswd",
                "%00",
            )
            for name in (*outside, "", ".", "nowhere.js"):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", httpx.URL(http.base).port
                )
                lines = (
                    f"GET /page/{name} HTTP/1.1",
                    "host: localhost",
                    "connection: close",
                    "",
                    "",
                )
                writer.write("\r\n".join(lines).encode())  # the name as it is
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 404") and b'"unknown_url"' in answer, name
            for path in ("/", "/page/main.js", "/live"):
                response = await http.post(path)
                assert response.status_code == 405 and "GET" in response.headers["allow"], path

    asyncio.run(main())


def test_the_files_need_each_other_and_nobody_else() -> None:
    """The files name no other server, have no inline script or style, and parse no text as HTML."""
    texts = {name: (page.FOLDER / name).read_text() for name in FILES}
    html = texts["index.html"]
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", html)
    wanted = set(re.findall(r'(?:href|src)="page/([^"]+)"', html))
    for name, text in texts.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text
        ), name
        if name.endswith(".js"):
            wanted |= set(re.findall(r'from "\./([^"]+)"', text))
    assert wanted | {"index.html"} == set(FILES)


def brightness(color: str) -> float:
    """Return the relative luminance that WCAG 2 defines."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_has_the_contrast_that_wcag_asks_for() -> None:
    light, dark = re.findall(r":root \{(.*?)\}", (page.FOLDER / "style.css").read_text(), re.DOTALL)
    for block in (light, dark):
        colors = dict(re.findall(r"--([\w-]+): (#\w{6});", block))
        for ink in ("ink", "soft", "live", "wrong"):
            for ground in ("paper", "sheet", "faint"):
                low, high = sorted((brightness(colors[ink]), brightness(colors[ground])))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)


def test_who_needs_a_token(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, token="secret") as http:
            async with httpx.AsyncClient(
                base_url=http.base, trust_env=False, timeout=60
            ) as stranger:
                for path in ("/", "/page/main.js"):
                    assert (await stranger.get(path)).status_code == 200
                for path in ("/live", "/page", "/pages/main.js", "/metrics"):
                    assert (await stranger.get(path)).status_code == 401, path
            async with watching(http) as messages:
                assert (await anext(messages))["phase"] == "ready"

    asyncio.run(main())


def test_what_the_page_asks_of_the_model(tmp_path: Path) -> None:
    async def main(embeds: bool) -> None:
        async with serving(tmp_path, embeds=embeds) as http:
            (card,) = (await http.raw.get("/v1/models")).json()["data"]
            assert (
                card["has_chat_template"] is True and bool(card["embedding_dimensions"]) is embeds
            )

    for embeds in (False, True):
        asyncio.run(main(embeds))


# ---- the live view


def flat(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the live view's numbers by their names in /metrics."""
    found = dict[str, float]()
    for name, told in metrics.items():
        match told:
            case {"le": counts, "sum": total}:
                found |= {
                    f"jaxserve:{name}_bucket{{'le': {bound!r}}}": n for bound, n in counts.items()
                }
                found |= {
                    f"jaxserve:{name}_sum{{}}": total,
                    f"jaxserve:{name}_count{{}}": counts["+Inf"],
                }
            case dict():
                label = {
                    "request_success": "finished_reason",
                    "request_failure": "reason",
                    "expert_imbalance": "layer",
                }
                total = "" if name == "expert_imbalance" else "_total"
                found |= {
                    f"jaxserve:{name}{total}{{{label[name]!r}: {key!r}}}": n
                    for key, n in told.items()
                }
            case _:
                found[f"jaxserve:{name}{{}}"] = told
    return found


def test_the_numbers_are_those_of_metrics(tmp_path: Path) -> None:
    async def main() -> None:
        metrics = Metrics(lambda: 3)
        async with serving(tmp_path, metrics=metrics, max_batch=2) as http:
            metrics.watch_experts(
                (1, 4), http.server.served.thread, lambda: np.zeros((2, 2), np.uint32)
            )
            assert metrics._load
            metrics._load.take(np.array([[3, 1], [5, 0]], np.uint32))
            assert (
                await http.post("/v1/completions", BODY | {"prompt": "x" * 600})
            ).status_code == 400
            await asyncio.gather(
                *(http.post("/v1/completions", BODY | {"n": n}) for n in (1, 2, 3))
            )
            running = asyncio.create_task(
                http.post("/v1/completions", BODY | {"max_tokens": 300, "n": 3})
            )
            with http.server.holding(step=50):
                await until(lambda: http.server.service.loads.waiting == 1)
                async with watching(http) as messages:
                    busy = await anext(messages)
            assert (
                busy["metrics"]["num_requests_running"],
                busy["metrics"]["num_requests_waiting"],
            ) == (2, 1)
            assert 0 < busy["pages"]["used"] < busy["pages"]["total"] == 512
            assert busy["pages"]["used"] / 512 == busy["metrics"]["kv_cache_usage_perc"]
            await running
            await http.server.at_rest()
            async with watching(http) as messages:
                async for message in messages:  # the first may be a second old
                    quiet = flat(message["metrics"])
                    if not quiet["jaxserve:num_requests_running{}"]:
                        break
            told = values((await http.raw.get("/metrics")).content)
            told = {name: value for name, value in told.items() if "expert_tokens" not in name}
            assert {name.replace("_total{}", "{}"): value for name, value in told.items()} == quiet
            assert quiet["jaxserve:time_to_first_token_seconds_count{}"] == 1 + 2 + 3 + 3
            assert quiet["jaxserve:request_failure_total{'reason': 'CONTEXT_LENGTH_EXCEEDED'}"] == 1
            assert quiet["jaxserve:expert_imbalance{'layer': '4'}"] == 2.0

    asyncio.run(main())


def test_what_is_told_of_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, opened=False) as http:
            use = StepUse("decode", 2, 2, 1, 7, 9, 14)
            http.server.served = replace(http.server.served, steps=lambda: [use])
            async with watching(http) as messages:
                loading = await anext(messages)
                assert loading["phase"] == "loading" and "engine" not in loading
                http.server.readiness.set_ready(http.server.served)
                ready = await anext(messages)
            assert ready["phase"] == "ready" and ready["model"]["name"] == "fake"
            assert ready["engine"]["rows"] == 4 and ready["pages"] == {"used": 0, "total": 512}
            (step,) = ready["steps"]
            assert StepUse(**step) == use

    asyncio.run(main())


@pytest.mark.system
def test_one_message_for_all_and_none_for_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        made: list[int] = []

        class Counted(Metrics):
            def families(self) -> list[Metric]:
                made.append(1)
                return super().families()

        async with serving(tmp_path, metrics=Counted(lambda: 0)) as http:
            await asyncio.sleep(1.2)
            assert not made

            async def watch() -> list[float]:
                async with watching(http) as messages:
                    return [(await anext(messages))["at"] for _ in range(3)]

            seen = await asyncio.gather(*(watch() for _ in range(5)))
            assert len(made) < 3 * 5 and {len(set(each)) for each in seen} == {3}
            assert len({at for each in seen for at in each}) == len(made)
            before = len(made)
            await asyncio.sleep(1.2)
            assert len(made) == before

    asyncio.run(main())


def test_watchers_are_bounded_and_those_who_leave_make_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, limits=Limits(max_watchers=2)) as http:
            async with watching(http) as first, watching(http) as second:
                for messages in (first, second):
                    await anext(messages)
                refused = await http.raw.get("/live")
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
                assert (
                    "--max-watchers 2" in error["message"] and refused.headers["retry-after"] == "1"
                )
            for _ in range(3):
                assert (
                    await http.raw.head("/live")
                ).status_code == 200  # without a body there is nothing to end
            for _ in range(3):
                async with watching(http) as messages:
                    await anext(messages)

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["drain", "fail"])
def test_it_ends_when_the_server_begins_to_end(tmp_path: Path, ending: str) -> None:
    async def main() -> None:
        async with serving(tmp_path) as http:
            phase = {"drain": "draining", "fail": "failed"}[ending]
            async with watching(http) as messages:
                assert (await anext(messages))["phase"] == "ready"
                getattr(http.server.readiness, f"set_{phase}")()
                assert [message["phase"] async for message in messages] == [phase]
            async with watching(http) as messages:  # who asks then is told once
                assert [message["phase"] async for message in messages] == [phase]

    asyncio.run(main())
