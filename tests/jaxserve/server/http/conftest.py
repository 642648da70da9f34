"""Fixtures of several files of HTTP tests."""

import pytest

from tests import fake_model
from tests.byte_tokenizer import ByteTokenizer
from tests.jaxserve.server import harness
from tests.jaxserve.server.http.scripted_model import SPECIAL, MarkedTokenizer, Says


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Set the answer to the first prompt, and to prompts of other lengths if it differs."""

    def say(text: str, later: str | None = None) -> None:
        scripts = [
            [*MarkedTokenizer().ids(t), *ByteTokenizer.eos_ids]
            for t in (text, text if later is None else later)
        ]
        prompts: list[int] = []

        def choose(
            rules: fake_model.Rules, total: int, position: int, penalty: int, mask: object = None
        ) -> int:
            prompts.append(rules.end_after)
            script = scripts[rules.end_after != prompts[0]]
            script = within_budget(script, rules.closes_at - rules.end_after, rules.closing)
            return script[min(position - rules.end_after, len(script) - 1)]

        monkeypatch.setattr(fake_model.Rules, "choose", choose)

    monkeypatch.setattr(harness, "ByteTokenizer", MarkedTokenizer)
    return say


def within_budget(script: list[int], tokens: int, closing: tuple[int, ...]) -> list[int]:
    """Return a script whose thought is closed behind so many tokens, as the device does it."""
    end = SPECIAL["</think>"]
    if end in script[:tokens] or tokens >= len(script):
        return script
    rest = script[script.index(end) + 1 :] if end in script else script[tokens:]
    return [*script[:tokens], *closing, *rest]
