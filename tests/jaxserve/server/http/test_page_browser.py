"""The page in Chromium, against a server on the fake device; skipped without browser or driver."""

import asyncio
import json
import math
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.metrics_core import Metric
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.keys import Keys

from jaxserve.server.core.limits import Limits
from jaxserve.server.observe.metrics import Metrics
from tests.jaxserve.server.http.harness import Http, expected, serving
from tests.jaxserve.server.http.page_browser import Browser, browse, chat_ids
from tests.jaxserve.server.http.page_picture import loaded, paint
from tests.jaxserve.server.observe.test_metrics import values
from tests.jaxserve.server.test_serve_process import ROOT, launch

pytestmark = pytest.mark.system
MODEL = ROOT / "checkpoints" / "bundled" / "tiny-chat"
TOKENS = 12


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    binary = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    driver = shutil.which("chromedriver")
    if not (binary and driver):
        pytest.skip(
            "no Chromium or no chromedriver is installed (Debian: apt install chromium "
            "chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "no-proxy-server",
        "window-size=1440,900",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    yield started
    started.quit()


@pytest.fixture
def browser(chromium: webdriver.Chrome) -> Iterator[Browser]:
    found = Browser(chromium)
    yield found
    found.leave()


def test_a_conversation(browser: Browser, tmp_path: Path) -> None:
    def use(http: Http) -> None:
        browser.open(http.base)
        browser.ready()
        browser.set(temperature="", seed=1, max_tokens=TOKENS)
        question = "Hé <b>\nthere"
        browser.find("#prompt").send_keys("Hé <b>", Keys.SHIFT, Keys.ENTER, Keys.NULL)
        browser.ask("there")
        first = expected(chat_ids(("user", question)), TOKENS)
        browser.ask("again")
        history = [("user", question), ("assistant", first), ("user", "again")]
        second = expected(chat_ids(*history), TOKENS)
        assert browser.texts(".text") == [question, first, "again", second]
        assert all("finished: length" in text for text in browser.texts(".facts"))
        assert browser.texts("#spoken") == [second]
        browser.find("#clear").click()
        assert browser.texts(".turn") == [] and len(browser.texts(".hint")) == 1

    browse(browser, tmp_path, use)


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_probabilities_of_a_token(browser: Browser, tmp_path: Path, mode: str) -> None:
    """Hovering and the arrow keys show the values that the API returns."""

    def use(http: Http) -> None:
        browser.open(http.base)
        browser.ready()
        if mode == "completion":
            browser.complete()
        browser.set(temperature="", seed=1, max_tokens=TOKENS)
        browser.ask("The fox")
        spans = browser.all(".token")
        assert len(spans) == TOKENS
        body = {"prompt": chat_ids(("user", "The fox")) if mode == "chat" else "The fox"}
        asked = body | {"max_tokens": TOKENS, "logprobs": 5, "seed": 1}
        (choice,) = httpx.post(f"{http.base}/v1/completions", json=asked, timeout=60).json()[
            "choices"
        ]
        assert "".join(browser.texts(".token")) == choice["text"]
        logprobs = choice["logprobs"]

        def shown(i: int) -> bool:
            popover = browser.find("#popover")
            chances = [
                math.exp(logprob) * 100
                for logprob in sorted(logprobs["top_logprobs"][i].values())[::-1]
            ]
            rows = [
                float(text.removesuffix("\u00a0%").lstrip("<"))
                for text in browser.texts("#popover td:last-child")
            ]
            return popover.is_displayed() and rows == pytest.approx(chances, abs=0.11)

        for i in (3, 7):
            webdriver.ActionChains(browser.driver).move_to_element(spans[i]).perform()
            browser.until(lambda i=i: shown(i))
        transcript = browser.find("#transcript")
        browser.driver.execute_script("arguments[0].focus()", transcript)
        transcript.send_keys(Keys.ARROW_LEFT)
        browser.until(lambda: shown(6))
        transcript.send_keys(Keys.ESCAPE)
        assert not browser.find("#popover").is_displayed()
        assert all(0 <= int(span.get_attribute("data-doubt") or -1) <= 5 for span in spans)

    browse(browser, tmp_path, use)


def test_clearing_forgets_the_answer_that_was_on_its_way(browser: Browser, tmp_path: Path) -> None:
    def use(http: Http) -> None:
        browser.open(http.base)
        browser.ready()
        browser.set(max_tokens=400, temperature="", seed=1)
        browser.find("#prompt").send_keys("Go on" + Keys.ENTER)
        browser.until(lambda: len(browser.all(".token")) > 5)
        browser.find("#clear").click()
        browser.until(lambda: browser.find("#send").is_displayed())
        browser.set(max_tokens=TOKENS)
        browser.ask("again")
        assert browser.texts(".text") == ["again", expected(chat_ids(("user", "again")), TOKENS)]

    browse(browser, tmp_path, use, seconds=0.02)


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stop_frees_the_pages(browser: Browser, tmp_path: Path, way: str) -> None:
    def use(http: Http) -> None:
        service = http.server.service
        browser.open(http.base)
        browser.ready()
        browser.set(max_tokens=400)
        browser.find("#prompt").send_keys("Go on" + Keys.ENTER)
        browser.until(lambda: len(browser.all(".token")) > 5)
        assert service.loads.running == 1 and service.loads.pages_used > 0
        browser.find("#stop").click() if way == "button" else browser.find("body").send_keys(
            Keys.ESCAPE
        )
        browser.until(
            lambda: service.loads.running == service.loads.pages_used == service.in_flight == 0
        )
        browser.until(lambda: "stopped by you" in "".join(browser.texts(".facts")))
        assert browser.find("#send").is_displayed() and not browser.find("#stop").is_displayed()
        made = len(browser.all(".token"))
        assert 5 < made < 400

    browse(browser, tmp_path, use, seconds=0.02)


def test_the_live_view_says_what_metrics_says(browser: Browser, tmp_path: Path) -> None:
    names = {
        "running": "num_requests_running{}",
        "waiting": "num_requests_waiting{}",
        "generated": "generation_tokens_total{}",
        "prompts": "prompt_tokens_total{}",
        "hits": "prefix_cache_hits_total{}",
        "padding": "padding_tokens_total{}",
        "ttft": "time_to_first_token_seconds_count{}",
        "tpot": "request_time_per_output_token_seconds_count{}",
        "compiles": "compiles_after_ready{}",
    }

    def shown() -> dict[str, float]:
        return {
            id: float(browser.find(f"data#{id}").get_attribute("value") or -1)
            for id in (*names, "pages")
        }

    def use(http: Http) -> None:
        browser.open(http.base)
        browser.ready()
        body = {"prompt": "The quick brown fox jumps", "max_tokens": 300, "n": 5}
        with httpx.Client(base_url=http.base, timeout=60) as client:
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}):
                browser.until(lambda: (shown()["running"], shown()["waiting"]) == (4, 1))
                assert browser.until(lambda: shown()["pages"])
            for _ in range(3):
                assert (
                    client.post("/v1/completions", json=body | {"max_tokens": 8}).status_code == 200
                )
            told = values(client.get("/metrics").content)
            wanted = {id: told[f"jaxserve:{name}"] for id, name in names.items()} | {"pages": 0.0}
            assert wanted["generated"] > 120 and wanted["hits"] > 0 and wanted["ttft"] == 3 * 5 + 4
            browser.until(lambda: shown() == wanted)
        assert "client went away1" in "".join(browser.texts(".ends"))

    browse(browser, tmp_path, use, metrics=Metrics(lambda: 2), max_batch=4, seconds=0.02)


