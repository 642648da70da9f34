"""Prefixes that the sequences of a lane share: found in its caches, and published there."""

from jaxserve.config import EngineConfig
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.events import FinishReason
from jaxserve.engine.host.kv_group import KVGroup
from jaxserve.engine.host.prefix_cache import DigestChain, root_digest
from jaxserve.engine.host.sequence import Sequence
from jaxserve.engine.host.state_group import StateGroup


class SharedPrefixes:
    """Finder and publisher of a lane's prefixes, each of which has its pages in every page group.

    Args:
        groups: Page groups of the lane.
        fingerprint: Identity of the model, on which the contents of pages depend.
    """

    def __init__(self, config: EngineConfig, groups: list[KVGroup], fingerprint: str):
        self._config = config
        self._groups = groups
        self._fingerprint = fingerprint

    # ---- Finding cached prefixes

    def hit(self, seq: Sequence) -> list[list[int]]:
        """Return the pages per group of the longest cached prefix of a waiting sequence.

        At least one token is left to compute, since its logits are needed. NO_PAGE stands for pages
        that the next token does not attend to.
        """
        # Scoring a prompt takes the hidden states of all its tokens, which pages do not hold.
        if not self._config.prefix_cache or seq.scores_prompt:
            return [[] for _ in self._groups]
        self.extend_chains(seq.chains, seq.tokens, seq.request.salt, len(seq.tokens) - 1)
        return self.cached(seq.tokens, seq.chains)

    def cached(self, tokens: list[int], chains: list[DigestChain]) -> list[list[int]]:
        """Return the pages per group of the longest cached prefix that leaves a token to compute.

        Args:
            chains: Digests of `tokens`, as far as the prefix may reach.
        """
        size = self._config.page_size
        limit = (len(tokens) - 1) // size
        found = [
            group.cache.lookup(chain.digests[:limit], tokens)
            for group, chain in zip(self._groups, chains, strict=True)
        ]
        length = self._covered(found, limit)
        firsts = [group.policy.first_needed(length * size) for group in self._groups]
        return [
            [NO_PAGE] * first + pages[first:length]
            for pages, first in zip(found, firsts, strict=True)
        ]

    def _covered(self, found: list[list[int]], limit: int) -> int:
        """Return the longest prefix, in pages and at most `limit`, that every group covers."""
        # Deterministic chunks begin at fixed borders, so a prefix has to end at one.
        step = 1
        if self._config.deterministic:
            step = self._config.chunk_border // self._config.page_size
        covered = limit // step * step
        while True:
            length = covered
            for group, pages in zip(self._groups, found, strict=True):
                covered = group.policy.covered(pages, covered) // step * step
            if covered == length:
                return length

    # ---- Publishing pages

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's settled full pages findable."""
        if not self._config.prefix_cache:
            return
        length = self._publishable(seq)
        for group, chain, pages in zip(self._groups, seq.chains, seq.pages, strict=True):
            full = length // group.policy.page_size
            if chain.published < full:
                self.extend_chains(seq.chains, seq.tokens, seq.request.salt, length)
                group.publish(chain, seq.tokens, pages, full, seq.prompt_len)

    def publish_last_states(self, seq: Sequence) -> None:
        """Make the states behind the last whole page of a sequence findable that leaves its row."""
        if seq.finish and seq.finish.reason == FinishReason.ERROR:
            return  # Its numbers may not be finite.
        for i, group in enumerate(self._groups):
            if isinstance(group, StateGroup) and group.states.keeps_last:
                self.extend_chains(seq.chains, seq.tokens, seq.request.salt, seq.settled)
                group.publish_last(seq.chains[i], seq.tokens, seq.pages[i], seq.settled)

    def _publishable(self, seq: Sequence) -> int:
        """Return how many settled positions other sequences may share."""
        if not self._config.deterministic:
            return seq.settled
        # The bits of a page are known only if prefill steps computed it between fixed borders.
        if seq.scores_prompt:
            return 0
        border = self._config.chunk_border
        return min(seq.settled, seq.prompt_len // border * border)

    def extend_chains(
        self, chains: list[DigestChain], tokens: list[int], salt: str, length: int
    ) -> None:
        """Extend the chains of every group to the full pages of the first `length` tokens.

        The result is alike in every lane.
        """
        for group, chain in enumerate(chains):
            root = root_digest(self._fingerprint, self._config.kv, group, salt)
            size = self._groups[group].policy.page_size
            chain.extend(root, tokens, size, length // size)
