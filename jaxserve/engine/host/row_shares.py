"""RowShares: who has rows at one moment, and who precedes whom."""

from collections import Counter
from collections.abc import Sequence as Seq
from functools import cached_property

from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.waiting_choices import WaitingChoices

# A client gives rows up only for one that asks for more than so many times less: between equals,
# each would interrupt what the other has begun.
HEAVIER = 4

Precedence = tuple[int, int, int]  # priority, level among the sequences of its client, id


class RowShares:
    """Rows of each client at one moment.

    Args:
        running: Sequences that have a row and keep it.
        num_rows: Rows of all lanes.
    """

    def __init__(self, running: Seq[Sequence], waiting: WaitingChoices, num_rows: int):
        self.running = running
        self.held = Counter(seq.request.client for seq in running)  # rows by client
        self.num_free = num_rows - len(running)  # rows, those included that are about to come free
        # Rows that each client may hold while others wait.
        self.share = max(1, num_rows // max(1, len(self.held.keys() | waiting.clients)))
        self._waiting = waiting

    @property
    def may_give_way(self) -> bool:
        """Return whether a client holds more than its share, and another one asks for far less."""
        above = [client for client, rows in self.held.items() if rows > self.share]
        if not above:
            return False
        most = max(map(self._asked, above))
        return any(HEAVIER * self._asked(client) < most for client in self._waiting.clients)

    @cached_property
    def places(self) -> dict[int, int]:
        """Number of running sequences of its client that precede each one, by sequence id."""
        counts = Counter[str]()
        places: dict[int, int] = {}
        for seq in sorted(self.running, key=lambda each: each.rank):
            places[seq.id] = counts[seq.request.client]
            counts[seq.request.client] += 1
        return places

    def precedence(self, seq: Sequence) -> Precedence:
        """Return the order in which sequences with a row get pages; the lowest goes first.

        Within a priority, the first two sequences of each client precede the next six of any
        client, these the next 24, and so on; then arrival decides. Thus a light client keeps its
        pages beside a heavy one, and the first sequence of all goes on to its end.
        """
        place = self.places.get(seq.id, self.held[seq.request.client])
        return seq.request.priority, place.bit_length() // 2, seq.id

    @property
    def above(self) -> list[Sequence]:
        """Return the sequences that their clients have above their shares of rows."""
        return [seq for seq in self.running if self.places[seq.id] >= self.share]

    @property
    def above_in_pages(self) -> list[Sequence]:
        """Return what clients with more than an even share of the pages have beside one sequence.

        Pages are taken to be all in use.
        """
        held = Counter[str]()
        for seq in self.running:
            held[seq.request.client] += seq.room
        share = held.total() // max(1, len(held.keys() | self._waiting.clients))
        return [
            seq for seq in self.running if self.places[seq.id] and held[seq.request.client] > share
        ]

    def victims(self, claimants: Seq[Sequence], above: Seq[Sequence]) -> list[Sequence]:
        """Return the running sequences that give way to waiting ones, at most one for each.

        Args:
            above: Sequences that may give way: to clients that ask for far less than their own, and
                to no lower priority. Those with most of their client before them do first.
        """
        giving = sorted(above, key=lambda seq: (self.places[seq.id], seq.id), reverse=True)
        asked = {client: self._asked(client) for client in {s.request.client for s in giving}}
        most = max(asked.values(), default=0)
        found: list[Sequence] = []
        for claimant in claimants:
            weight = HEAVIER * self._asked(claimant.request.client)
            if weight >= most:
                continue
            for seq in giving:
                is_urgent = claimant.request.priority <= seq.request.priority
                if is_urgent and asked[seq.request.client] > weight:
                    found.append(seq)
                    giving.remove(seq)
                    break
        return found

    def _asked(self, client: str) -> int:
        """Return how many rows a client has or waits for."""
        return self.held[client] + self._waiting.number_of(client)
