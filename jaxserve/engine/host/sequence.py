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

    in_flight counts launched steps that are not committed yet: it alone says what the device may
    still touch.
    """

    id: int
    request: Request
    index: int
    seed: int
    max_tokens: int
    embeds: bool = False  # its prompt is embedded, and that is all
    leader: "Sequence | None" = None  # choice 0, whose prompt pages the other choices share
    waits_for_host: bool = (
        False  # its next chunk depends on what the host reads from the step before
    )
    constraint: Constraint | None = (
        None  # what may come next depends on every token before: it is read first
    )
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    in_flight: int = 0
    unread: int = 0  # sampled tokens in flight, at most: of drafted ones, all may be right
    draft_computed: int = 0  # positions that the draft model has in its pages, or has being written
    settled: int = 0  # positions whose pages are written by committed steps
    room: int = 0  # the end of its shortest table, in positions
    lane: int = -1
    row: int = -1
    pages: list[list[int]] = field(default_factory=list)  # per page group
    chains: list[DigestChain] = field(default_factory=list)  # per page group
    newest_on_device: bool = False  # the row holds the newest token
    scored: int = 0  # prompt tokens whose log-probabilities were reported
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
        return len(self.tokens) + self.unread

    @property
    def num_known(self) -> int:
        """Computed tokens that the host has read."""
        return min(self.num_computed, len(self.tokens))

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens not handed to the device yet."""
        return self.num_tokens - self.num_computed

    @property
    def decoding(self) -> bool:
        """What remains is the newest token, which the row holds."""
        return self.newest_on_device and self.remaining == 1

    @property
    def streaming(self) -> bool:
        """Its next chunk is a decode, which may be launched now whatever the host has yet to
        read."""
        return (
            self.newest_on_device
            and self.num_computed + 1 == len(self.tokens) + self.unread < self.limit
            and not (self.finish or self.preempted or self.waits_for_host or self.constraint)
        )

    @property
    def wants_single_steps(self) -> bool:
        """Something is to be decided for it after the next step: a chunk of its prompt, a draft,
        its way back.
        """
        waits = self.waits_for_host or self.constraint is not None
        return not self.streaming and (self.runnable or waits or self.preempted)

    @property
    def scores_prompt(self) -> bool:
        """The client wants log-probabilities of the prompt; choice 0 computes them."""
        return self.request.params.prompt_logprobs is not None and self.index == 0

    @property
    def scoring(self) -> bool:
        """Its next chunk has prompt tokens to score: by position, whatever was read meanwhile."""
        return self.scores_prompt and self.num_computed < self.prompt_len

    @property
    def runnable(self) -> bool:
        """Whether its next chunk may be launched now."""
        if self.finish or self.preempted or (self.waits_for_host and self.in_flight):
            return False
        if self.constraint and self.unread:
            return False
        wanted = (
            self.embeds or self.num_tokens < self.limit
        )  # after the last token of an output comes nothing
        return wanted and self.num_computed < self.num_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return self.request.priority, self.id

    def takes_decoded(self, token: int, page_size: int) -> bool:
        """Commit a decode of which nothing comes but its token; False, and nothing is done, where
        more may come.
        """
        position = len(self.tokens)  # where its page is written up to
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
