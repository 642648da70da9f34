"""Messages of conversations: what their values cost, and how errors name them."""

import pytest

from jaxserve.chat.messages import Place, plain, plain_messages
from jaxserve.errors import RequestError


def test_an_error_names_its_place() -> None:
    with pytest.raises(RequestError) as caught:
        plain({"a": [1, {"b" * 100: object()}]}, "messages[0]")
    assert caught.value.field == f"messages[0].a[1].{'b' * 80}"


def test_paths_are_put_together_for_errors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of two million characters may have half a million values."""
    written = list[Place]()
    monkeypatch.setattr(Place, "__str__", lambda place: written.append(place) or "somewhere")
    message = {"role": "user", "content": "x", "k" * 1000: [[1, "a", {"b": None}]] * 100}
    assert plain_messages([message]) == [message]
    assert not written
    with pytest.raises(RequestError):
        plain_messages([message | {"last": object()}])
    assert written
