"""Attention for a GPU: decodes by our kernels, prompts by torch's. Knows nothing of scheduling.

Shapes: T tokens of the packed row, B of which are single ones, H query heads, K kv heads,
D width of a query or key head, W width of a value head.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles
from jobrunner.engine.attention.torch_paged import TorchPagedAttention, slots_of
from jobrunner.engine.attention.triton_tiles import decode_splits
from jobrunner.engine.attention.varlen_prefill import VarlenPrefill
from jobrunner.engine.devices import to_device
from jobrunner.engine.inputs import Put
from jobrunner.engine.kv import KvPool, Reach

log = logging.getLogger("cbjob")

# without a GPU nothing runs beside anything else
_PROCESSORS_OF_NO_GPU = 1


class Kernels(Protocol):
    """What a backend of kernels does; see `torch_kernels` for what it means."""

    def decode(
        self,
        out_BHW: torch.Tensor,
        q_HBD: torch.Tensor,
        keys_KNPD: torch.Tensor,
        values_KNPW: torch.Tensor,
        table: torch.Tensor,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
        options: AttentionOptions,
        reach: Reach,
        splits: int,
    ) -> None: ...

    def write(
        self,
        keys_KNPD: torch.Tensor,
        values_KNPW: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        slots_T: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTables:
    """What kernels read of single tokens, on the device: where each is stored, and its context.

    Row `rows`, `[B]`, of `table` lists the blocks of so many tokens as `lengths`, `[B]`, says.
    """

    slots: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor


class DevicePagedAttention:
    """Keeps K and V in the pool and attends over it; tables and lengths are read on the device.

    Prompts that torch's kernel cannot serve take the way of plain torch, and the log says so
    once. No head may be wider than MOST_WIDTH.
    """

    def __init__(
        self,
        kernels: Kernels,
        pool: KvPool,
        device: torch.device,
        prefill: VarlenPrefill | None = None,
    ) -> None:
        self._kernels = kernels
        self._pool = pool
        self._put: Put = partial(to_device, device=device)
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
        none = torch.empty(0, dtype=torch.long, device=device)
        self._slots_T = none
        self._tables = DecodeTables(none, none, none, none)

    def take_inputs(self, put: Put) -> None:
        """Bring numbers to the device by `put`."""
        self._put = put
        self._prefill.take_inputs(put)
        self._plain.take_inputs(put)

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over single tokens and then pieces, packed in this order.

        Of the single tokens those with the shortest context come first.
        """
        self._call = 0
        self._singles, self._pieces = len(singles), pieces
        size = self._pool.block_size
        self._slots_T = self._put(slots_of(singles, pieces, size))
        if len(singles):
            used = -(-int(singles.lengths[-1]) // size)
            self._tables = DecodeTables(
                slots=self._slots_T[: len(singles)],
                lengths=self._put(singles.lengths),
                rows=self._put(singles.rows),
                table=self._put(np.ascontiguousarray(singles.table[:, :used])),
            )
        self._plain_is_begun = False
        if pieces:
            self._prefill.begin(pieces)

    def begin_tables(self, tables: DecodeTables) -> None:
        """Prepare for a forward pass over single tokens of which only the device knows.

        Nothing of them is looked at here, so that the pass may be captured and played again.
        """
        self._call = 0
        self._singles, self._pieces = len(tables.slots), ()
        self._slots_T = tables.slots
        self._tables = tables

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
        self._kernels.write(
            self._pool.keys[call], self._pool.values[call], k_KTD, v_KTW, self._slots_T
        )
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
        tables = self._tables
        self._kernels.decode(
            out_BHW,
            q_HBD,
            keys,
            self._pool.values[call],
            tables.table,
            tables.rows,
            tables.lengths,
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
