"""Account for blocks of host memory that hold what was swapped out. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks to copy between device and host, one to one; `out` is towards the host.

    The copies of a plan are carried out in their order, before anything is computed: a block may
    be read by one and written by the next.
    """

    device_blocks: Sequence[int]
    host_blocks: Sequence[int]
    out: bool


class HostBlocks:
    """A pool of `count` blocks of host memory, each held by one sequence or free."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        # the lowest come first and neighbours stay together: long runs copy fast
        self._empty = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._empty)

    def take(self, count: int) -> list[int]:
        """Hand out so many blocks; `free` must cover them."""
        if count > self.free:
            raise ValueError(f"{count} blocks of host memory wanted, {self.free} free")
        return [self._empty.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Free blocks that `take` handed out."""
        self._empty.extend(reversed(blocks))

    def check(self, held: Sequence[int]) -> None:
        """Raise AssertionError unless these blocks and the free ones are all there are."""
        assert sorted([*held, *self._empty]) == list(range(self.count)), (
            "a block of host memory is lost or doubled"
        )
