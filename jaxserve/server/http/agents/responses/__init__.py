"""OpenAI's /v1/responses: input items become a conversation, and its answer output items."""
