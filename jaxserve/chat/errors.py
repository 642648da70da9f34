"""Kinds of ChatError that this package tells apart; clients see them as ChatError."""

from jaxserve.errors import ChatError


class NoTemplateError(ChatError):
    """There is no chat template."""


class RefusedByTemplateError(ChatError):
    """The chat template refuses a conversation with raise_exception."""
