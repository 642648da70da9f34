"""A user of the page in Chromium, and a server on the fake device to use it with."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from jaxserve.server.observe.metrics import Metrics
from tests.jaxserve.server.http.harness import Http, serving


class Browser:
    """Actions of a user. Every one waits, a minute at most, until the page allows it."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self.base = ""

    def open(self, base: str) -> None:
        self.base = base
        self.driver.get(base)

    def find(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        """Return the texts unchanged: `text` normalizes white space."""
        return [str(element.get_property("textContent")) for element in self.all(css)]

    def until[T](self, read: Callable[[], T]) -> T:
        end = time.monotonic() + 60
        while not (found := read()):
            assert time.monotonic() < end, self.driver.find_element(By.TAG_NAME, "body").text
            time.sleep(0.02)
        return found

    def ready(self) -> None:
        self.until(
            lambda: self.find("#phase").text == "ready" and self.find("#play").is_displayed()
        )

    def set(self, **fields: Any) -> None:
        for name, value in fields.items():
            (field,) = self.all(f"[name={name}]")
            field.clear()
            field.send_keys(str(value))

    def ask(self, prompt: str) -> None:
        """Send a message, and wait for the answer."""
        turns = len(self.all(".facts"))
        self.find("#prompt").send_keys(prompt + Keys.ENTER)
        self.until(lambda: len(self.all(".facts")) > turns and self.find("#send").is_displayed())

    def complete(self) -> None:
        self.driver.execute_script("document.querySelector('input[value=completion]').click()")

    def leave(self) -> None:
        """Leave for an empty page; check that no script failed and no policy was violated."""
        logged = [entry for entry in self.driver.get_log("browser") if entry["source"] != "network"]
        self.driver.get("about:blank")
        assert not [entry["message"] for entry in logged if entry["level"] == "SEVERE"]


def browse(
    browser: Browser,
    folder: Path,
    use: Callable[[Http], None],
    metrics: Metrics | None = None,
    **options: Any,
) -> None:
    """Use the page on a thread, and leave it; `options` are those of `serving`."""

    def used(http: Http) -> None:
        use(http)
        browser.leave()

    async def main() -> None:
        async with serving(
            folder, tops=True, metrics=metrics or Metrics(lambda: 0), **options
        ) as http:
            await asyncio.to_thread(used, http)
            await http.server.at_rest()

    asyncio.run(main())


def chat_ids(*messages: tuple[str, str]) -> list[int]:
    """Return the token ids of a chat by the harness's template."""
    return list("".join(f"{role}: {content}\n" for role, content in messages).encode())
