"""What of a sequence is in which blocks: placing it, letting it grow, publishing and releasing it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.engine.blocks import BlockPool
from worker.engine.prefix import CachedBlock, HashChain, PrefixCache
from worker.engine.request import Group, Sequence


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence could start: blocks it would share and what it would still take."""

    shared: tuple[int, ...]
    links: tuple[int, ...]  # of the shared blocks, if they are published
    num_computed: int
    take: int  # blocks that leave the free list: new ones and revived ones
    copy_source: int | None = None  # the partial block at position num_computed, still somebody else's
    hit_tokens: int = 0  # found in the prefix cache
    coming_tokens: int = 0  # that follow the hit and are being computed by a running sequence


@dataclass(slots=True)
class KvManager:
    """The pool and the prefix cache, seen from sequences."""

    pool: BlockPool
    prefix: PrefixCache
    queried_tokens: int = field(default=0, init=False)
    hit_tokens: int = field(default=0, init=False)
    _computing: dict[bytes, Sequence] = field(
        default_factory=dict, init=False
    )  # by keys of blocks to publish

    def find(self, seq: Sequence) -> Placement:
        """The better of a prefix hit and, for a further choice of a computed prompt, a fork."""
        hit = self._find_hit(seq)
        donor = self._donor(seq)
        if donor is None or hit.num_computed >= len(seq.prompt_ids) - 1:
            return hit
        return self._fork(seq, donor)

    def place(self, seq: Sequence, where: Placement) -> tuple[int, int] | None:
        """Give the sequence its blocks for all tokens known so far; returns the block copy this takes."""
        for block in where.shared:
            self.pool.share(block)
        need = self.pool.blocks_for(seq.num_tokens) - len(where.shared)
        seq.table = [*where.shared, *self.pool.allocate(need)]
        seq.num_computed = seq.num_planned = where.num_computed
        chain = self._chain(seq)
        chain.links.extend(where.links)
        for key in chain.keys[len(where.links) :]:
            self._computing.setdefault(key, seq)
        self.queried_tokens += seq.num_tokens
        self.hit_tokens += where.hit_tokens
        if where.copy_source is None:
            return None
        return where.copy_source, seq.table[len(where.shared)]

    def grow(self, seq: Sequence) -> None:
        """One block more."""
        seq.table.extend(self.pool.allocate(1))

    def publish(self, seq: Sequence) -> None:
        """Make the blocks that are full and computed findable. Called after the step that computed them."""
        num_full = seq.num_computed // self.pool.block_size
        chain = seq.chain
        if chain is None or num_full <= len(chain.links) or not self.prefix.enabled:
            return
        self._extend(chain, seq, num_full)
        self._computed(seq, chain.keys[len(chain.links) : num_full])
        self.prefix.publish(chain, seq.table, num_full)

    def release(self, seq: Sequence) -> None:
        """Give back all blocks; the sequence is as if nothing of it had been computed."""
        if seq.chain is not None:
            self._computed(seq, seq.chain.keys[len(seq.chain.links) :])
        self.prefix.release(seq.chain, seq.table)
        seq.release()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if a block is lost, wrongly held, wrongly cached or wrongly expected."""
        live = list(sequences)
        self.pool.check_integrity(seq.table for seq in live)
        self.prefix.check_integrity()
        if any(seq not in live or not seq.table for seq in self._computing.values()):
            raise RuntimeError("a block is expected of a sequence that does not run")

    def freed_by(self, sequences: Iterable[Sequence]) -> int:
        """Blocks that nobody else holds: those that come free if these sequences go."""
        return sum(self.pool.refs(block) == 1 for seq in sequences for block in seq.table)

    def _find_hit(self, seq: Sequence) -> Placement:
        found: list[CachedBlock] = []
        coming = 0
        if self.prefix.enabled and not seq.group.score_prompt:
            last = (seq.num_tokens - 1) // self.pool.block_size  # one token at least is always computed
            chain = self._chain(seq)
            self._extend(chain, seq, last)
            found = self.prefix.match(chain, last)
            coming = self._count_coming(chain.keys[len(found) : last])
        blocks = tuple(entry.block for entry in found)
        computed = len(blocks) * self.pool.block_size
        links = tuple(entry.uid for entry in found)
        take = self._take(seq, blocks)
        return Placement(blocks, links, computed, take, hit_tokens=computed, coming_tokens=coming)

    def _count_coming(self, keys: list[bytes]) -> int:
        """Tokens of the leading blocks that will be published soon."""
        count = next((i for i, key in enumerate(keys) if key not in self._computing), len(keys))
        return count * self.pool.block_size

    def _computed(self, seq: Sequence, keys: list[bytes]) -> None:
        """These blocks are published, or will not be."""
        for key in keys:
            if self._computing.get(key) is seq:
                del self._computing[key]

    def _donor(self, seq: Sequence) -> Sequence | None:
        if not seq.group.prompt_done or len(seq.prompt_ids) < 2:
            return None
        split = len(seq.prompt_ids)
        return next((s for s in seq.group.live if s is not seq and s.num_computed >= split), None)

    def _fork(self, seq: Sequence, donor: Sequence) -> Placement:
        """Share the full blocks before the last prompt token; that one is computed again, for its logits."""
        last = len(seq.prompt_ids) - 1
        whole, partial = divmod(last, self.pool.block_size)
        shared = tuple(donor.table[:whole])
        links = tuple(donor.chain.links[:whole]) if donor.chain else ()
        source = donor.table[whole] if partial else None
        return Placement(shared, links, last, self._take(seq, shared), source)

    def _take(self, seq: Sequence, shared: tuple[int, ...]) -> int:
        revived = sum(self.pool.refs(block) == 0 for block in shared)
        return self.pool.blocks_for(seq.num_tokens) - len(shared) + revived

    def _chain(self, seq: Sequence) -> HashChain:
        if seq.chain is None:
            seq.chain = self._prompt_chain(seq.group).copy()
        return seq.chain

    def _prompt_chain(self, group: Group) -> HashChain:
        """Hashed once for all choices and all admissions."""
        if group.chain is None:
            group.chain = self.prefix.new_chain(group.request.salt, group.request.adapter)
            if self.prefix.enabled:
                num_full = len(group.request.prompt_ids) // self.pool.block_size
                self._extend(group.chain, group.live[0], num_full)
        return group.chain

    def _extend(self, chain: HashChain, seq: Sequence, num_full: int) -> None:
        size = self.pool.block_size
        for index in range(len(chain.keys), num_full):
            chain.extend(seq.tokens(index * size, (index + 1) * size))
