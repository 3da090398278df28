"""The tensors behind the blocks. Know nothing of sequences or of who holds which block.

Shapes: K kv heads, N blocks, P positions in a block, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

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


class KvPool:
    """K and V of all blocks, one tensor each per attention call, `[K, N, P, D]`.

    With the heads in front, the blocks of a batch gather into one `[K, batch, context, D]`.
    """

    def __init__(
        self,
        calls: Sequence[AttentionCall],
        block_count: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.calls = tuple(calls)
        self.block_size = block_size
        self.dtype = dtype

        def pool(heads: int, width: int) -> torch.Tensor:
            return _zeros((heads, block_count, block_size, width), dtype, device)

        self.keys = [pool(call.kv_heads, call.key_width) for call in calls]
        self.values = [pool(call.kv_heads, call.value_width) for call in calls]
        self._flat_keys = [keys.flatten(1, 2) for keys in self.keys]
        self._flat_values = [values.flatten(1, 2) for values in self.values]

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory only once written; torch writes them at once
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
