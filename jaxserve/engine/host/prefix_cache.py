"""Which pages hold which tokens, so that a prompt that begins like an earlier one starts further
on.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from jaxserve.engine.host.page_pool import PagePool
from jaxserve.engine.plan import NO_PAGE


def root_digest(fingerprint: str, kv: str, group: int, salt: str) -> bytes:
    """The parent of a sequence's first page: model (fingerprint), what pages hold, page group, the
    client's salt.
    """
    return sha256(
        f"{len(fingerprint)}:{fingerprint}:{kv}:{group}:{salt}".encode("utf-8", "surrogatepass")
    ).digest()


def child_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a full page: everything before it, and its own tokens."""
    return sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()


@dataclass(slots=True)
class Chain:
    """Digests of a sequence's full pages, extended as its tokens become known, and how many of them
    are published.
    """

    digests: list[bytes] = field(default_factory=list)
    published: int = 0

    def extend(self, root: bytes, tokens: list[int], page_size: int, pages: int) -> None:
        for i in range(len(self.digests), pages):
            parent = self.digests[-1] if self.digests else root
            self.digests.append(child_digest(parent, tokens[i * page_size : (i + 1) * page_size]))


@dataclass(frozen=True, slots=True)
class _Entry:
    page: int
    tokens: tuple[int, ...]


class PrefixCache:
    """Published pages of one page group in one lane, by digest. Token ids are compared too: a
    digest is no proof.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.page_size = page_size
        self.pool = PagePool(num_pages, self._forget)
        self._entries: dict[bytes, _Entry] = {}
        self._digest_of: dict[int, bytes] = {}

    def lookup(self, digests: Sequence[bytes], tokens: Sequence[int]) -> list[int]:
        """The published page of each link of the chain, NO_PAGE where there is none."""
        return [self._find(digest, tokens, i * self.page_size) for i, digest in enumerate(digests)]

    def run(self, digests: Sequence[bytes], tokens: Sequence[int], first: int) -> list[int]:
        """The published pages of the chain's links from `first` on, up to one that there is none
        of.
        """
        pages = []
        for i in range(first, len(digests)):
            if (page := self._find(digests[i], tokens, i * self.page_size)) == NO_PAGE:
                break
            pages.append(page)
        return pages

    def _find(self, digest: bytes, tokens: Sequence[int], start: int) -> int:
        entry = self._entries.get(digest)
        same = entry is not None and entry.tokens == tuple(tokens[start : start + self.page_size])
        return entry.page if entry and same else NO_PAGE

    def publish(self, digest: bytes, tokens: Sequence[int], page: int) -> None:
        """Make a full page findable. A page with the same content that was there first stays the
        one to be found.
        """
        if digest in self._entries or page in self._digest_of:
            return
        self._entries[digest] = _Entry(page, tuple(tokens))
        self._digest_of[page] = digest
        self.pool.keep(page)

    def adopt(
        self,
        digests: Sequence[bytes],
        tokens: Sequence[int],
        first: int,
        write: Callable[[list[int]], None],
    ) -> int:
        """Publish the chain's links from `first` on, whose pages another engine computed; how many
        are new here.

        As many as there is room for, beside what sequences hold and the chain itself; nobody holds
        them afterwards. write: called once, unless none is new, with a page to fill for each link,
        NO_PAGE where none is to be.
        """
        found = self.lookup(digests, tokens)
        missing = [i for i in range(first, len(digests)) if found[i] == NO_PAGE]
        self.pool.share(page for page in found if page != NO_PAGE)
        new = dict(
            zip(missing, self.pool.allocate(min(len(missing), self.pool.available)), strict=False)
        )
        try:
            if new:
                write([new.get(i, NO_PAGE) for i in range(first, len(digests))])
            for i, page in new.items():
                self.publish(
                    digests[i], tokens[i * self.page_size : (i + 1) * self.page_size], page
                )
        finally:
            self.pool.release(
                [new.get(i, page) for i, page in enumerate(found) if new.get(i, page) != NO_PAGE]
            )
        return len(new)

    def _forget(self, page: int) -> None:
        del self._entries[self._digest_of.pop(page)]

    def __len__(self) -> int:
        return len(self._entries)
