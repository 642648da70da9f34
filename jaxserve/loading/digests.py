"""Digests of a checkpoint's tensors, added up while the shards of its parameters are loaded.

Processes that compare them know whether they hold the same weights, whatever their meshes, kinds of
folders and copies of kv heads. A tensor's digest is the sum, modulo 2^64, of the bits of its
numbers as the devices hold them, each multiplied by a fixed pseudorandom odd factor for its place
along every dimension. Sums of the shards of a tensor add up to the digest of the tensor.

One number that differs changes the digest with certainty, since no odd multiple of a difference of
at most 32 bits is 0 modulo 2^64. (A number of the checkpoint that is quantized on loading may
change without any that the devices hold.) Several that differ go unnoticed only by chance, or where
somebody constructs them: this is a checksum, not a cryptographic hash.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from jaxserve.models.families.weight_table import Tensor
from jaxserve.models.quantize import Ranges
from jaxserve.models.spec import ModelSpec

MASK: Final = 2**64 - 1
HEX_DIGITS: Final = 16  # of a digest in a text
KV_HEADS: Final = "K"  # the dimension that may have copies
QUERIES: Final = "G"  # queries of a kv head, which its copies divide among themselves
KEPT_FACTORS: Final = 64  # dimensions whose factors are kept for the next shard

# Constants of SplitMix64 (Steele, Lea and Flood 2014).
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER: Final = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER: Final = np.uint64(0x94D049BB133111EB)


class WeightDigests:
    """Digests of all tensors of one checkpoint, by the names that its publisher gives them.

    Args:
        all_hosts: Whether the shards of the mesh's other hosts are read as well, so that `text`
            knows what each host has to hold. Reading takes as much time as if one host had the
            whole mesh.
    """

    def __init__(self, all_hosts: bool = False):
        self.all_hosts = all_hosts
        self._sums: dict[int, dict[str, int]] = {}  # by host and tensor

    def add(self, name: str, hosts: Iterable[int], part: int) -> None:
        """Add the sum of a shard to the digest that a tensor has on these hosts."""
        for host in hosts:
            sums = self._sums.setdefault(host, {})
            sums[name] = (sums.get(name, 0) + part) & MASK

    def text(self, host: int = 0) -> str:
        """Return the digests of what a host holds, in the order of the tensors' names.

        It is complete for this process's host, and with `all_hosts` for every one.
        """
        sums = self._sums.get(host, {})
        return "".join(f"{sums[name]:0{HEX_DIGITS}x}" for name in self._names(host))

    def _names(self, host: int) -> list[str]:
        """Return the tensors' names, layer 2 before layer 10."""
        return sorted(
            self._sums.get(host, {}),
            key=lambda name: [part.zfill(HEX_DIGITS) for part in name.split(".")],
        )

    def first_difference(self, text: str, host: int = 0) -> str | None:
        """Return the first tensor whose digest is not the one in a text of `text`, if any is.

        The text has to be of the same architecture.
        """
        mine = self.text(host)
        if mine == text:
            return None
        for at, name in enumerate(self._names(host)):
            here = slice(at * HEX_DIGITS, (at + 1) * HEX_DIGITS)
            if mine[here] != text[here]:
                return name
        return "(only one of them has some tensors)"


