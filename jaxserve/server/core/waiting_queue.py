"""Requests from their admission to their first token."""

from collections import Counter
from collections.abc import Callable, Hashable, Set
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
class Newcomer:
    """A request for which others may have to leave the queue."""

    client: str
    priority: int
    requests: int = 0  # 1 before it has entered
    tokens: int = 0  # of its prompt, which is not counted yet


@dataclass(frozen=True, slots=True)
class Ahead:
    """Choices and prompt tokens that go before a request in the queue."""

    choices: int
    prompt_tokens: int


class Sums[K: Hashable]:
    """Sums of whole numbers by key.

    A key whose sum is 0 is forgotten, since clients come and go.
    """

    def __init__(self) -> None:
        self.by_key: Counter[K] = Counter()
        self.total = 0

    def add(self, key: K, number: int) -> None:
        self.total += number
        self.by_key[key] += number
        if not self.by_key[key]:
            del self.by_key[key]


class WaitingQueue:
    """The requests that wait for their first token. Lives on the event loop.

    A request enters when its fields are in order, before it is tokenized; its prompt counts from
    its submission to the engine on.

    Args:
        max_tokens: Limit of a request that gives none.
    """

    def __init__(self, max_tokens: int):
        self._max_tokens = max_tokens
        self._clients: dict[str, str] = {}  # by the client's id of its request, in order of arrival
        self._prompts: dict[str, QueuedPrompt] = {}  # those that were submitted to the engine
        self._calls: dict[str, str] = {}  # ids of their calls
        self._waiting_of_call = Sums[str]()
        self._begun = set[str]()  # calls of which a request has a row
        # Sums over all prompts, kept since refusals under load ask for them.
        self._requests = Sums[str]()  # by client
        self._choices = Sums[tuple[int, str]]()  # by priority and client
        self._choices_of = Sums[str]()  # by client
        self._tokens = Sums[tuple[int, str]]()  # of prompts, by priority and client
        self._tokens_of = Sums[str]()  # of prompts, by client
        self._limits = 0  # of the answers, in tokens

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._clients

    def __len__(self) -> int:
        return len(self._clients)

    def has_prompt(self, request_id: str) -> bool:
        """Return whether a request waits whose prompt was submitted to the engine."""
        return request_id in self._prompts

    def enter(self, request_id: str, client: str = "", call: str = "") -> None:
        """Add a request whose prompt is not tokenized yet.

        Args:
            call: Id that several requests of one call have; by default the request is alone.
        """
        self._clients[request_id] = client
        self._calls[request_id] = call or request_id
        self._waiting_of_call.add(call or request_id, 1)
        self._requests.add(client, 1)

    def queue_prompt(self, request_id: str, request: Request) -> None:
        """Count the prompt of a request that is submitted to the engine."""
        params = request.params
        prompt = QueuedPrompt(
            len(request.prompt), request.priority, params.n, params.max_tokens or self._max_tokens
        )
        self._prompts[request_id] = prompt
        self._count(prompt, request.client, 1)

    def begin(self, request_id: str) -> None:
        """Take note that a request has a row: its call does not leave for others any more."""
        if request_id in self._calls:
            self._begun.add(self._calls[request_id])

    def leave(self, request_id: str) -> None:
        """Remove a request: its first token came, or it has ended."""
        client = self._clients.pop(request_id, None)
        if client is None:
            return
        call = self._calls.pop(request_id)
        self._waiting_of_call.add(call, -1)
        if not self._waiting_of_call.by_key[call]:
            self._begun.discard(call)
        self._requests.add(client, -1)
        if prompt := self._prompts.pop(request_id, None):
            self._count(prompt, client, -1)

    def _count(self, prompt: QueuedPrompt, client: str, sign: int) -> None:
        key = prompt.priority, client
        self._choices.add(key, sign * prompt.choices)
        self._choices_of.add(client, sign * prompt.choices)
        self._tokens.add(key, sign * prompt.tokens)
        self._tokens_of.add(client, sign * prompt.tokens)
        self._limits += sign * prompt.max_tokens

    # ---- What waits

    @property
    def clients(self) -> set[str]:
        """Clients with a request that waits."""
        return set(self._requests.by_key)

    def choices_of(self, client: str) -> int:
        """Return how many choices of a client wait in the engine."""
        return self._choices_of.by_key[client]

    @property
    def all(self) -> Ahead:
        """Everything that waits in the engine."""
        return Ahead(self._choices.total, self._tokens.total)

    def ahead(self, priority: int, client: str, choices: int) -> Ahead:
        """Return what goes before the last choice of a new request.

        That is all of a higher priority, and in its own all of its client, and of each other client
        no more than that and the request have (see the engine's WaitingChoices).

        Args:
            choices: Number of the request's choices.
        """
        turns = choices + self._choices.by_key[priority, client]
        ahead_choices = 0
        ahead_tokens = 0
        for key, count in self._choices.by_key.items():
            other, name = key
            if other > priority:
                continue
            first = count if other < priority or name == client else min(count, turns)
            ahead_choices += first
            ahead_tokens += self._tokens.by_key[key] * first // count
        return Ahead(ahead_choices, ahead_tokens)

    def mean(self) -> QueuedPrompt | None:
        """Return the mean of the prompts, to whole numbers; None if there are none."""
        count = len(self._prompts)
        if not count:
            return None
        return QueuedPrompt(
            tokens=round(self._tokens.total / count),
            priority=0,
            choices=round(self._choices.total / count),
            max_tokens=round(self._limits / count),
        )

    # ---- Who gives a place up

    def displaced_by(self, newcomer: Newcomer, requests: int, tokens: int) -> list[str] | None:
        """Return the requests that leave the queue for a new one, None if not enough can.

        They are the newest of the clients with most, which keep no less than the client of the new
        one has. Requests of a higher priority stay, as do those that are not in the engine yet, and
        all of a call of which one has a row.

        Args:
            requests: Number of requests that have to leave.
            tokens: Number of prompt tokens that have to leave with them or others.
        """
        if requests <= 0 and tokens <= 0:
            return []
        held = Counter(self._requests.by_key)
        held[newcomer.client] += newcomer.requests
        leaving = self._leaving(newcomer, requests, held, lambda prompt: 1)
        if leaving is None:
            return None
        held = Counter(self._tokens_of.by_key)
        held[newcomer.client] += newcomer.tokens
        for id in leaving:
            held[self._clients[id]] -= self._prompts[id].tokens
            tokens -= self._prompts[id].tokens
        others = self._leaving(newcomer, tokens, held, lambda prompt: prompt.tokens, set(leaving))
        return None if others is None else leaving + others

    def _leaving(
        self,
        newcomer: Newcomer,
        number: int,
        held: Counter[str],
        size: Callable[[QueuedPrompt], int],
        left: Set[str] = frozenset(),
    ) -> list[str] | None:
        """Return requests with at least `number` of what `held` says of each client."""
        if number <= 0:
            return []
        if max(held.values()) <= held[newcomer.client]:
            return None
        found: list[str] = []
        candidates = self._may_leave(newcomer.priority, left)
        while number > 0:
            fullest = max(candidates, key=lambda client: held[client], default=None)
            if fullest is None:
                return None
            id = candidates[fullest].pop()
            if not candidates[fullest]:
                del candidates[fullest]
            held[fullest] -= size(self._prompts[id])
            number -= size(self._prompts[id])
            if held[fullest] < held[newcomer.client]:
                return None
            found.append(id)
        return found

    def _may_leave(self, priority: int, left: Set[str]) -> dict[str, list[str]]:
        """Return the requests of each client that may leave; the last one does first."""
        may_leave: dict[str, list[str]] = {}
        for id, client in self._clients.items():
            prompt = self._prompts.get(id)
            has_begun = self._calls[id] in self._begun
            if prompt and prompt.priority >= priority and not has_begun and id not in left:
                may_leave.setdefault(client, []).append(id)
        for ids in may_leave.values():
            ids.sort(key=lambda id: self._prompts[id].priority)  # stable: newest last in each
        return may_leave
