"""The KV memory of a GPU: each block one run of bytes. Knows nothing of sequences or of kernels.

Shapes: K kv heads, N blocks, P positions in a block, D width of a head, T tokens, E elements of
one block over all calls, K and V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from jobrunner.engine.devices import to_device
from jobrunner.engine.kv import AttentionCall, KvPool, runs, zeros

# blocks smaller than this are collected first: a copy of its own costs more than the detour
_STAGED_BELOW_BYTES = 256 << 10

# of the blocks of a pool `[N, E]` and as many rows that lie one behind the other
CopyRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def gather_rows(pool_NE: torch.Tensor, blocks: torch.Tensor, staged_NE: torch.Tensor) -> None:
    """Copy blocks of the pool one behind the other."""
    torch.index_select(pool_NE, 0, blocks, out=staged_NE)


def scatter_rows(pool_NE: torch.Tensor, blocks: torch.Tensor, staged_NE: torch.Tensor) -> None:
    """Copy what lies one behind the other to blocks of the pool."""
    pool_NE.index_copy_(0, blocks, staged_NE)


class BlockPool(KvPool):
    """K and V of all blocks in one tensor, `[N, E]`, so that a block moves as one copy.

    Within a block stand, for each attention call, its keys, `[P, K, D]`, and its values; `keys`
    and `values` are views of them, `[K, N, P, D]` like those of any pool. One block more than is
    handed out, `trash_block`, is there to be written by rows that only fill up a batch.
    """

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        block_count: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_block_count: int = 0,
        *,
        gather: CopyRows = gather_rows,
        scatter: CopyRows = scatter_rows,
    ) -> None:
        super().__init__(calls, block_count, block_size, dtype, device, host_block_count)
        self._gather, self._scatter = gather, scatter

    @property
    def trash_block(self) -> int:
        return self.block_count

    def write(
        self, call: int, slots_T: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor
    ) -> None:
        """Store K and V of T tokens in slots, a slot being `block * block_size + position`."""
        block_T, position_T = slots_T // self.block_size, slots_T % self.block_size
        self.keys[call][:, block_T, position_T] = k_KTD
        self.values[call][:, block_T, position_T] = v_KTD

    def swap_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy blocks to places in host memory, one to one; does not wait for the device."""
        if not self._staged:
            for block, place, count in shared_runs(blocks, places):
                source_NE = self._pool_NE[block : block + count]
                self._host_NE[place : place + count].copy_(source_NE, non_blocking=True)
            return
        for some, few in self._groups(blocks, places):
            staged_NE = self._pool_NE.new_empty(len(some), self._pool_NE.shape[1])
            self._gather(self._pool_NE, self._numbers(some), staged_NE)
            for first, start, stop in runs(few):
                source_NE = staged_NE[first : first + stop - start]
                self._host_NE[start:stop].copy_(source_NE, non_blocking=True)

    def swap_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy places of host memory back to blocks, one to one; does not wait for the device."""
        if not self._staged:
            for block, place, count in shared_runs(blocks, places):
                source_NE = self._host_NE[place : place + count]
                self._pool_NE[block : block + count].copy_(source_NE, non_blocking=True)
            return
        for some, few in self._groups(blocks, places):
            staged_NE = self._pool_NE.new_empty(len(some), self._pool_NE.shape[1])
            for first, start, stop in runs(few):
                target_NE = staged_NE[first : first + stop - start]
                target_NE.copy_(self._host_NE[start:stop], non_blocking=True)
            self._scatter(self._pool_NE, self._numbers(some), staged_NE)

    def _lay_out(self, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        widths = [
            (call.kv_heads, width)
            for call in self.calls
            for width in (call.key_width, call.value_width)
        ]
        sizes = [self.block_size * heads * width for heads, width in widths]
        self._pool_NE = zeros((self.block_count + 1, sum(sizes)), self.dtype, device)
        self._staged = sum(sizes) * self.dtype.itemsize < _STAGED_BELOW_BYTES
        views = [
            part_NE.unflatten(1, (self.block_size, heads, width)).permute(2, 0, 1, 3)
            for part_NE, (heads, width) in zip(
                self._pool_NE.split(sizes, dim=1), widths, strict=True
            )
        ]
        return views[::2], views[1::2]

    def _numbers(self, numbers: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(numbers, np.int64), self._pool_NE.device)


def shared_runs(blocks: Sequence[int], places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut pairs where not both go on by 1: block, place and length of each run."""
    found: list[tuple[int, int, int]] = []
    for block, place in zip(blocks, places, strict=True):
        if found:
            first_block, first_place, count = found[-1]
            if (first_block + count, first_place + count) == (block, place):
                found[-1] = (first_block, first_place, count + 1)
                continue
        found.append((block, place, 1))
    return found