def test_experts_are_shown_where_there_are_any(browser: Browser, tmp_path: Path) -> None:
    async def main() -> None:
        metrics = Metrics(lambda: 0)

        def shown() -> str:
            return browser.find(".experts").text

        async with serving(tmp_path, metrics=metrics) as http:
            await asyncio.to_thread(browser.open, http.base)
            await asyncio.to_thread(browser.ready)
            assert await asyncio.to_thread(shown) == ""
            metrics.watch_experts(
                (1, 4), http.server.served.thread, lambda: np.zeros((2, 2), np.uint32)
            )
            assert metrics._load
            metrics._load.take(np.array([[3, 1], [5, 0]], np.uint32))
            await asyncio.to_thread(
                browser.until, lambda: "2.00 times the mean in layer 4" in shown()
            )
            await asyncio.to_thread(browser.leave)

    asyncio.run(main())


def test_a_tab_that_is_hidden_does_not_watch(browser: Browser, tmp_path: Path) -> None:
    made: list[float] = []

    class Counted(Metrics):
        def families(self) -> list[Metric]:
            made.append(time.monotonic())
            return super().families()

    def use(http: Http) -> None:
        driver = browser.driver
        browser.open(http.base)
        browser.ready()
        page = driver.current_window_handle
        driver.switch_to.new_window("tab")
        browser.until(lambda: time.monotonic() - made[-1] > 2.5)
        before = len(made)
        driver.close()
        driver.switch_to.window(page)
        browser.until(lambda: len(made) > before)

    browse(browser, tmp_path, use, metrics=Counted(lambda: 0))


