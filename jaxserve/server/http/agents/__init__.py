"""Endpoints that agents use: /v1/responses of OpenAI and /v1/messages of Anthropic.

Each is a translation of its API to a conversation with one answer, and back. What both share is
here: objects whose fields are `listed`, and the way of a `turn`.
"""
