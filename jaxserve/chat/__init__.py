"""Conversations as prompts: the checkpoint's chat template, rendered in a sandbox; no jax."""

from jaxserve.chat.chat import Chat, Rendered
from jaxserve.chat.messages import Message
from jaxserve.chat.template_options import TemplateFields, TemplateOptions, UnknownFields
from jaxserve.chat.tools import Tools

__all__ = [
    "Chat",
    "Message",
    "Rendered",
    "TemplateFields",
    "TemplateOptions",
    "Tools",
    "UnknownFields",
]
