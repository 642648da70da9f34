"""Requests from their admission to their first token."""

from collections import Counter
from dataclasses import dataclass

from jaxserve.request import Request


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt without a first token, and what is to be made from it."""

    tokens: int
    priority: int
    choices: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """Choices and prompt tokens that go before a request in the queue."""

    choices: int
    prompt_tokens: int


class WaitingQueue:
    """The requests that wait for their first token. Lives on the event loop.

    A request enters when its fields are in order, before it is tokenized; its prompt counts from
    its submission to the engine on.

    Args:
        max_tokens: Limit of a request that gives none.
    """

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        # By the client's id; None before submission to the engine.
        self._requests: dict[str, QueuedPrompt | None] = {}
        # Sums over all prompts, kept since refusals under load ask for them; the first two by
        # priority.
        self._choices: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        self._prompts = 0
        self._limits = 0  # of the answers, in tokens

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def has_prompt(self, request_id: str) -> bool:
        """Return whether a request waits whose prompt was submitted to the engine."""
        return self._requests.get(request_id) is not None

    def enter(self, request_id: str) -> None:
        """Add a request whose prompt is not tokenized yet."""
        self._requests[request_id] = None

    def queue_prompt(self, request_id: str, request: Request) -> None:
        """Count the prompt of a request that is submitted to the engine."""
        params = request.params
        prompt = QueuedPrompt(
            len(request.prompt), request.priority, params.n, params.max_tokens or self._max_tokens
        )
        self._requests[request_id] = prompt
        self._count(prompt, 1)

    def leave(self, request_id: str) -> None:
        """Remove a request: its first token came, or it has ended."""
        if prompt := self._requests.pop(request_id, None):
            self._count(prompt, -1)

    def _count(self, prompt: QueuedPrompt, sign: int) -> None:
        self._choices[prompt.priority] += sign * prompt.choices
        self._tokens[prompt.priority] += sign * prompt.tokens
        self._prompts += sign
        self._limits += sign * prompt.max_tokens

    def ahead(self, priority: int) -> Ahead:
        """Return what goes before a new request of this priority."""
        return Ahead(
            sum(count for other, count in self._choices.items() if other <= priority),
            sum(count for other, count in self._tokens.items() if other <= priority),
        )

    def mean(self) -> QueuedPrompt | None:
        """Return the mean of the prompts, to whole numbers; None if there are none."""
        count = self._prompts
        if not count:
            return None
        return QueuedPrompt(
            tokens=round(self._tokens.total() / count),
            priority=0,
            choices=round(self._choices.total() / count),
            max_tokens=round(self._limits / count),
        )
