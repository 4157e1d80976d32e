"""The KV blocks: who holds them, and in which order free ones are used again.

The free list is one doubly linked list (an OrderedDict: every operation below is O(1)). Blocks are taken
from its front. A released block that nobody can find again goes to the front, one that the prefix cache
knows goes to the back. So the order of eviction is: blocks without cached content first, then cached
ones, least recently released first; and since a sequence releases its last block first, a tail goes
before its parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Reference counts and the free list of blocks 0, …, num_blocks - 1, each of `block_size` positions."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks} and block_size={block_size} must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_reuse: Callable[[int], None] | None = None  # told of a cached block before it is overwritten
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._refs = [0] * num_blocks
        self._cached = bytearray(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_free(self) -> int:
        return sum(self._cached[block] for block in self._free)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached content. Raises MemoryError when there are not as many."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} free")
        return [self._take() for _ in range(count)]

    def share(self, block: int) -> None:
        """One more holder; a free block is revived with its content."""
        if self._refs[block] == 0:
            del self._free[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One holder less. Raises RuntimeError on a double free."""
        if self._refs[block] == 0:
            raise RuntimeError(f"block {block} is released twice")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None
            if not self._cached[block]:
                self._free.move_to_end(block, last=False)

    def set_cached(self, block: int, cached: bool) -> None:
        """The prefix cache can, or can no longer, find this block."""
        self._cached[block] = cached
        if not cached and block in self._free:
            self._free.move_to_end(block, last=False)

    def touch(self, block: int) -> None:
        """A free cached block was as good as used: it becomes the last to be evicted."""
        if block in self._free:
            self._free.move_to_end(block)

    def free_order(self) -> list[int]:
        """Free blocks, next to be used first. For tests and audits."""
        return list(self._free)

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise RuntimeError unless free + used == total and, given all tables, each count is right."""
        for block, refs in enumerate(self._refs):
            if refs < 0 or (refs == 0) != (block in self._free):
                raise RuntimeError(f"block {block} has {refs} holders but free is {block in self._free}")
        if tables is None:
            return
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        if held != self._refs:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._refs[b]]
            raise RuntimeError(f"blocks {wrong[:8]} are not held as often as counted")

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._cached[block]:
            self._cached[block] = 0
            if self.on_reuse is not None:
                self.on_reuse(block)
        self._refs[block] = 1
        return block
