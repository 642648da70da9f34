"""Which pages hold which tokens, so that a prompt can start behind a prefix that is cached."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.host.page_pool import PagePool


def root_digest(fingerprint: str, kv: str, group: int, salt: str) -> bytes:
    """Return the parent digest of a sequence's first page.

    It covers everything besides tokens that page contents depend on: the model (fingerprint), the
    number format of pages, the page group and the client's salt.
    """
    return sha256(
        f"{len(fingerprint)}:{fingerprint}:{kv}:{group}:{salt}".encode("utf-8", "surrogatepass")
    ).digest()


def child_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the identity of a full page: everything before it, and its own tokens."""
    return sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


@dataclass(slots=True)
class DigestChain:
    """Digests of a sequence's full pages in one page group, extended as tokens become known."""

    digests: list[bytes] = field(default_factory=list)
    published: int = 0  # leading pages that were offered to the prefix cache

    def extend(self, root: bytes, tokens: list[int], page_size: int, pages: int) -> None:
        """Add the digests up to page `pages`; `root` is the parent of the first."""
        for i in range(len(self.digests), pages):
            parent = self.digests[-1] if self.digests else root
            self.digests.append(child_digest(parent, tokens[i * page_size : (i + 1) * page_size]))


@dataclass(frozen=True)
class HashedPrompt:
    """Tokens of a prompt, and the digests of its full pages per page group."""

    tokens: list[int]
    chains: list[DigestChain]


@dataclass(frozen=True, slots=True)
class _Entry:
    page: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Published pages of one page group in one lane, by digest.

    Token ids are compared as well: equal digests are no proof of equal tokens.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.pool = PagePool(num_pages, self._forget)
        self._entries: dict[bytes, _Entry] = {}
        self._digest_of: dict[int, bytes] = {}

    def lookup(self, digests: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """Return the published page of each link of the chain, NO_PAGE where there is none."""
        return [self._find(digest, tokens, i * self.page_size) for i, digest in enumerate(digests)]

    def lookup_run(self, digests: Sequence[bytes], tokens: Sequence[int], first: int) -> list[int]:
        """Return the published pages of the links from `first` on, up to the first missing one."""
        pages = []
        for i in range(first, len(digests)):
            page = self._find(digests[i], tokens, i * self.page_size)
            if page == NO_PAGE:
                break
            pages.append(page)
        return pages

    def _find(self, digest: bytes, tokens: Sequence[int], start: int) -> int:
        entry = self._entries.get(digest)
        if entry is None or entry.tokens != tuple(tokens[start : start + self.page_size]):
            return NO_PAGE
        return entry.page

    def publish(self, digest: bytes, tokens: Sequence[int], page: int) -> None:
        """Make a full page findable, unless a page with the same content already is."""
        if digest in self._entries or page in self._digest_of:
            return
        self._entries[digest] = _Entry(page, tuple(tokens))
        self._digest_of[page] = digest
        self.pool.mark_cached(page)

    def has(self, page: int) -> bool:
        """Return whether a page can be found."""
        return page in self._digest_of

    def withdraw(self, page: int) -> None:
        """Make a held page unfindable, since its holder is about to write to it."""
        if self.has(page):
            self._forget(page)
            self.pool.unmark_cached(page)

    def adopt(
        self,
        digests: Sequence[bytes],
        tokens: Sequence[int],
        first: int,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish the links from `first` on, whose pages another engine computed.

        Args:
            write: Function called once, unless no page is new, with the page to fill for each link
                and NO_PAGE for links that are there or find no room.

        Returns:
            Number of pages that are new here: those that were missing, as far as the pool has pages
            besides the ones that sequences hold and the chain itself. No sequence holds them
            afterwards.
        """
        found = self.lookup(digests, tokens)
        missing = [i for i in range(first, len(digests)) if found[i] == NO_PAGE]
        # Hold the chain's own pages while allocating: otherwise they could be evicted for it.
        self.pool.share(page for page in found if page != NO_PAGE)
        count = min(len(missing), self.pool.available)
        new = dict(zip(missing[:count], self.pool.allocate(count), strict=True))
        try:
            if new:
                write([new.get(i, NO_PAGE) for i in range(first, len(digests))])
            for i, page in new.items():
                start = i * self.page_size
                self.publish(digests[i], tokens[start : start + self.page_size], page)
        finally:
            pages = [new.get(i, page) for i, page in enumerate(found)]
            self.pool.release([page for page in pages if page != NO_PAGE])
        return len(new)

    def _forget(self, page: int) -> None:
        del self._entries[self._digest_of.pop(page)]

    def __len__(self) -> int:
        return len(self._entries)
