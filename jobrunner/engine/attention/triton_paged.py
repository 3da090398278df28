"""Attention on a GPU: decodes by our kernels, prompts by torch's. Knows nothing of scheduling.

Shapes: T tokens of the packed row, B of which are single ones, H query heads, K kv heads,
D width of a query or key head, W width of a value head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from jobrunner.engine.attention import triton_launch as kernels
from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles
from jobrunner.engine.attention.torch_paged import TorchPagedAttention, slots_of
from jobrunner.engine.attention.triton_tiles import decode_splits
from jobrunner.engine.attention.varlen_prefill import VarlenPrefill
from jobrunner.engine.kv import KvPool

log = logging.getLogger("cbjob")

# without a GPU nothing runs beside anything else
_PROCESSORS_OF_NO_GPU = 1


class TritonAttention:
    """Keeps K and V in the pool and attends over it; tables and lengths are read on the device.

    Prompts that torch's kernel cannot serve take the way of plain torch, and the log says so
    once. No head may be wider than MOST_WIDTH.
    """

    def __init__(
        self, pool: KvPool, device: torch.device, prefill: VarlenPrefill | None = None
    ) -> None:
        self._pool = pool
        self._device = device
        self._prefill = prefill or VarlenPrefill(pool, device)
        self._plain = TorchPagedAttention(pool, device)
        self._processors = _PROCESSORS_OF_NO_GPU
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._said: set[str] = set()
        self._call = 0
        self._singles = 0
        self._pieces: Sequence[Piece] = ()
        self._plain_is_begun = False
        self._slots_T = self._lengths_B = self._rows_B = self._table = torch.empty(0)

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over single tokens and then pieces, packed in this order.

        Of the single tokens those with the shortest context come first.
        """
        self._call = 0
        self._singles, self._pieces = len(singles), pieces
        size = self._pool.block_size
        self._slots_T = self._tensor(slots_of(singles, pieces, size))
        if len(singles):
            used = -(-int(singles.lengths[-1]) // size)
            self._table = self._tensor(np.ascontiguousarray(singles.table[:, :used]))
            self._rows_B = self._tensor(singles.rows)
            self._lengths_B = self._tensor(singles.lengths.astype(np.int32))
        self._plain_is_begun = False
        if pieces:
            self._prefill.begin(pieces)

    def attend(
        self,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store K and V, and return what each token attends to, `[T, H, W]`."""
        call = self._call
        self._call += 1
        kernels.write(self._pool.keys[call], self._pool.values[call], k_KTD, v_KTW, self._slots_T)
        count = self._singles
        heads, tokens, _ = q_HTD.shape
        out_THW = q_HTD.new_empty(tokens, heads, v_KTW.shape[-1])
        if count:
            self._decode(call, q_HTD[:, :count], out_THW[:count], options)
        if self._pieces:
            k_KTD, v_KTW = k_KTD[:, count:], v_KTW[:, count:]
            out_THW[count:] = self._attend_pieces(call, q_HTD[:, count:], k_KTD, v_KTW, options)
        return out_THW

    def _decode(
        self, call: int, q_HBD: torch.Tensor, out_BHW: torch.Tensor, options: AttentionOptions
    ) -> None:
        keys = self._pool.keys[call]
        kernels.decode(
            out_BHW,
            q_HBD,
            keys,
            self._pool.values[call],
            self._table,
            self._rows_B,
            self._lengths_B,
            options,
            self._pool.calls[call].reach,
            decode_splits(q_HBD.shape[1], keys.shape[0], self._processors),
        )

    def _attend_pieces(
        self,
        call: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        reason = self._prefill.unserved(call, options)
        if reason is None:
            return self._prefill.attend(call, q_HTD, k_KTD, v_KTW, options)
        self._say_once(f"prompts are attended to by plain torch, more slowly: {reason}")
        if not self._plain_is_begun:
            self._plain.begin(Singles(), self._pieces)
            self._plain_is_begun = True
        return self._plain.read(call, q_HTD, k_KTD, v_KTW, options)

    def _say_once(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            log.info("%s", what)

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)
