"""HTTP endpoints: OpenAI's API, additions that vLLM's clients expect, and a page for people.

Requests are parsed by `body`, `types`, `calls`, `chat_fields` and `response_format`. Replies are
rendered by `replies`, `completion_replies`, `chat_replies` and `logprobs`, and sent by `streams`.
"""
