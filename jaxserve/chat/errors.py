"""Kinds of ChatError that this package tells apart; clients see them as ChatError."""

from jaxserve.errors import ChatError


class NoTemplateError(ChatError):
    """There is no chat template."""


class LeftOutError(ChatError):
    """The chat template leaves out what a message says."""


class RefusedByTemplateError(ChatError):
    """The chat template refuses a conversation with raise_exception."""
