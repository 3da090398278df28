"""Account for blocks of KV memory and share equal prefixes. Knows nothing of tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def chain_digest(parent: bytes, tokens: array[int] | memoryview[int]) -> bytes:
    """Name a full block by its own tokens and by everything in front of it."""
    return blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()


class Blocks:
    """A pool of `count` blocks of `block_size` tokens with reference counts.

    A published block that nobody references any more keeps its contents until the space is
    needed; the one released longest ago is given away first.
    """

    def __init__(self, count: int, block_size: int, prefix_cache: bool = True) -> None:
        if count < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: {count} of {block_size} tokens")
        self.count = count
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._references = [0] * count
        self._empty = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, int] = {}
        self._digest: list[bytes | None] = [None] * count

    @property
    def free(self) -> int:
        """Blocks that can be had: empty ones and cached ones that nobody references."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that a sequence references."""
        return self.count - self.free

    @property
    def capacity(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.count * self.block_size

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def unknown(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those of the digests of which no block can be shared."""
        return [digest for digest in digests if digest not in self._published]

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Reference the published blocks of the longest known prefix of a digest chain."""
        blocks: list[int] = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            self._idle.pop(block, None)
            self._references[block] += 1
            blocks.append(block)
        return blocks

    def allocate(self, count: int) -> list[int]:
        """Hand out private blocks, each with one reference; `free` must cover them."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        # thousands a second: no call for each
        empty = self._empty
        first = max(0, len(empty) - count)
        blocks = empty[first:][::-1]
        del empty[first:]
        for block in blocks:
            self._references[block] = 1
        return blocks + self._evict(count - len(blocks))

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each block of a sequence."""
        # the end of a chain is useless without its beginning, so it must be evicted first
        references, digest, empty = self._references, self._digest, self._empty
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 0:
                if digest[block] is None:
                    empty.append(block)
                else:
                    self._idle[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Offer a computed full block for sharing; of two equal ones the older stays known."""
        if self.prefix_cache and digest not in self._published:
            self._published[digest] = block
            self._digest[block] = digest

    def holders(self, block: int) -> int:
        """How many sequences reference a block."""
        return self._references[block]

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        empty, idle = set(self._empty), set(self._idle)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert len(empty) + len(idle) + len(held) == self.count, "a block is lost or doubled"
        assert empty | idle | held == set(range(self.count)), "a block is lost"
        assert all(count >= 0 for count in self._references), "a block was released too often"
        named = {block: digest for block, digest in enumerate(self._digest) if digest is not None}
        assert {block: digest for digest, block in self._published.items()} == named, (
            "the published digests and the blocks disagree"
        )
        assert idle <= named.keys(), "an idle block has no name"
        assert not empty & named.keys(), "an empty block has a name"

    def _evict(self, count: int) -> list[int]:
        """Take so many cached blocks, those that were released longest ago."""
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._digest[block]
            if digest is not None:
                del self._published[digest]
                self._digest[block] = None
            self._references[block] = 1
        return blocks
