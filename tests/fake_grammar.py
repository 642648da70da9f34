"""A grammar that a person can check by hand: a table of states, and the tokens that lead from one
to another.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.fake_model import MASK_BYTES, VOCAB

END = VOCAB - 1  # the only end token


@dataclass(frozen=True)
class TableGrammar:
    """edges: of each state, from token to state; a state without any ends the text. ends: states
    where END may come.
    """

    edges: tuple[dict[int, int], ...]
    ends: frozenset[int] = frozenset()

    def matcher(self) -> "TableMatcher":
        return TableMatcher(self)

    @staticmethod
    def random(seed: int, states: int = 8) -> "TableGrammar":
        """Some states have one way on, others many; one in four may end, the last one does."""
        rng = random.Random(seed)
        edges: list[dict[int, int]] = []
        for _ in range(states - 1):
            width = rng.choice([1, 1, 2, 20])
            edges.append({token: rng.randrange(states) for token in rng.sample(range(END), width)})
        last = {rng.randrange(END): states - 1}
        return TableGrammar(
            (*edges[:-1], edges[-1] | last, {}),
            frozenset(rng.sample(range(states - 1), states // 4)),
        )


class TableMatcher:
    """A structure.Matcher. What it says is forced is what the masks leave anyway."""

    failure = ""

    def __init__(self, grammar: TableGrammar, state: int = 0):
        self._grammar, self._state = grammar, state

    def masks(self, drafted: Sequence[int] = ()) -> list[bytes]:
        found, ahead = [self._mask()], TableMatcher(self._grammar, self._state)
        for token in drafted:
            if token == END or not ahead.accept(token) or ahead.ended:
                break
            found.append(ahead._mask())
        return found

    def fits(self, tokens: Sequence[int], free: bool = False) -> int:
        ahead = TableMatcher(self._grammar, self._state)
        for n, token in enumerate(tokens):
            if token == END:
                return n + ahead._may_end
            if not ahead.accept(token) or (free and not ahead.ended and ahead.forced()):
                return n
        return len(tokens)

    def accept(self, token: int) -> bool:
        edges = self._grammar.edges[self._state]
        self._state = edges.get(token, self._state)
        return token in edges

    def forced(self) -> list[int]:
        tokens, seen, ahead = list[int](), {self._state}, TableMatcher(self._grammar, self._state)
        while len(edges := self._grammar.edges[ahead._state]) == 1 and not ahead._may_end:
            ((token, state),) = edges.items()
            tokens.append(token)
            ahead._state = state
            if state in seen:
                break
            seen.add(state)
        return tokens

    @property
    def ended(self) -> bool:
        return not self._grammar.edges[self._state]

    @property
    def _may_end(self) -> bool:
        return self._state in self._grammar.ends

    def _mask(self) -> bytes:
        tokens = [*self._grammar.edges[self._state], *([END] if self._may_end else [])]
        return sum(1 << token for token in tokens).to_bytes(MASK_BYTES, "little")
