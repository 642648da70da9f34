"""OpenAI's API over starlette, and what vLLM's clients expect beside it."""