class ParameterDigests:
    """The part of WeightDigests about the tensors of one parameter.

    Args:
        rows: Rows of the family's weight table.
        held: Architecture as the devices hold it.
    """

    def __init__(self, whole: WeightDigests, rows: Sequence[Tensor], held: ModelSpec):
        self.all_hosts = whole.all_hosts
        self._whole = whole
        self._rows = rows
        self._copies = held.kv_copies
        self._fused = [row.fused_slices(row.sizes(held)) for row in rows]
        self._kept = {KV_HEADS}.union(*self._fused)
        # Kv heads that a host has already, as parts of shards: a copy of one counts once.
        self._counted: set[tuple[Any, ...]] = set()

    def add(
        self, axes: str, asked: Ranges, shard: np.ndarray, hosts: Collection[int], kind: str
    ) -> None:
        """Add a shard that these hosts hold.

        Args:
            axes: Letters of the parameter's dimensions.
            asked: Entries of the shard along each dimension.
            kind: "values" or "scales" of a quantized parameter, and "values" of any other.
        """
        ranges = dict(zip(axes, asked, strict=True))
        sums = _contract(shard, ranges, self._kept)
        kept = {letter: part for letter, part in ranges.items() if letter in self._kept}
        for head, copy, of_head in self._heads(sums, kept):
            others = {letter: part for letter, part in ranges.items() if letter != KV_HEADS}
            of_its_head = factor_of(KV_HEADS, head) if KV_HEADS in kept else 1
            part_of_head = (head, kind, *others.values())
            new_here = [host for host in hosts if (host, *part_of_head) not in self._counted]
            self._counted.update((host, *part_of_head) for host in new_here)
            inner = {letter: part for letter, part in kept.items() if letter != KV_HEADS}
            for row, fused in zip(self._rows, self._fused, strict=True):
                has_queries = any(own == QUERIES for own, _ in fused.values())
                found = _sum_of_tensor(of_head, inner, fused, copy if has_queries else 0)
                own = factor_of(f"{row.path[-1]} {row.part} {kind}", 0)
                part = found * own * of_its_head
                # Every copy of a head has queries of its own.
                self._whole.add(row.name, hosts if has_queries else new_here, part)

    def _heads(
        self, sums: np.ndarray, kept: Mapping[str, range]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the kv heads of a shard: the head, which copy of it this is, and its sums.

        A parameter without kv heads counts as one head.
        """
        if KV_HEADS not in kept:
            yield 0, 0, sums
            return
        at = list(kept).index(KV_HEADS)
        for entry, held in enumerate(kept[KV_HEADS]):
            head, copy = divmod(held, self._copies)
            yield head, copy, sums.take(entry, axis=at)


def _contract(shard: np.ndarray, ranges: Mapping[str, range], kept: Collection[str]) -> np.ndarray:
    """Multiply the bits of a shard by the factors of all dimensions but the kept ones, and sum.

    The result is uint64, with the kept dimensions in their order.
    """
    sums = _bits(shard)
    left = "".join(ranges)
    # The first product takes nearly all of the time; along the last dimension it is fastest.
    for letter in reversed([*ranges]):
        if letter in kept:
            continue
        rest = left.replace(letter, "")
        sums = np.einsum(
            f"{left},{letter}->{rest}",
            sums,
            factors(letter, ranges[letter]),
            dtype=np.uint64,
            casting="unsafe",
        )
        left = rest
    return np.asarray(sums, np.uint64)


def _bits(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of numbers as unsigned integers; int4, which fill bytes here, as int8."""
    if numbers.itemsize == 1 and jnp.issubdtype(numbers.dtype, jnp.integer):
        numbers = numbers.astype(np.int8, copy=False)
    return numbers.view(f"u{numbers.itemsize}")


def _sum_of_tensor(
    sums: np.ndarray, kept: Mapping[str, range], fused: Mapping[str, tuple[str, slice]], copy: int
) -> int:
    """Sum up a tensor's part of the sums of a shard.

    Args:
        kept: Dimensions of the sums, and the entries there.
        fused: The tensor's share of each dimension; see Tensor.fused_slices.
        copy: Number of a kv head's copy, whose queries follow those of the copies before.
    """
    for letter, part in kept.items():
        own, at = fused[letter]
        begin = max(at.start, part.start)
        end = min(at.stop, part.stop)
        if begin >= end:
            return 0
        skipped = (copy * (at.stop - at.start) if own == QUERIES else 0) - at.start
        factor = factors(f"{letter} {own}", range(begin + skipped, end + skipped))
        sums = np.einsum("i...,i->...", sums[begin - part.start : end - part.start], factor)
    return int(sums)


@lru_cache(KEPT_FACTORS)
def factors(dimension: str, entries: range) -> np.ndarray:
    """Return the factors of entries along a dimension, odd uint64 [entries]."""
    seed = blake2b(dimension.encode(), digest_size=8).digest()
    mixed = np.arange(entries.start + 1, entries.stop + 1, dtype=np.uint64) * GOLDEN
    mixed += np.frombuffer(seed, np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST_MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND_MULTIPLIER
    mixed ^= mixed >> np.uint64(31)
    mixed |= np.uint64(1)
    mixed.flags.writeable = False
    return mixed


def factor_of(dimension: str, entry: int) -> int:
    """Return the factor of one entry along a dimension."""
    return int(factors(dimension, range(entry, entry + 1))[0])
