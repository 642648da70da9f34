"""Conversations as prompts: the checkpoint's chat template, rendered where it can do no harm. No
jax in here.
"""

from jaxserve.chat.chat import Chat, Rendered
from jaxserve.chat.messages import Message
from jaxserve.chat.tools import Tools

__all__ = ["Chat", "Message", "Rendered", "Tools"]
