"""Picture of the page under load, for the documents."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from selenium import webdriver

from tests.jaxserve.server.http.page_browser import Browser


@contextmanager
def loaded(base: str) -> Iterator[None]:
    """Run a few clients with various requests."""
    ended = threading.Event()
    dice = random.Random(1)
    system = {"role": "system", "content": "You are Tiny, a helpful assistant."}
    questions = (
        "Tell me a short story about a fox.",
        "Tell me a story about a picnic.",
        "Who are you?",
        "What is 9 - 4?",
    )

    def ask() -> None:
        while not ended.wait(dice.expovariate(0.8)):
            body = {
                "messages": [system, {"role": "user", "content": dice.choice(questions)}],
                "temperature": 0.7,
            }
            httpx.post(f"{base}/v1/chat/completions", json=body | {"max_tokens": 300}, timeout=60)

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        ended.set()
        for client in clients:
            client.join()


def paint(browser: Browser, path: Path) -> None:
    """Write a picture: a minute of traffic, a story, and the alternatives of one word."""
    size = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.find("#colors").click()
    time.sleep(60)
    browser.ask("Tell me a short story about a dragon.")
    time.sleep(2)
    doubtful = browser.all(".token[data-doubt='4']")
    webdriver.ActionChains(browser.driver).move_to_element(
        doubtful[len(doubtful) * 2 // 3]
    ).perform()
    browser.until(lambda: float(browser.find("data#running").get_attribute("value") or 0) > 1)
    assert browser.find("#popover").is_displayed()
    path.write_bytes(browser.driver.get_screenshot_as_png())
