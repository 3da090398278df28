"""Give sequences their blocks and take them back. Knows no queue, no slots and no policy.

Blocks come from the pool, from the prefix cache, or back from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jobrunner.engine.blocks import Blocks
from jobrunner.engine.prefixes import Prefixes
from jobrunner.engine.sequence import Sequence
from jobrunner.engine.swap import Copy, HostBlocks


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks of the prefix cache that a sequence begins with; others hold `shared` of them."""

    blocks: list[int]
    shared: int


class Holding:
    """The blocks of the running sequences; `copies` between device and host that are due."""

    def __init__(self, blocks: Blocks, host: HostBlocks, prefixes: Prefixes) -> None:
        self.blocks = blocks
        self.host = host
        self.copies: list[Copy] = []
        self._prefixes = prefixes
        # of those who ended while the launched step still writes into them
        self._late: list[list[int]] = []

    def find(self, sequence: Sequence) -> Found:
        """Look up the beginning of a sequence in the prefix cache, and hold what is there."""
        found = self.blocks.match(self.chain(sequence, self.shareable(sequence)))
        holders = self.blocks.holders
        return Found(found, sum([holders(block) > 1 for block in found]) if found else 0)

    def take(self, sequence: Sequence, found: Found) -> None:
        """Give a sequence what was found and blocks for all its other tokens.

        What was swapped out is fetched.
        """
        missing = self.blocks.needed(sequence.length) - len(found.blocks)
        sequence.blocks = found.blocks + self.blocks.allocate(missing)
        if sequence.host_blocks:
            self._swap_in(sequence, len(found.blocks))
        else:
            sequence.computed = sequence.cached = len(found.blocks) * self.blocks.block_size

    def give_back(self, found: Found) -> None:
        """Let go what was found."""
        self.blocks.release(found.blocks)

    def release(self, blocks: list[int], *, late: bool = False) -> None:
        """Free the blocks of a sequence; `late`: when the launched step has written into them."""
        if late:
            self._late.append(blocks)
        else:
            self.blocks.release(blocks)

    def release_late(self) -> None:
        """Free the blocks that nobody writes into any more."""
        for blocks in self._late:
            self.blocks.release(blocks)
        self._late.clear()

    @property
    def late(self) -> list[list[int]]:
        """Blocks that are freed later, by sequence."""
        return self._late

    def publish(self, sequence: Sequence, first: int, stop: int) -> None:
        """Offer blocks `first` up to `stop`, full of computed tokens, to other sequences."""
        digests = self.chain(sequence, stop)
        for block, digest in zip(sequence.blocks[first:], digests[first:], strict=False):
            self.blocks.publish(block, digest)
            self._prefixes.done(digest)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Take it that so many tokens of a prompt are computed."""
        size = self.blocks.block_size
        first, full = sequence.computed // size, computed // size
        sequence.computed = computed
        if full > first:
            self.publish(sequence, first, full)

    def swap_out(self, sequence: Sequence) -> None:
        """Take host memory for all computed tokens, and have them copied there."""
        count = self.blocks.needed(sequence.computed)
        sequence.host_blocks = self.host.take(count)
        self.copies.append(Copy(sequence.blocks[:count], sequence.host_blocks, out=True))

    def give_back_host(self, sequence: Sequence) -> None:
        """Free the host memory of a sequence."""
        self.host.give_back(sequence.host_blocks)
        sequence.host_blocks = []

    def chain(self, sequence: Sequence, block_count: int) -> list[bytes]:
        """The names of the first blocks; none where nothing is shared."""
        if not self.blocks.prefix_cache:
            return []
        return sequence.chain(block_count, self.blocks.block_size)

    def shareable(self, sequence: Sequence) -> int:
        """How many blocks may come from the prefix cache."""
        # the last token is never taken from the cache: its logits are needed
        return (sequence.length - 1) // self.blocks.block_size

    def check(self, running: Seq[Sequence], waiting: Seq[Sequence]) -> None:
        """Raise AssertionError unless every block is held by whom it was given to."""
        blocks = self.blocks
        blocks.check()
        references = [0] * blocks.count
        for held in self._late:
            for block in held:
                references[block] += 1
        for sequence in running:
            assert len(set(sequence.blocks)) == len(sequence.blocks), "a block is held twice"
            assert len(sequence.blocks) * blocks.block_size >= sequence.computed, (
                "computed tokens have no block"
            )
            full = sequence.computed // blocks.block_size
            assert all(blocks.holders(block) == 1 for block in sequence.blocks[full:]), (
                "a block that is still written is shared"
            )
            for block in sequence.blocks:
                references[block] += 1
            assert not sequence.host_blocks, "a running sequence holds host memory"
        assert references == [blocks.holders(block) for block in range(blocks.count)], (
            "reference counts differ from what sequences hold"
        )
        for sequence in waiting:
            assert not sequence.blocks, "a waiting sequence holds blocks"
            kept = len(sequence.host_blocks)
            assert kept or sequence.computed == 0, "a waiting sequence has computed tokens"
            assert kept == blocks.needed(sequence.computed), "a swapped sequence lacks blocks"
        self.host.check([block for each in waiting for block in each.host_blocks])

    def _swap_in(self, sequence: Sequence, found: int) -> None:
        """Copy back all computed blocks but those that the prefix cache still has."""
        host, size = sequence.host_blocks, self.blocks.block_size
        if found < len(host):
            self.copies.append(Copy(sequence.blocks[found : len(host)], host[found:], out=False))
        self.give_back_host(sequence)
        sequence.cached = 0
        computed = max(sequence.computed, found * size)
        sequence.computed = found * size
        self.advance(sequence, computed)
