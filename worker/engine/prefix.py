"""Finding blocks that are computed already: a chain of strong hashes over full blocks.

The key of a block is blake2b(parent's key, the block's token ids at fixed width); the first parent is a
domain key over tagged, length-prefixed fields (tenant, adapter), so that no tenant's name can pass for an
adapter's. A hit is believed only when the block's tokens and its parent are the very ones asked for; the
hash merely finds candidates, and a truncated one (`hash_bytes=1`) costs hits, never correctness.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from worker.engine.blocks import BlockPool

Link = int | bytes  # identity of a parent: a cached block's uid, or the domain for the first block


class HashChain:
    """Keys of one sequence's full blocks; `links[i]` identifies block i in the cache once it is published."""

    __slots__ = ("_hash_bytes", "domain", "keys", "links", "parts")

    def __init__(self, domain: bytes, hash_bytes: int) -> None:
        self.domain = domain
        self.keys: list[bytes] = []
        self.parts: list[bytes] = []  # token ids of each block, for the check
        self.links: list[int] = []
        self._hash_bytes = hash_bytes

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add one full block."""
        part = array("I", token_ids).tobytes()
        parent = self.keys[-1] if self.keys else self.domain
        self.keys.append(blake2b(parent + part, digest_size=32).digest()[: self._hash_bytes])
        self.parts.append(part)

    def parent_link(self, index: int) -> Link:
        return self.links[index - 1] if index else self.domain

    def copy(self) -> HashChain:
        """The same keys, nothing published."""
        twin = HashChain(self.domain, self._hash_bytes)
        twin.keys, twin.parts = list(self.keys), list(self.parts)
        return twin


@dataclass(slots=True)
class CachedBlock:
    block: int
    key: bytes
    part: bytes
    parent: Link
    uid: int  # never used again, so that a child can't take a newer block for its parent


def domain_key(**fields: str) -> bytes:
    """An unambiguous digest of named fields."""
    digest = blake2b(digest_size=32, person=b"headrace-kv")
    for name, value in fields.items():
        for text in (name.encode(), value.encode()):
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


class PrefixCache:
    """Which block holds which content. A block stays findable, even free, until the pool uses it again."""

    def __init__(self, pool: BlockPool, *, enabled: bool = True, hash_bytes: int = 32) -> None:
        self.enabled = enabled
        self._pool = pool
        self._hash_bytes = hash_bytes
        self._by_key: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._last_uid = 0
        pool.on_reuse = self._evicted

    @property
    def num_cached(self) -> int:
        return len(self._by_key)

    def new_chain(self, salt: str, adapter: str) -> HashChain:
        return HashChain(domain_key(tenant=salt, adapter=adapter), self._hash_bytes)

    def match(self, chain: HashChain, max_blocks: int) -> list[CachedBlock]:
        """The longest published prefix of the chain, at most `max_blocks`; nothing is referenced yet."""
        found: list[CachedBlock] = []
        parent: Link = chain.domain
        for index in range(min(max_blocks, len(chain.keys)) if self.enabled else 0):
            entry = self._by_key.get(chain.keys[index])
            if entry is None or entry.parent != parent or entry.part != chain.parts[index]:
                break
            found.append(entry)
            parent = entry.uid
        return found

    def publish(self, chain: HashChain, table: Sequence[int], num_full: int) -> None:
        """Make the first `num_full` blocks findable. Call it only after the step that computed them."""
        start = len(chain.links)
        while start and self._live(chain, start - 1) is None:
            start -= 1
        del chain.links[start:]
        for index in range(start, num_full):
            chain.links.append(self._publish_block(chain, index, table[index]))

    def release(self, chain: HashChain | None, table: Sequence[int]) -> None:
        """Give back a sequence's blocks, the last one first. A duplicate's published twin counts as used."""
        published = len(chain.links) if chain is not None else 0
        for index in range(len(table) - 1, -1, -1):
            block = table[index]
            self._pool.release(block)
            if index < published and chain is not None and not self._pool.is_cached(block):
                twin = self._live(chain, index)
                if twin is not None:
                    self._pool.touch(twin.block)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless maps and pool agree and no free tail outlives its free parent."""
        place = {block: i for i, block in enumerate(self._pool.free_order())}
        by_uid = {entry.uid: entry for entry in self._by_key.values()}
        if len(self._by_key) != len(self._by_block):
            raise RuntimeError("an entry of the prefix cache was overwritten")
        for block, entry in self._by_block.items():
            if self._by_key.get(entry.key) is not entry or not self._pool.is_cached(block):
                raise RuntimeError(f"block {block} is not cached as recorded")
            parent = by_uid.get(entry.parent) if isinstance(entry.parent, int) else None
            if parent and place.get(block, -1) > place.get(parent.block, len(place)):
                raise RuntimeError(f"block {block} would be evicted after its parent {parent.block}")

    def _live(self, chain: HashChain, index: int) -> CachedBlock | None:
        """The entry which the block was published as, or duplicates, if it is still there."""
        entry = self._by_key.get(chain.keys[index])
        return entry if entry is not None and entry.uid == chain.links[index] else None

    def _publish_block(self, chain: HashChain, index: int, block: int) -> int:
        key, part, parent = chain.keys[index], chain.parts[index], chain.parent_link(index)
        known = self._by_key.get(key)
        if known is not None and known.parent == parent and known.part == part:
            return known.uid  # a duplicate: the first one stays
        if known is not None:
            self._drop(known)
            self._pool.set_cached(known.block, False)
        self._last_uid += 1
        entry = CachedBlock(block, key, part, parent, self._last_uid)
        self._by_key[key] = self._by_block[block] = entry
        self._pool.set_cached(block, True)
        return entry.uid

    def _evicted(self, block: int) -> None:
        self._drop(self._by_block[block])

    def _drop(self, entry: CachedBlock) -> None:
        del self._by_key[entry.key]
        del self._by_block[entry.block]
