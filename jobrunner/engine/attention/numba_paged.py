"""Attention over paged KV on a CPU, by compiled kernels. Knows nothing of scheduling.

Shapes: T tokens of the packed row, H query heads, K kv heads, D width of a query or key head,
W width of a value head, B sequences that decode, R rows of a table of blocks, L of its columns,
C chunks, I pieces of work, four numbers each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache

import numba
import numpy as np
import torch

from jobrunner.engine.attention import kernels, pair_kernels
from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles, UnservedError
from jobrunner.engine.attention.pair_tiles import multiplies_pairs
from jobrunner.engine.kv import AttentionCall, KvPool, Reach

log = logging.getLogger("cbjob")

AnyKernels = kernels.Kernels | pair_kernels.PairKernels

STORED = {torch.float32: np.float32, torch.bfloat16: np.uint16}

# a context is cut between threads into parts of no fewer positions
_LEAST_PART = 512
# pieces of work for each thread, so that all end at about the same time
_PIECES_PER_THREAD = 4


class NumbaPagedAttention:
    """Keeps K and V in the pool and attends over it; everything per step is built in `begin`."""

    def __init__(self, pool: KvPool, device: torch.device) -> None:
        if pool.dtype not in STORED or device.type != "cpu":
            raise UnservedError(f"there are no kernels for {pool.dtype} on {device.type}")
        self._pool = pool
        self._kernels = compiled(pool.dtype, pool.block_size, pool.calls)
        self._call = 0
        self._threads = 1
        self._jobs = np.zeros(len(pool.calls), dtype=kernels.JOB)
        first = self._jobs.ctypes.data
        self._job_addresses = [first + i * kernels.JOB.itemsize for i in range(len(pool.calls))]
        # the jobs hold addresses only: what is there has to live as long as they do
        self._held: list[np.ndarray] = []
        self._parts = self._chunk_tokens = 0
        self._jobs["keys_KNPD"] = [keys.data_ptr() for keys in pool.keys]
        self._jobs["values_KNPW"] = [values.data_ptr() for values in pool.values]
        self._jobs["blocks"], self._jobs["positions"] = pool.block_count, pool.block_size
        for call, job in zip(pool.calls, self._jobs, strict=True):
            job["kv_heads"] = call.kv_heads
            job["width"], job["value_width"] = call.key_width, call.value_width
            job["reach_kind"], job["reach_size"] = _reach(call.reach)

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over single tokens, in any order, and then pieces."""
        self._call = 0
        self._held.clear()
        self._threads = torch.get_num_threads()
        self._point("counters", np.zeros(kernels.COUNTERS, dtype=np.int64))
        table_RL, rows_B, lengths_B = singles.table, singles.rows, singles.lengths
        self._jobs["decodes"] = len(rows_B)
        self._jobs["table_rows"], self._jobs["table_width"] = table_RL.shape
        self._point("table_RL", np.ascontiguousarray(table_RL, dtype=np.int32))
        self._point("decode_rows_B", np.ascontiguousarray(rows_B, dtype=np.int64))
        self._point("lengths_B", np.ascontiguousarray(lengths_B, dtype=np.int64))
        work_I4, merges_I3 = decode_work(lengths_B, self._longest_part(lengths_B))
        self._jobs["decode_pieces"], self._jobs["merges"] = len(work_I4), len(merges_I3)
        self._point("decode_work_I4", work_I4)
        self._point("merges_I3", merges_I3)
        self._jobs["parts"] = self._parts = int(merges_I3[-1, 2]) if len(merges_I3) else 0

        table_CL = block_table(pieces, self._pool.block_size)
        chunk_work_I4 = chunk_work(pieces, len(rows_B), self._kernels.chunk_queries)
        self._jobs["chunks"], self._jobs["chunk_table_width"] = table_CL.shape
        self._jobs["chunk_pieces"] = len(chunk_work_I4)
        self._point("chunk_table_CL", table_CL)
        self._point("starts_C", np.array([chunk.start for chunk in pieces], dtype=np.int64))
        self._point("stops_C", np.array([chunk.stop for chunk in pieces], dtype=np.int64))
        self._point("chunk_work_I4", chunk_work_I4)
        self._chunk_tokens = sum(piece.stop - piece.start for piece in pieces)

    def attend(
        self,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store K and V, and return what each token attends to, `[T, H, W]`."""
        job, address = self._jobs[self._call], self._job_addresses[self._call]
        self._call += 1
        q_HTD, k_KTD, v_KTW = self._readable(q_HTD), self._readable(k_KTD), self._readable(v_KTW)
        heads, tokens, _ = q_HTD.shape
        width = v_KTW.shape[-1]
        out_THW = q_HTD.new_empty(tokens, heads, width)
        job["out_THW"], job["q_HTD"] = out_THW.data_ptr(), q_HTD.data_ptr()
        job["k_KTD"], job["v_KTW"] = k_KTD.data_ptr(), v_KTW.data_ptr()
        job["q_head_stride"], job["q_token_stride"], _ = q_HTD.stride()
        job["k_head_stride"], job["k_token_stride"], _ = k_KTD.stride()
        job["v_head_stride"], job["v_token_stride"], _ = v_KTW.stride()
        job["tokens"], job["heads"] = tokens, heads
        job["scale"], job["softcap"] = options.scale, options.softcap or 0.0
        job["has_sinks"] = options.sinks is not None
        if options.sinks is not None:
            sinks_H = options.sinks.to(torch.float32).contiguous()
            job["sinks_H"] = sinks_H.data_ptr()
        if self._parts:
            parts_IHX = torch.empty(self._parts, heads, width + 2)
            job["parts_IHX"] = parts_IHX.data_ptr()
        self._kernels.attend(address, self._threads, self._chunk_tokens)
        return out_THW

    def _longest_part(self, lengths_B: np.ndarray) -> int:
        """How many positions of a context one thread takes at a time."""
        least_heads = min(call.kv_heads for call in self._pool.calls)
        share = int(lengths_B.sum()) * least_heads // (_PIECES_PER_THREAD * self._threads)
        size = self._pool.block_size
        return -(-max(_LEAST_PART, share) // size) * size

    def _readable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != self._pool.dtype:
            raise UnservedError(f"it attends in {tensor.dtype}, its weights are {self._pool.dtype}")
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

    def _point(self, name: str, array: np.ndarray) -> None:
        """Let every job find this array."""
        self._held.append(array)
        self._jobs[name] = array.ctypes.data


def compiled(dtype: torch.dtype, block_size: int, calls: Sequence[AttentionCall]) -> AnyKernels:
    """Return the best kernels for a pool of such blocks, which only these can read then.

    Logs which, and how long it took to have them, the first time in a process.
    """
    in_pairs = dtype == torch.bfloat16 and all(
        pair_kernels.serves(block_size, call.key_width, call.value_width) for call in calls
    )
    return _ready(dtype, in_pairs)


@cache
def _ready(dtype: torch.dtype, in_pairs: bool) -> AnyKernels:
    started = time.perf_counter()
    ready = pair_kernels.compiled() if in_pairs else kernels.compiled(STORED[dtype])
    kind = f"{str(dtype).removeprefix('torch.')}{' in pairs' if in_pairs else ''}"
    log.info(
        "attention by compiled kernels (numba %s, %s): ready in %.1f s",
        numba.__version__,
        kind,
        time.perf_counter() - started,
    )
    if dtype == torch.bfloat16 and not in_pairs and multiplies_pairs():
        log.info("faster ones serve a batching.block_size that is a multiple of 16")
    return ready


def block_table(pieces: Sequence[Piece], block_size: int) -> np.ndarray:
    """The blocks that hold each piece and what is before it, a row each."""
    counts = [-(-piece.stop // block_size) for piece in pieces]
    table_RL = np.zeros((len(pieces), max(counts, default=0)), dtype=np.int32)
    for row, (piece, count) in enumerate(zip(pieces, counts, strict=True)):
        table_RL[row, :count] = piece.blocks[:count]
    return table_RL


def decode_work(lengths_B: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut contexts into parts of at most `most` positions, the longest parts first.

    Returns decode, first and last position, and the number of the part, -1 where there is only
    one; and for every context of several parts decode, first and last part.
    """
    counts_B = -(-lengths_B // most)
    ends_B = np.cumsum(counts_B)
    decode_I = np.repeat(np.arange(len(lengths_B)), counts_B)
    nth_I = np.arange(len(decode_I)) - (ends_B - counts_B)[decode_I]
    # parts of about the same size
    first_I = lengths_B[decode_I] * nth_I // counts_B[decode_I]
    last_I = lengths_B[decode_I] * (nth_I + 1) // counts_B[decode_I]
    is_part_I = counts_B[decode_I] > 1
    part_I = np.where(is_part_I, np.cumsum(is_part_I) - 1, -1)
    order = np.argsort(first_I - last_I, kind="stable")
    work_I4 = np.stack([decode_I, first_I, last_I, part_I], axis=1)[order]
    cut_M = np.flatnonzero(counts_B > 1)
    part_ends_M = np.cumsum(counts_B[cut_M])
    merges_M3 = np.stack([cut_M, part_ends_M - counts_B[cut_M], part_ends_M], axis=1)
    return np.ascontiguousarray(work_I4), np.ascontiguousarray(merges_M3)


def chunk_work(chunks: Sequence[Piece], first_row: int, most: int) -> np.ndarray:
    """Cut chunks into tiles of at most `most` queries, those that see most first.

    Returns chunk, row of the first query in the packed row, first and last position.
    """
    work = []
    for index, chunk in enumerate(chunks):
        for start in range(chunk.start, chunk.stop, most):
            stop = min(start + most, chunk.stop)
            work.append((index, first_row + start - chunk.start, start, stop))
        first_row += chunk.stop - chunk.start
    work.sort(key=lambda piece: -piece[3])
    return np.array(work, dtype=np.int64).reshape(-1, 4)


def _reach(reach: Reach) -> tuple[int, int]:
    if reach.window is not None:
        return kernels.SEES_WINDOW, reach.window
    if reach.chunk is not None:
        return kernels.SEES_CHUNK, reach.chunk
    return kernels.SEES_ALL, 0
