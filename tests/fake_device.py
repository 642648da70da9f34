"""Memory and arithmetic of one lane of the fake device: pages, tables and rows are lists.

The checksum of fake_model runs over what is read back from the pages through a row's table. So a
wrong page, stale content, a wrong prefix hit or a wrong fed-back token changes the answer, or
breaks an assertion first.

A group of slots has no pages: in a slot lies what every token of a sequence has added to it, from
the first on. A state cannot go back, so each chunk has to come right behind the tokens of the slot
that it reads; what it leaves in the slot that it writes, other rows neither read nor write in that
step. A chunk that verifies drafted tokens adds those that were accepted, and leaves what it has at
the end of a page in that page's slot.

The draft model is the same checksum over pages of its own, under the numbers of the first page
group without a window; every third of its tokens is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite, nan

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.plan import DRAFTED, FED_BACK, Admission, LanePlan, StepKind
from tests.fake_groups import FakeGroup, Slot
from tests.fake_model import VOCAB, Rules, penalty_of, tokens_in, weight, window_of

EMPTY: Slot = (-1, 0, nan)


@dataclass
class Row:
    """State of an admitted sequence."""

    tables: list[list[int]]  # per page group
    length: int
    rules: Rules
    penalty: int
    token: int | None = None  # the newest
    states: dict[int, list[Slot]] = field(default_factory=dict)  # by group, behind the newest step
    # Where the row follows a grammar: the tokens allowed at each place that it samples next.
    masks: list[list[int]] | None = None
    # The launch in which the row ended itself or drafted: the next one was planned before the host
    # knew how long the row is.
    ended_in: int | None = None
    drafted_in: int | None = None


@dataclass
class Chunk:
    """Tokens of one row in a step, the drafted ones included."""

    row: Row
    start: int
    tokens: list[int]
    samples: int
    spoilt: bool  # its results are not finite

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class DeviceLane:
    """Memory of one lane. Pages keep what was written to them until it is overwritten."""

    page_size: int
    groups: tuple[FakeGroup, ...]
    pages: list[list[list[Slot]]]  # per group, per page; per slot of a group of slots
    rows: dict[int, Row] = field(default_factory=dict)
    drafts: dict[int, list[Slot]] = field(default_factory=dict)  # pages of the draft model, by id

    @staticmethod
    def empty(config: EngineConfig, groups: tuple[FakeGroup, ...]) -> "DeviceLane":
        """Return the memory of a lane to which nothing was written."""
        pages = [
            [[] if group.slot else [EMPTY] * config.page_size for _ in range(pool.pages)]
            for group, pool in zip(groups, config.pools, strict=True)
        ]
        return DeviceLane(config.page_size, groups, pages)

    @property
    def _full_group(self) -> int:
        """Index of the group whose pages the draft model's have the numbers of."""
        return next(
            i for i, group in enumerate(self.groups) if group.window is None and not group.slot
        )

    # ---- Before a step

    def admit(self, admission: Admission, width: int) -> None:
        """Put a sequence into a row; width: pages of a table."""
        tables = [[*pages, *[NO_PAGE] * (width - len(pages))] for pages in admission.tables]
        penalty = penalty_of(admission.history or (), admission.prompt_tokens)
        rules = Rules.of_admission(admission)
        self.rows[admission.row] = Row(tables, admission.length, rules, penalty)

    def place(self, plan: LanePlan) -> None:
        """Write the plan's fresh pages into the tables."""
        for group, row, index, page in plan.fresh:
            table = self.rows[row].tables[group]
            seen = window_of(self.groups[group].window, self.rows[row].length)
            behind = seen.start // self.page_size
            if not self.groups[group].slot:
                assert NO_PAGE not in table[behind:index], (
                    f"row {row}: page {index} of its table is not next"
                )
            assert table[index] == NO_PAGE, f"row {row}: page {index} of its table is there"
            table[index] = page

    def mask(self, plan: LanePlan, size: int) -> None:
        """Take the plan's masks, of `size` bytes each.

        Masks hold for one step: a row that follows a grammar and lacks them cannot sample.
        """
        for row in self.rows.values():
            row.masks = None
        for row, words in plan.masks:
            assert self.rows[row].rules.follows and row in plan.rows and len(words) % size == 0
            self.rows[row].masks = [
                tokens_in(words[at : at + size]) for at in range(0, len(words), size)
            ]

    def chunks(
        self, plan: LanePlan, kind: StepKind, spoilt: list[bool], number: int
    ) -> list[Chunk]:
        """Return the plan's chunks as the device sees them.

        Positions come from the row's own length, and tokens are fed back to the row.
        """
        found = []
        at = 0
        for i, (row_id, size, samples) in enumerate(
            zip(plan.rows, plan.sizes, plan.samples, strict=True)
        ):
            row = self.rows[row_id]
            sent = plan.tokens[at : at + size]
            assert len(sent) == size and 0 <= samples <= size, "columns do not fit together"
            late = row.drafted_in == number - 1 and row.length <= plan.starts[i]
            assert late or row.ended_in in (number, number - 1) or row.length == plan.starts[i], (
                f"row {row_id} is {row.length} long; the plan says {plan.starts[i]}"
            )
            if kind == "decode":
                assert sent == [FED_BACK], "a decode step knows one fed-back token per row"
            tokens = [row.token if token == FED_BACK else token for token in sent]
            assert None not in tokens, f"row {row_id} has no token to feed back"
            if DRAFTED in tokens:
                assert kind == "verify" and tokens[1:] == [DRAFTED] * (samples - 1), (
                    "drafts follow the newest token"
                )
                tokens = self.draft(row, row.token or 0, samples - 1)
                row.drafted_in = number
            known = [token for token in tokens if token is not None]
            found.append(Chunk(row, row.length, known, samples, spoilt[i]))
            at += size
        assert at == len(plan.tokens), "tokens that belong to no chunk"
        assert len(set(plan.rows)) == len(plan.rows), "a row twice in one step"
        return found

    # ---- The draft model

    def draft(self, row: Row, token: int, count: int) -> list[int]:
        """Return the newest token and the `count` ones that the draft model says come behind it."""
        tokens = [token]
        window = self.groups[0].window
        for position in range(row.length, row.length + 1 + count):
            self.write_drafts(row, position, [tokens[-1]])
            seen = [self._drafted(row, p)[1] for p in range(position + 1)]
            total = sum(weight(p, seen[p]) for p in window_of(window, position))
            penalty = row.penalty + 2 * sum(token + 1 for token in tokens[1:])
            tokens.append(row.rules.choose(total, position + 1, penalty))
            tokens[-1] = (tokens[-1] + 1) % VOCAB if position % 3 == 0 else tokens[-1]
        return tokens[: 1 + count]

    def write_drafts(self, row: Row, start: int, tokens: list[int]) -> None:
        """Write tokens to the draft model's pages."""
        table = row.tables[self._full_group]
        for position, token in enumerate(tokens, start):
            page = table[position // self.page_size]
            assert page != NO_PAGE, f"position {position} has no page for the draft model"
            slots = self.drafts.setdefault(page, [EMPTY] * self.page_size)
            slots[position % self.page_size] = (position, token, 0)

    def _drafted(self, row: Row, position: int) -> Slot:
        """Return what the draft model has at a position: the same token as the model's pages."""
        group = self._full_group
        page = row.tables[group][position // self.page_size]
        at = position % self.page_size
        slot = self.drafts.get(page, [EMPTY] * self.page_size)[at]
        known = position >= row.length or slot[:2] == self.pages[group][page][at][:2]
        assert slot[0] == position and known, f"the draft model lacks position {position}"
        return slot

    def catch_up(self, plan: LanePlan) -> None:
        """Run a step of the draft model alone."""
        at = 0
        own: list[set[int]] = []  # pages that each row writes
        seen: list[set[int]] = []  # pages that each row reads or writes
        for row_id, start, size in zip(plan.rows, plan.starts, plan.sizes, strict=True):
            row = self.rows[row_id]
            assert start + size <= row.length, "the draft model runs ahead of the model"
            self.write_drafts(row, start, plan.tokens[at : at + size])
            for position in range(start + size):
                self._drafted(row, position)
            pages = row.tables[self._full_group][: (start + size - 1) // self.page_size + 1]
            seen.append(set(pages))
            own.append(set(pages[start // self.page_size :]))
            at += size
        for i, written in enumerate(own):
            assert all(written.isdisjoint(pages) for j, pages in enumerate(seen) if i != j), (
                "a page of two rows"
            )

    # ---- The model

    def write(self, chunks: list[Chunk], noise: Callable[[Chunk], float]) -> None:
        """Write the chunks' tokens to their pages, and read the states that they are added to."""
        written: set[tuple[int, int, int]] = set()
        for chunk in chunks:
            for group, table in enumerate(chunk.row.tables):
                if self.groups[group].slot:
                    continue
                for position, token in enumerate(chunk.tokens, chunk.start):
                    place = self._store(group, table, (position, token, noise(chunk)))
                    assert place not in written, f"{place} is written twice in one step"
                    written.add(place)
        for group in range(len(self.groups)):
            if self.groups[group].slot:
                self._read_states(group, chunks, noise)

    def _read_states(
        self, group: int, chunks: list[Chunk], noise: Callable[[Chunk], float]
    ) -> None:
        """Find for each row the state behind its chunk, should all of the chunk's tokens count."""
        reads = [self._slot_behind(group, chunk.row, chunk.start) for chunk in chunks]
        writes = [
            {self._slot_behind(group, chunk.row, end) for end in self._state_ends(chunk, chunk.end)}
            for chunk in chunks
        ]
        for i, (chunk, read) in enumerate(zip(chunks, reads, strict=True)):
            assert NO_PAGE not in writes[i] and (read != NO_PAGE or not chunk.start), (
                "a chunk has no slot"
            )
            others = [{reads[j], *writes[j]} for j in range(len(chunks)) if j != i]
            assert all(writes[i].isdisjoint(each) for each in others), "a slot of two rows"
            state = list(self.pages[group][read]) if read != NO_PAGE else []
            assert len(state) == chunk.start, (
                f"the slot holds {len(state)} tokens; position {chunk.start} comes next"
            )
            new = [(p, token, noise(chunk)) for p, token in enumerate(chunk.tokens, chunk.start)]
            chunk.row.states[group] = state + new

    def _slot_behind(self, group: int, row: Row, tokens: int) -> int:
        """Return the slot of the state behind so many tokens; NO_PAGE behind none."""
        return row.tables[group][(tokens - 1) // self.page_size] if tokens else NO_PAGE

    def _state_ends(self, chunk: Chunk, end: int) -> list[int]:
        """Return behind how many tokens a chunk leaves a state, if `end` tokens are computed.

        A device leaves none behind a page whose slot the next page has too: it would be overwritten
        here.
        """
        of_pages = [n for n in range(chunk.start + 1, end) if n % self.page_size == 0]
        return [*of_pages, end]

    def _write_states(self, chunk: Chunk, end: int) -> None:
        """Leave the states of a chunk of which `end` tokens count, those before it included."""
        for group, state in chunk.row.states.items():
            for length in self._state_ends(chunk, end):
                slot = self._slot_behind(group, chunk.row, length)
                self.pages[group][slot] = state[:length]

    def _store(self, group: int, table: list[int], slot: Slot) -> tuple[int, int, int]:
        """Write a token to its page; return group, page and place in the page."""
        page = table[slot[0] // self.page_size]
        at = slot[0] % self.page_size
        assert page != NO_PAGE, f"position {slot[0]} has no page"
        self.pages[group][page][at] = slot
        return group, page, at

    def read(self, row: Row, query: int) -> float:
        """Return the checksum of what a query sees in the first group.

        What it sees in the other groups must be the same, and so must be what layers see that
        read the entries of another one.
        """
        seen, *others = (
            self._slots(row, i, window_of(window, query))
            for i, group in enumerate(self.groups)
            for window in (group.window, *group.readers)
        )
        unseen = 0.0
        for other in others:
            # Windows of any length end with the query.
            common = zip(reversed(seen), reversed(other), strict=False)
            assert all(one[:2] == two[:2] for one, two in common), "page groups differ"
            # Times 0, so that a NaN in any group shows.
            unseen += sum(0 * slot[2] for slot in other)
        return sum(weight(p, token) + error for p, token, error in seen) + unseen

    def _slots(self, row: Row, group: int, positions: range) -> list[Slot]:
        """Return what a group has of neighbouring positions."""
        if self.groups[group].slot:
            slots = row.states[group][positions.start : positions.stop]
        else:
            slots = self._slots_of_pages(row, group, positions)
        for position, slot in zip(positions, slots, strict=True):
            assert slot[0] == position, (
                f"position {position} reads what was written for position {slot[0]}"
            )
        return slots

    def _slots_of_pages(self, row: Row, group: int, positions: range) -> list[Slot]:
        size = self.page_size
        first = positions.start // size
        slots: list[Slot] = []
        for number in range(first, (positions.stop - 1) // size + 1):
            page = row.tables[group][number]
            assert page != NO_PAGE, f"position {number * size} is not kept in group {group}"
            slots += self.pages[group][page]
        return slots[positions.start - first * size : positions.stop - first * size]

    def verify(self, chunk: Chunk, offset: int) -> tuple[list[int], bool]:
        """Return the accepted tokens and the one behind them, and whether all was finite."""
        row = chunk.row
        new: list[int] = []
        sampled = range(chunk.end - max(chunk.samples, 1), chunk.end)
        if chunk.start < sampled.start:
            self.read(row, chunk.start)  # the query that reaches back furthest
        for position in sampled:
            total = self.read(row, position) + (nan if chunk.spoilt else 0)
            if not isfinite(total):
                return [0] * min(chunk.samples, 1), False
            if not chunk.samples:
                return [], True
            mask = None
            if row.rules.follows:
                mask = self._mask_at(row, position - (chunk.end - chunk.samples))
            new.append(row.rules.choose(int(total) + offset, position + 1, row.penalty, mask))
            row.penalty += 2 * (new[-1] + 1)
            if position + 1 < chunk.end and chunk.tokens[position + 1 - chunk.start] != new[-1]:
                break
        return new, True

    def _mask_at(self, row: Row, place: int) -> list[int]:
        """Return the allowed tokens; none for a place behind the end of the text."""
        assert row.masks, "a row that follows a grammar has no mask"
        return row.masks[place] if place < len(row.masks) else []

    def embed(self, chunk: Chunk, offset: int) -> list[float]:
        """Return the embedding of a prompt that ends with the chunk."""
        return [self.read(chunk.row, chunk.end - 1) + offset, float(chunk.end)]

    def advance(self, chunk: Chunk, new: list[int]) -> None:
        """Move the row on by a chunk and the tokens that came of it."""
        chunk.row.length = chunk.end - chunk.samples + len(new)
        self._write_states(chunk, chunk.row.length)
        if new:
            chunk.row.token = new[-1]