def test_one_watcher_too_many_can_still_play(browser: Browser, tmp_path: Path) -> None:
    def use(http: Http) -> None:
        with httpx.stream("GET", f"{http.base}/live", timeout=60):
            browser.open(http.base)
            problem = browser.until(lambda: browser.find("#live-problem").text)
            assert (
                problem.startswith("429 Too Many Requests: /live has 1 watchers")
                and browser.find("#phase").text == "refused"
            )
            browser.ask("x")
            assert browser.texts(".turn .error") == []
        browser.ready()
        assert not browser.find("#live-problem").is_displayed()

    browse(browser, tmp_path, use, limits=Limits(max_watchers=1))


def test_a_token(browser: Browser, tmp_path: Path) -> None:
    def give(token: str) -> None:
        browser.until(lambda: browser.find("#ask").is_displayed())
        browser.find("#ask-token").send_keys(token + Keys.ENTER)

    def use(http: Http) -> None:
        browser.open(http.base)
        give("wrong")
        problem = browser.until(lambda: browser.find("#ask-problem").text)
        assert problem.startswith("401 Unauthorized: a valid token is missing")
        give("secret")
        browser.ready()
        browser.set(seed=1, max_tokens=TOKENS, temperature="")
        browser.ask("x")
        assert browser.texts(".text")[-1] == expected(chat_ids(("user", "x")), TOKENS)
        kept = browser.driver.execute_script(
            "return [sessionStorage.length, localStorage.length, document.cookie]"
        )
        assert kept == [1, 0, ""]
        browser.driver.refresh()
        browser.ready()
        browser.find("#forget").click()
        browser.until(lambda: browser.find("#ask").is_displayed())

    browse(browser, tmp_path, use, token="secret")


def test_errors_are_shown_as_they_are(browser: Browser, tmp_path: Path) -> None:
    def use(http: Http) -> None:
        browser.open(http.base)
        browser.ready()
        for name, value in (
            ("temperature", "9"),
            ("seed", "abc"),
            ("max_tokens", "5000"),
            ("seed", str(2**64 - 1)),
        ):
            browser.set(**{"temperature": "", "seed": "", "max_tokens": "", name: value})
            given: Any = int(value) if value.isdigit() and int(value) < 2**53 else value
            body = {"messages": [{"role": "user", "content": "x"}], name: given}
            refused = httpx.post(f"{http.base}/v1/chat/completions", json=body, timeout=60)
            browser.ask("x")
            error = refused.json()["error"]
            assert browser.texts(".turn .error strong")[-1] == f"400 Bad Request · {error['code']}"
            assert browser.texts(".turn .error span")[-1] == error["message"]

    browse(browser, tmp_path, use)


def test_a_model_that_embeds_has_only_the_live_view(browser: Browser, tmp_path: Path) -> None:
    def use(http: Http) -> None:
        browser.open(http.base)
        sentence = browser.until(lambda: browser.find("#no-play").text)
        assert "embeddings of 2 numbers" in sentence and not browser.find("#play").is_displayed()
        browser.until(lambda: browser.find("#pages").text == "0")

    browse(browser, tmp_path, use, embeds=True)


