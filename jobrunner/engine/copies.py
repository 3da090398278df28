"""Swap blocks beside the computing, in the right order. Knows nothing of sequences or of plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jobrunner.engine.kv import KvPool
from jobrunner.engine.streams import Lane, Mark, Streams
from jobrunner.engine.swap import Copy

Numbers = np.ndarray


@dataclass(frozen=True, slots=True)
class Copied:
    """When the copies of one plan begin and when they are done."""

    begun: Mark
    done: Mark

    @property
    def seconds(self) -> float:
        """The device's time between; it must have passed both."""
        return self.done.since(self.begun)


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    blocks: Numbers
    done: Mark


class Copies:
    """The copies between a pool and host memory, in a lane of their own.

    They begin when all that was computed before is done, since that may write what they read.
    What is computed next waits for the blocks that it uses, and for no others: most of what is
    swapped out is copied while the step computes that needed a few blocks of it.
    """

    def __init__(self, pool: KvPool, streams: Streams) -> None:
        self._pool = pool
        self._streams = streams
        self._under_way: deque[_UnderWay] = deque()
        # of the copies begun with last; none where it does no harm to begin with all again
        self.carried_out = 0

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def idle(self) -> bool:
        """Whether no block is known to be under way."""
        return not self._under_way

    def begin(self, copies: Sequence[Copy], used: Numbers) -> Copied:
        """Begin with the copies of a plan that will use these blocks: those first."""
        streams = self._streams
        streams.hold(Lane.COPY, streams.mark(Lane.COMPUTE))
        begun = done = streams.mark(Lane.COPY)
        with streams.on(Lane.COPY):
            parts = _by_urgency(copies, used)
            self.carried_out = 0
            for some in parts:
                for copy in some:
                    swap = self._pool.swap_out if copy.out else self._pool.swap_in
                    swap(copy.device_blocks, copy.host_blocks)
                    # copies of which some go first are of different blocks, in any order
                    self.carried_out += len(parts) == 1
                done = streams.mark(Lane.COPY)
                blocks = np.concatenate([copy.device_blocks for copy in some])
                self._under_way.append(_UnderWay(blocks, done))
        self.carried_out = len(copies)
        return Copied(begun, done)

    def hold_for(self, used: Numbers) -> None:
        """Let what is computed next wait until these blocks are not being copied any more."""
        under_way = self._under_way
        while under_way and under_way[0].done.passed:
            under_way.popleft()
        in_use = [index for index, each in enumerate(under_way) if np.isin(each.blocks, used).any()]
        if in_use:
            self._streams.hold(Lane.COMPUTE, under_way[in_use[-1]].done)
            # those before it were done before it
            for _ in range(in_use[-1] + 1):
                under_way.popleft()


def _by_urgency(copies: Sequence[Copy], used: Numbers) -> list[list[Copy]]:
    """Put the copies of blocks that are used first, unless their order matters."""
    blocks = np.concatenate([copy.device_blocks for copy in copies])
    places = np.concatenate([copy.host_blocks for copy in copies])
    if len(np.unique(blocks)) < len(blocks) or len(np.unique(places)) < len(places):
        return [list(copies)]
    parts = [[_part(copy, used, wanted) for copy in copies] for wanted in (True, False)]
    return [some for part in parts if (some := [copy for copy in part if copy.device_blocks])]


def _part(copy: Copy, used: Numbers, wanted: bool) -> Copy:
    chosen = np.flatnonzero(np.isin(copy.device_blocks, used) == wanted).tolist()
    return Copy(
        [copy.device_blocks[index] for index in chosen],
        [copy.host_blocks[index] for index in chosen],
        copy.out,
    )
