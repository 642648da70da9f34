"""WaitingChoices: the sequences without a row, and the order in which they get one."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from jaxserve.engine.host.sequence import Sequence

# Priority, whether it goes late, virtual finish time, rows of its client's other requests, id.
Turn = tuple[int, bool, float, int, int]

FEW_CLIENTS = 64  # whose turns are kept in any case


class WaitingChoices:
    """Sequences without a row, in one queue for each client.

    Rows are given by self-clocked fair queueing (Golestani 1994), whose packets are requests and
    whose unit is a choice: a request has a virtual finish time, which lies as many units as it has
    choices behind that of its client's request before, or behind the virtual time at which it is
    the next of its client. The least goes first. Thus a request of one choice goes before the many
    choices or requests of another client, however early these came, while requests of equal
    clients go by arrival. The priority of a request precedes all of this.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[Sequence]] = {}  # by client, in rank order; none is empty
        self._count = 0
        self._now = 0.0  # virtual time
        # Virtual time at which each client's next request starts. It is fixed while one waits.
        self._starts: dict[str, float] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences, client by client."""
        for queue in self._queues.values():
            yield from queue

    @property
    def clients(self) -> set[str]:
        """Return the clients with a sequence that waits."""
        return set(self._queues)

    def number_of(self, client: str) -> int:
        """Return how many sequences of a client wait."""
        return len(self._queues.get(client, ()))

    def add(self, seq: Sequence) -> None:
        """Add a sequence that is new, or that has given its row back."""
        client = seq.request.client
        if client not in self._queues:
            self._queues[client] = []
            self._starts[client] = max(self._now, self._starts.get(client, 0.0))
        insort(self._queues[client], seq, key=lambda waiting: waiting.rank)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence that has ended without a row."""
        client = seq.request.client
        self._queues[client].remove(seq)
        self._count -= 1
        if not self._queues[client]:
            del self._queues[client]
        if not self._queues:
            # Nobody waits, so nobody is ahead of others any more.
            self._starts.clear()
            self._now = 0.0

    def take(self, seq: Sequence) -> None:
        """Remove a sequence that is given a row, which moves virtual time on."""
        client = seq.request.client
        choices = seq.request.params.n
        if not seq.request_has_begun:
            self._starts[client] += choices
        self._now = max(self._now, self._starts[client] - choices + seq.index + 1)
        self.remove(seq)
        self._forget_old_starts()

    def in_turn(
        self, running: Iterable[Sequence], share: int, is_ready: Callable[[Sequence], bool]
    ) -> Iterator[tuple[Sequence, bool]]:
        """Yield the sequences in the order in which they get rows; they may be taken meanwhile.

        Within a priority, clients that hold less than their share go first, and requests beside
        which their clients have no other: these end sooner with all of their choices than if they
        waited for each. What gave way to another client goes late as long as its client has a row.
        With each sequence comes whether it is within the share of its client.

        Args:
            running: Sequences with a row.
            share: Number of rows that each client may hold while others wait.
            is_ready: Function that returns whether a sequence can begin; others are left out.
        """
        queues = {client: iter(list(queue)) for client, queue in self._queues.items()}
        rows = Counter(seq.request.client for seq in running)
        of_request = Counter(seq.request.id for seq in running)
        finishes = dict(self._starts)

        def head(client: str) -> list[tuple[Turn, bool, str, Sequence]]:
            seq = next(filter(is_ready, queues[client]), None)
            if seq is None:
                return []
            choices = seq.request.params.n
            if seq.index == 0 and not seq.request_has_begun:
                finishes[client] += choices
            is_within = rows[client] < share
            beside = rows[client] - of_request[seq.request.id]
            gives_way = seq.gave_way and rows[client] > 0
            is_late = gives_way or not (is_within or beside == 0)
            priority, id = seq.rank
            turn = (priority, is_late, finishes[client], beside, id)
            return [(turn, is_within, client, seq)]

        heads = [entry for client in queues for entry in head(client)]
        heapify(heads)
        while heads:
            _, is_within, client, seq = heappop(heads)
            yield seq, is_within
            rows[client] += 1
            of_request[seq.request.id] += 1
            for entry in head(client):
                heappush(heads, entry)

    def _forget_old_starts(self) -> None:
        """Leave out the times of clients that do not wait, once they are most of all."""
        if len(self._starts) > 2 * len(self._queues) + FEW_CLIENTS:
            self._starts = {
                client: start
                for client, start in self._starts.items()
                if start > self._now or client in self._queues
            }
