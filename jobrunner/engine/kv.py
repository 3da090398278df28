"""The tensors behind the blocks. Know nothing of sequences or of who holds which block.

Shapes: K kv heads, N blocks, P positions in a block, D width of a head, E elements of one block
over all calls, K and V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

# what is copied at a time passes through as much memory of the device
_COPIED_BYTES = 64 << 20

Position = TypeVar("Position", int, torch.Tensor)


@dataclass(frozen=True, slots=True)
class Reach:
    """What a token sees of the tokens before it; all of them where both are None.

    `window` tokens back from itself, itself included; or those of its own chunk, where chunks
    of `chunk` tokens divide the sequence.
    """

    window: int | None = None
    chunk: int | None = None

    def first_seen(self, own: Position) -> Position:
        """The first position that a token at position `own` sees; may be below 0."""
        if self.window is not None:
            return own - self.window + 1
        if self.chunk is not None:
            return own // self.chunk * self.chunk
        return own * 0


EVERYTHING = Reach()


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one call of the attention function within a forward pass stores and sees.

    Calls are known by their order within the pass: a model may call twice in a layer, or in
    another order than its layers are numbered. K and V may differ in width.
    """

    kv_heads: int
    key_width: int
    value_width: int
    reach: Reach = EVERYTHING


def bytes_per_token(calls: Sequence[AttentionCall], dtype: torch.dtype) -> int:
    """Bytes of K and V of one token over all calls."""
    widths = sum(call.kv_heads * (call.key_width + call.value_width) for call in calls)
    element_bytes: int = dtype.itemsize
    return widths * element_bytes


def attention_flops(calls: Sequence[AttentionCall], heads: int) -> float:
    """FLOPs of a token with so many query heads that attends to one token, over all calls."""
    return 2.0 * heads * sum(call.key_width + call.value_width for call in calls)


class KvPool:
    """K and V of all blocks, one tensor each per attention call, `[K, N, P, D]`.

    With the heads in front, the blocks of a batch gather into one `[K, batch, context, D]`.
    Beside it `host_block_count` blocks of host memory, `[N, E]`, hold what is swapped out: page
    locked beside a GPU, so that copies run at the speed of its link. Beside a CPU it is the same
    memory again, which only its limit tells from the pool.
    """

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        block_count: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_block_count: int = 0,
    ) -> None:
        self.calls = tuple(calls)
        self.block_count = block_count
        self.block_size = block_size
        self.dtype = dtype
        self.keys, self.values = self._lay_out(device)
        elements = bytes_per_token(calls, dtype) // dtype.itemsize * block_size
        self._host_NE = _host_zeros((host_block_count, elements), dtype, device)
        self._copied_blocks = max(1, _COPIED_BYTES // (elements * dtype.itemsize))

    def _lay_out(self, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Make the keys and the values of each call, all zero."""

        def pool(heads: int, width: int) -> torch.Tensor:
            return zeros((heads, self.block_count, self.block_size, width), self.dtype, device)

        keys = [pool(call.kv_heads, call.key_width) for call in self.calls]
        values = [pool(call.kv_heads, call.value_width) for call in self.calls]
        self._flat_keys = [each.flatten(1, 2) for each in keys]
        self._flat_values = [each.flatten(1, 2) for each in values]
        self._tensors = [*keys, *values]
        return keys, values

    def write(
        self, call: int, slots_T: torch.Tensor, k_KTD: torch.Tensor, v_KTD: torch.Tensor
    ) -> None:
        """Store K and V of T tokens in slots, a slot being `block * block_size + position`."""
        self._flat_keys[call].index_copy_(1, slots_T, k_KTD)
        self._flat_values[call].index_copy_(1, slots_T, v_KTD)

    def gather(self, call: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy out K and V of the given blocks, `[K, len(blocks) * P, D]` each."""
        keys = self.keys[call].index_select(1, blocks).flatten(1, 2)
        values = self.values[call].index_select(1, blocks).flatten(1, 2)
        return keys, values

    def swap_out(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy blocks to places in host memory, one to one."""
        for some, few in self._groups(blocks, places):
            blocks_N = torch.tensor(some, device=self._tensors[0].device)
            staged_NE = torch.cat(
                [
                    tensor.index_select(1, blocks_N).transpose(0, 1).flatten(1)
                    for tensor in self._tensors
                ],
                dim=1,
            )
            for first, start, stop in runs(few):
                self._host_NE[start:stop].copy_(staged_NE[first : first + stop - start])

    def swap_in(self, blocks: Sequence[int], places: Sequence[int]) -> None:
        """Copy places of host memory back to blocks, one to one."""
        device = self._tensors[0].device
        for some, few in self._groups(blocks, places):
            blocks_N = torch.tensor(some, device=device)
            staged_NE = torch.cat(
                [self._host_NE[start:stop].to(device) for _, start, stop in runs(few)]
            )
            widths = [math.prod(tensor.shape) // tensor.shape[1] for tensor in self._tensors]
            for tensor, part_NE in zip(self._tensors, staged_NE.split(widths, dim=1), strict=True):
                heads, _, positions, width = tensor.shape
                part_NKPD = part_NE.unflatten(1, (heads, positions, width))
                tensor.index_copy_(1, blocks_N, part_NKPD.transpose(0, 1))

    def _groups(
        self, blocks: Sequence[int], places: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        for start in range(0, len(blocks), self._copied_blocks):
            stop = start + self._copied_blocks
            yield blocks[start:stop], places[start:stop]


def runs(places: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut numbers where they do not go on by 1: index of the first, itself, and the last + 1."""
    found: list[tuple[int, int, int]] = []
    for index, place in enumerate(places):
        if found and found[-1][2] == place:
            found[-1] = (*found[-1][:2], place + 1)
        else:
            found.append((index, place, place + 1))
    return found


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a tensor of zeros; of the host's memory it takes only what is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory only once written; torch writes them at once
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if shape[0] == 0:
        return torch.empty(shape, dtype=dtype)
    if device.type == "cpu":
        return zeros(shape, dtype, device)
    return torch.zeros(shape, dtype=dtype, pin_memory=True)
