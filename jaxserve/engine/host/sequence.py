"""Sequence: one choice of a request on its way through the engine."""

from dataclasses import dataclass, field

from jaxserve.engine.events import Finish, Times
from jaxserve.engine.host.grammar_constraint import Constraint
from jaxserve.engine.host.prefix_cache import DigestChain
from jaxserve.request import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens, pages and progress of one choice.

        0                 num_computed       len(tokens)   num_tokens
        |-- in pages, or ------|-- next chunk ---------------|
            being written             known     | sampled, not yet read by the host

    `in_flight` counts launched steps that are not committed yet; it alone says whether the device
    may still touch the sequence's row and pages.
    """

    id: int
    request: Request
    index: int  # of the choice
    seed: int
    max_tokens: int
    embeds: bool = False  # the prompt is embedded, and nothing is generated
    leader: "Sequence | None" = None  # choice 0, whose prompt pages the other choices share
    # The next chunk depends on what the host reads from the step before.
    waits_for_host: bool = False
    # With a constraint, the next token depends on every token before: each is read first.
    constraint: Constraint | None = None
    tokens: list[int] = field(default_factory=list)  # known ones: prompt and output
    num_computed: int = 0  # positions in pages or being written; with drafts in flight, at most
    in_flight: int = 0
    unread: int = 0  # sampled tokens in flight; at most, since drafted ones may be rejected
    draft_computed: int = 0  # positions that the draft model has in its pages, or being written
    settled: int = 0  # positions whose pages are written by committed steps
    room: int = 0  # positions for which every page group has pages
    lane: int = -1
    row: int = -1
    pages: list[list[int]] = field(default_factory=list)  # per page group
    chains: list[DigestChain] = field(default_factory=list)  # per page group
    newest_on_device: bool = False  # the row holds the newest token
    scored: int = 0  # prompt tokens whose log-probabilities were reported
    gave_way: bool = False  # waits since it left its row to another client
    preempted: bool = False  # gives its pages back when nothing is in flight, and starts over
    finish: Finish | None = None
    times: Times = field(default_factory=Times)
    prompt_len: int = field(init=False)
    limit: int = field(init=False)  # prompt and output together never have more tokens

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt)
        self.limit = self.prompt_len + self.max_tokens

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens, those included that the host has yet to read."""
        return len(self.tokens) + self.unread

    @property
    def num_known(self) -> int:
        """Return the number of computed tokens that the host has read."""
        return min(self.num_computed, len(self.tokens))

    @property
    def num_generated(self) -> int:
        """Return the number of output tokens, those included that the host has yet to read."""
        return self.num_tokens - self.prompt_len

    @property
    def remaining(self) -> int:
        """Return the number of tokens that are in no launched step yet."""
        return self.num_tokens - self.num_computed

    @property
    def decoding(self) -> bool:
        """Return whether only the newest token remains, which the row holds."""
        return self.newest_on_device and self.remaining == 1

    @property
    def streaming(self) -> bool:
        """Return whether the next chunk is a decode that needs nothing the host has yet to read.

        Equals `decoding and runnable` for sequences that never wait for the host, in one expression
        since it is evaluated for every row in every step.
        """
        return (
            self.newest_on_device
            and self.num_computed + 1 == len(self.tokens) + self.unread < self.limit
            and not (self.finish or self.preempted or self.waits_for_host or self.constraint)
        )

    @property
    def wants_single_steps(self) -> bool:
        """Return whether something is decided for the sequence after the next step.

        That is the next chunk of a prompt, a draft, or its row after a preemption.
        """
        waits = self.waits_for_host or self.constraint is not None
        return not self.streaming and (self.runnable or waits or self.preempted)

    @property
    def scores_prompt(self) -> bool:
        """Return whether the choice computes the prompt's log-probabilities: choice 0 does."""
        return self.request.params.prompt_logprobs is not None and self.index == 0

    @property
    def scoring(self) -> bool:
        """Return whether the next chunk has prompt tokens to score."""
        # By position, not by `scored`: how much the host has read must not decide the kind of step.
        return self.scores_prompt and self.num_computed < self.prompt_len

    @property
    def runnable(self) -> bool:
        """Return whether the next chunk may be launched now."""
        if self.finish or self.preempted or (self.waits_for_host and self.in_flight):
            return False
        if self.constraint and self.unread:
            return False
        # The last token of an output is never computed: no token comes behind it.
        wanted = self.embeds or self.num_tokens < self.limit
        return wanted and self.num_computed < self.num_tokens

    @property
    def leaving(self) -> bool:
        """Return whether the sequence gives its row back when nothing of it is in flight."""
        return self.preempted or self.finish is not None

    @property
    def request_has_begun(self) -> bool:
        """Return whether a choice of the request has had a row; choice 0 gets the first."""
        first = self.leader or self
        return bool(first.times.admitted or first.finish)

    @property
    def rank(self) -> tuple[int, int]:
        """Return the order of service: priority, then arrival; the lowest goes first."""
        return self.request.priority, self.id

    def takes_decoded(self, token: int, page_size: int) -> bool:
        """Commit a plain decode that changes nothing but the token; return whether it was one.

        False, without any effect, if more may follow from the token: an end, a full page to
        publish, or the grammar's next mask.
        """
        position = len(self.tokens)  # number of positions in pages once the decode is committed
        if (
            self.finish
            or self.preempted
            or self.constraint
            or position + 1 >= self.limit
            or position % page_size == 0
            or token in self.request.end_ids
        ):
            return False
        self.tokens.append(token)
        self.settled = position
        self.in_flight -= 1
        self.unread -= 1
        return True
