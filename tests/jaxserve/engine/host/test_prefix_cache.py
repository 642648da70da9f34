"""PrefixCache, and the digests by which pages are found."""

from hashlib import sha256
from itertools import takewhile
from struct import pack

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import PAGE_DTYPES
from jaxserve.config.kv_policy import NO_PAGE
from jaxserve.engine.host.prefix_cache import DigestChain, PrefixCache, child_digest, root_digest

ROOT = root_digest("model", "int8", 0, "")


def chain_of(tokens: list[int], page_size: int, root: bytes = ROOT) -> DigestChain:
    chain = DigestChain()
    chain.extend(root, tokens, page_size, len(tokens) // page_size)
    return chain


def publish_tokens(cache: PrefixCache, tokens: list[int], root: bytes = ROOT) -> list[int]:
    """Publish the full pages of a sequence with these tokens; return the pages, still held."""
    size = cache.page_size
    chain = chain_of(tokens, size, root)
    pages = cache.pool.allocate(len(tokens) // size)
    for i, page in enumerate(pages):
        cache.publish(chain.digests[i], tokens[i * size : (i + 1) * size], page)
    return pages


def find_pages(cache: PrefixCache, tokens: list[int], root: bytes = ROOT) -> list[int]:
    """Return the pages that are found, up to the first that is missing."""
    pages = cache.lookup(chain_of(tokens, cache.page_size, root).digests, tokens)
    return list(takewhile(lambda page: page != NO_PAGE, pages))


# ---- Digests


def test_digests_are_sha256_of_parent_and_tokens() -> None:
    assert root_digest("f", "fp8", 1, "s") == sha256(b"1:f:fp8:1:s").digest()
    assert child_digest(b"p" * 32, [1, 2**31]) == sha256(b"p" * 32 + pack("<II", 1, 2**31)).digest()


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.text(":01a", max_size=4),
            st.sampled_from([*PAGE_DTYPES]),
            st.integers(0, 11),
            st.text(":01a", max_size=4),
        ),
        min_size=2,
        max_size=2,
    )
)
def test_roots_of_different_models_pages_groups_and_salts_differ(
    names: list[tuple[str, str, int, str]],
) -> None:
    assert (names[0] == names[1]) == (root_digest(*names[0]) == root_digest(*names[1]))


def test_any_string_is_a_salt() -> None:
    """JSON can bring half of a surrogate pair into a str; it must not stop the engine."""
    assert root_digest("model", "int8", 0, "\ud800") != root_digest("model", "int8", 0, "\ud801")


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=24),
    st.integers(1, 5),
    st.lists(st.integers(0, 24), max_size=5),
)
def test_a_chain_grows_to_the_same_digests_however_it_is_extended(
    tokens: list[int], size: int, stops: list[int]
) -> None:
    chain = DigestChain()
    full = len(tokens) // size
    for stop in [*(s for s in stops if s <= full), full]:
        chain.extend(ROOT, tokens, size, stop)
    expected = []
    parent = ROOT
    for i in range(full):
        parent = child_digest(parent, tokens[i * size : (i + 1) * size])
        expected.append(parent)
    assert chain.digests == expected


# ---- The cache


def test_the_longest_published_prefix_is_found() -> None:
    cache = PrefixCache(8, 2)
    pages = publish_tokens(cache, [1, 2, 3, 4, 5, 6])
    assert find_pages(cache, [1, 2, 3, 4, 5, 6]) == pages
    assert find_pages(cache, [1, 2, 3, 4, 9, 9, 5, 6]) == pages[:2]
    assert find_pages(cache, [9, 9, 3, 4]) == []
    assert find_pages(cache, [3, 4]) == []
    assert find_pages(cache, [1]) == []


def test_other_salts_find_nothing() -> None:
    cache = PrefixCache(8, 2)
    pages = publish_tokens(cache, [1, 2, 3, 4], root_digest("model", "int8", 0, "mine"))
    assert find_pages(cache, [1, 2, 3, 4], root_digest("model", "int8", 0, "yours")) == []
    assert find_pages(cache, [1, 2, 3, 4], root_digest("model", "int8", 0, "mine")) == pages


def test_a_digest_is_no_proof() -> None:
    cache = PrefixCache(8, 2)
    # As if sha256 had collided.
    cache.publish(chain_of([1, 2], 2).digests[0], [7, 7], cache.pool.allocate(1)[0])
    assert find_pages(cache, [1, 2]) == []


def test_the_first_page_with_a_content_stays_the_one_to_be_found() -> None:
    cache = PrefixCache(8, 2)
    first = publish_tokens(cache, [1, 2])
    second = publish_tokens(cache, [1, 2])
    assert find_pages(cache, [1, 2]) == first and len(cache) == 1
    cache.pool.release(second)
    cache.pool.release(first)
    # The second page is free, the first is idle.
    assert cache.pool.allocate(7) and find_pages(cache, [1, 2]) == first
    cache.pool.allocate(1)
    assert find_pages(cache, [1, 2]) == [] and len(cache) == 0


def test_a_page_is_published_once() -> None:
    cache = PrefixCache(8, 2)
    pages = publish_tokens(cache, [1, 2])
    cache.publish(b"another digest", [3, 4], pages[0])
    assert len(cache) == 1 and find_pages(cache, [1, 2]) == pages


def test_eviction_shortens_prefixes_from_their_end_and_content_can_come_again() -> None:
    cache = PrefixCache(3, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    pages = publish_tokens(cache, tokens)
    cache.pool.release(pages)
    taken = cache.pool.allocate(1)
    assert taken == pages[2:] and find_pages(cache, tokens) == pages[:2]
    cache.publish(chain_of(tokens, 2).digests[2], tokens[4:], taken[0])
    assert find_pages(cache, tokens) == pages


def test_dropping_idle_pages_empties_the_cache_of_them() -> None:
    cache = PrefixCache(4, 2)
    idle = publish_tokens(cache, [1, 2])
    held = publish_tokens(cache, [3, 4])
    cache.pool.release(idle)
    cache.pool.drop_idle()
    assert find_pages(cache, [1, 2]) == [] and find_pages(cache, [3, 4]) == held and len(cache) == 1


def test_a_page_is_found_behind_one_that_is_gone() -> None:
    """A window needs the pages that it sees, whatever became of those before."""
    cache = PrefixCache(3, 2)
    tokens = [1, 2, 3, 4, 5, 6]
    first, second, third = publish_tokens(cache, tokens)
    cache.pool.release([second])
    assert cache.pool.allocate(1) == [second]
    assert cache.lookup(chain_of(tokens, 2, ROOT).digests, tokens) == [first, NO_PAGE, third]
