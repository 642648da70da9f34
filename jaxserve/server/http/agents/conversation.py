"""A conversation for a chat template, and where its messages come from."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    """Messages of a conversation, each with the path in the request of where it begins."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], path: str) -> None:
        """Add a message."""
        self.messages.append(message)
        self.paths.append(path)