def test_a_server_that_comes_later(browser: Browser, tmp_path: Path) -> None:
    """The server loads first, is ready then, and drains at last."""

    async def main() -> None:
        async with serving(tmp_path, metrics=Metrics(lambda: 0), opened=False) as http:

            def before() -> None:
                browser.open(http.base)
                browser.until(lambda: browser.find("#phase").text == "loading")
                assert (
                    not browser.find("#play").is_displayed()
                    and not browser.find("#live").is_displayed()
                )
                refused = browser.until(lambda: browser.find("#no-play").text)
                assert refused.startswith("503 Service Unavailable: the model is being loaded")

            await asyncio.to_thread(before)
            http.server.open()
            await asyncio.to_thread(browser.ready)
            http.server.readiness.set_draining()
            await asyncio.to_thread(
                browser.until, lambda: browser.find("#phase").text == "draining"
            )
            await asyncio.to_thread(browser.leave)

    asyncio.run(main())


@pytest.mark.parametrize("width", [360, 820, 1440])
def test_it_fits_and_everything_has_a_name(browser: Browser, tmp_path: Path, width: int) -> None:
    """At every width nothing overflows, and every control has a name for screen readers."""

    def use(http: Http) -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.open(http.base)
        browser.ready()
        browser.find("summary").click()
        browser.set(max_tokens=64)
        browser.ask("x" * 200)
        for view in ("play", "live"):
            if width < 900:
                browser.find(f"[data-show={view}]").click()
            assert browser.find(f".{view}").is_displayed()
            inside = (
                "return [document.documentElement.scrollWidth, "
                "...[...document.querySelectorAll('.play, .live')]"
            )
            most = browser.driver.execute_script(
                inside + ".map(e => e.scrollWidth - e.clientWidth)]"
            )
            assert most[0] <= width and max(most[1:]) <= 0, view
        tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})
        used = {"textbox", "button", "checkbox", "radio", "DisclosureTriangle"}
        found = [
            node
            for node in tree["nodes"]
            if node.get("role", {}).get("value") in used and not node["ignored"]
        ]
        nameless = [json.dumps(node) for node in found if not node.get("name", {}).get("value")]
        assert found and not nameless
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    browse(browser, tmp_path, use)


# ---- a real model, in a process of its own


@pytest.mark.slow
def test_the_bundled_model(browser: Browser, request: pytest.FixtureRequest) -> None:
    """The answer is right, and the table of steps agrees with the engine.

    --page-picture FILE writes a picture of the page under load.
    """
    process = launch(
        "--model", str(MODEL), "--max-batch", "8", "--max-context", "2048", "--page-size", "16"
    )
    try:
        process.client().close()
        picture = request.config.getoption("--page-picture")
        with loaded(process.http) if picture else nullcontext():
            browser.open(process.http)
            browser.ready()
            browser.set(seed=5)
            browser.ask("What is 7 plus 5?")
            assert browser.texts(".text")[-1] == "7 plus 5 is 12."
            if picture:
                paint(browser, picture)
        rows = browser.until(lambda: settled(browser, process.http))
        assert sum(row["launches"] for row in rows) > 10
        assert {row["kind"] for row in rows if row["launches"]} == {"prefill", "decode"}
        runs = [float(cell.get_attribute("value") or -1) for cell in browser.all("#steps data")]
        assert runs == [row["launches"] for row in rows]
        browser.leave()
    finally:
        process.popen.send_signal(signal.SIGTERM)
        code, text = process.wait()
    assert code == 0, text


def settled(browser: Browser, base: str) -> list[dict[str, Any]]:
    """Return the steps of /live once the page shows them and /metrics has counted their tokens."""
    with httpx.stream("GET", f"{base}/live", timeout=60) as response:
        message = json.loads(next(response.iter_lines()).removeprefix("data: "))
    told = values(httpx.get(f"{base}/metrics", timeout=60).content)
    assert message["metrics"]["compiles_after_ready"] == 0
    computed = sum(row["computed_tokens"] for row in message["steps"])
    if (
        message["metrics"]["num_requests_running"]
        or computed != told["jaxserve:computed_tokens_total{}"]
    ):
        return []  # the message may be a second old
    shown = sum(float(cell.get_attribute("value") or 0) for cell in browser.all("#steps data"))
    return message["steps"] if shown == sum(row["launches"] for row in message["steps"]) else []
