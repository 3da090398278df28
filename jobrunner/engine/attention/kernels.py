"""Attention over paged KV as numba kernels for the CPU. Know nothing of scheduling.

Threads take work one piece at a time, the longest first, so that a thread that another process
holds up delays only its own piece.

Shapes: T tokens of the packed row, H query heads, K kv heads, N blocks of P positions, D width of
a query or key head, W width of a value head, B sequences that decode, C chunks, R rows of a table
of blocks, L of its columns, I pieces of work. Numbers of 16 bits are bfloat16, kept as uint16;
sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, from_dtype, njit, prange, types

from jobrunner.engine.attention import tiles
from jobrunner.engine.attention.threads import RunOnThreads, torch_threads
from jobrunner.engine.attention.tiles import (
    LANES,
    as_float32,
    as_pointer,
    as_stored,
    call,
    dot_rows,
    exponentials,
    largest,
    multiply_add,
    prefetch,
    take_next,
)
from jobrunner.engine.compiling import kept_compiled

SEES_ALL, SEES_WINDOW, SEES_CHUNK = 0, 1, 2

# queries of a chunk that are computed together
CHUNK_QUERIES = 32
# positions that they meet at a time
_KEYS = 64
# positions that a decode sees at a time: K and V of them stay in the nearest cache meanwhile
_SPAN = 128

_INTEGERS = """
    counters
    out_THW q_HTD k_KTD v_KTW keys_KNPD values_KNPW sinks_H
    q_head_stride q_token_stride k_head_stride k_token_stride v_head_stride v_token_stride
    tokens heads kv_heads blocks positions width value_width
    decodes decode_rows_B lengths_B table_rows table_width table_RL
    decode_pieces decode_work_I4 merges merges_I3 parts parts_IHX
    chunks starts_C stops_C chunk_table_width chunk_table_CL chunk_pieces chunk_work_I4
    has_sinks reach_kind reach_size
"""

# All that one call works on. What has a shape is an address: contiguous but for q, k and v, of
# which only the last dimension is. The packed row begins with the decodes: `decode_rows_B` of
# the table, `lengths_B` tokens with their own; after them the chunks, from `starts_C` up to
# `stops_C`. Pieces of work: decode, first and last position, and which part it makes or -1 for
# the whole; chunk, its first row, first and last position. To merge: decode, first and last
# part; X is W and two more. `softcap` 0 means none. `counters` are zero before each
# call.
JOB = np.dtype(
    [
        *((name, np.int64) for name in _INTEGERS.split()),
        ("scale", np.float32),
        ("softcap", np.float32),
    ],
    align=True,
)
JOB_TYPE = from_dtype(JOB)
# places of the counters of pieces that threads have taken
CHUNKS_TAKEN, DECODES_TAKEN, WRITES_TAKEN = 0, 1, 2
COUNTERS = 3

# called by other kernels only
inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")


@dataclass(frozen=True)
class Kernels:
    """The compiled functions for one number format.

    Their code lives as long as they do, so they are held and not their addresses alone.
    """

    parts: tuple[Any, ...]
    run_on_threads: RunOnThreads
    chunk_queries: int = CHUNK_QUERIES

    def attend(self, job_address: int, threads: int, chunk_tokens: int) -> None:
        """Store K and V of all tokens, then compute what each attends to, for the JOB there."""
        write, work, chunks, decodes, merge = self.parts
        write.ctypes(job_address)
        todo = np.array([chunks.address, decodes.address, job_address])
        self.run_on_threads(work.address, todo.ctypes.data, threads)
        merge.ctypes(job_address)


@cache
def compiled(stored: type[np.generic]) -> Kernels:
    """Compile for float32, or for uint16 as bfloat16; or find what was compiled before."""
    with kept_compiled(f"attention-{stored.__name__}", Path(__file__), Path(tiles.__file__)):
        return _compile(stored)


def _compile(stored: type[np.generic]) -> Kernels:
    entry = cfunc(types.void(types.CPointer(JOB_TYPE)), cache=True, error_model="numpy")

    # functions are given by their addresses, as compiled code that calls others holds a copy of
    # them, which takes as long to compile again
    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def work(pointer):
        chunks, decodes, job = carray(pointer, 3)
        call(chunks, job)
        call(decodes, job)

    @entry
    def write(pointer):
        job = carray(pointer, 1)[0]
        slots = job.blocks * job.positions
        keys = carray(as_pointer(job.keys_KNPD), job.kv_heads * slots * job.width, stored)
        values = carray(as_pointer(job.values_KNPW), job.kv_heads * slots * job.value_width, stored)
        k = carray(as_pointer(job.k_KTD), job.kv_heads * job.k_head_stride, stored)
        v = carray(as_pointer(job.v_KTW), job.kv_heads * job.v_head_stride, stored)
        rows_B = carray(as_pointer(job.decode_rows_B), job.decodes, np.int64)
        lengths_B = carray(as_pointer(job.lengths_B), job.decodes, np.int64)
        table_RL = carray(as_pointer(job.table_RL), (job.table_rows, job.table_width), np.int32)
        starts_C = carray(as_pointer(job.starts_C), job.chunks, np.int64)
        stops_C = carray(as_pointer(job.stops_C), job.chunks, np.int64)
        table_CL = carray(
            as_pointer(job.chunk_table_CL), (job.chunks, job.chunk_table_width), np.int32
        )
        k_strides, v_strides = (
            (job.k_head_stride, job.k_token_stride),
            (
                job.v_head_stride,
                job.v_token_stride,
            ),
        )
        for b in range(job.decodes):
            slot = _slot(table_RL[rows_B[b]], lengths_B[b] - 1, job.positions)
            _copy(k, k_strides, b, keys, slot, slots, job.kv_heads, job.width)
            _copy(v, v_strides, b, values, slot, slots, job.kv_heads, job.value_width)
        t = job.decodes
        for c in range(job.chunks):
            for position in range(starts_C[c], stops_C[c]):
                slot = _slot(table_CL[c], position, job.positions)
                _copy(k, k_strides, t, keys, slot, slots, job.kv_heads, job.width)
                _copy(v, v_strides, t, values, slot, slots, job.kv_heads, job.value_width)
                t += 1

    @entry
    def decodes(pointer):
        job = carray(pointer, 1)[0]
        counters = carray(as_pointer(job.counters), COUNTERS, np.int64)
        width, value_width, positions = job.width, job.value_width, job.positions
        table_RL = carray(as_pointer(job.table_RL), (job.table_rows, job.table_width), np.int32)
        rows_B = carray(as_pointer(job.decode_rows_B), job.decodes, np.int64)
        lengths_B = carray(as_pointer(job.lengths_B), job.decodes, np.int64)
        work_I4 = carray(as_pointer(job.decode_work_I4), (job.decode_pieces, 4), np.int64)
        parts_IHX = carray(
            as_pointer(job.parts_IHX), (job.parts, job.heads, value_width + 2), np.float32
        )
        size = job.kv_heads * job.blocks * positions
        keys = carray(as_pointer(job.keys_KNPD), size * width, stored)
        values = carray(as_pointer(job.values_KNPW), size * value_width, stored)
        q_HTD = carray(as_pointer(job.q_HTD), job.heads * job.q_head_stride, stored)
        out_THW = carray(as_pointer(job.out_THW), (job.tokens, job.heads, value_width), stored)
        sinks_H = carray(as_pointer(job.sinks_H), job.heads * job.has_sinks, np.float32)

        D, W = padded(width), padded(value_width)
        queries = job.heads // job.kv_heads
        per_span = max(1, _SPAN // positions)
        span = padded(per_span * positions)
        q = np.zeros(queries * D, np.float32)
        scores = np.empty(queries * span, np.float32)
        sums = np.empty(queries * W, np.float32)
        highest = np.empty(queries, np.float32)
        totals = np.empty(queries, np.float32)
        # room for a block whose rows are no multiple of 16, or for none
        whole_rows = np.zeros(positions * max(D, W), stored)

        while True:
            taken = take_next(counters, DECODES_TAKEN)
            if taken >= job.decode_pieces * job.kv_heads:
                break
            piece, head = divmod(taken, job.kv_heads)
            b, first, last, part = work_I4[piece]
            first = max(first, first_seen(lengths_B[b] - 1, job.reach_kind, job.reach_size))
            for g in range(queries):
                at = (head * queries + g) * job.q_head_stride + b * job.q_token_stride
                _load_row(q_HTD, at, width, q, g * D, job.scale)
            blocks_L, base = table_RL[rows_B[b]], head * job.blocks
            highest[:] = -np.inf
            totals[:] = 0
            sums[:] = 0
            # of a part that lies before all that is seen, nothing is computed
            stop_block = (last + positions - 1) // positions if first < last else 0
            for span_block in range(first // positions, stop_block, per_span):
                end_block = min(span_block + per_span, stop_block)
                start, stop = max(first, span_block * positions), min(last, end_block * positions)
                for block in range(span_block, end_block):
                    begin, end = max(start, block * positions), min(stop, (block + 1) * positions)
                    slot = (base + blocks_L[block] - block) * positions + begin
                    if block + 1 < stop_block:
                        ahead = (base + blocks_L[block + 1]) * positions * width
                        prefetch(keys, ahead, positions * width)
                    source, at = keys, slot * width
                    if width != D:
                        _pad_rows(keys, at, width, whole_rows, D, end - begin)
                        source, at = whole_rows, 0
                    _dots(q, source, at, scores, begin - start, span, D, queries, end - begin)
                cap(scores, span, queries, stop - start, job.softcap)
                soften(scores, span, queries, stop - start, highest, totals, sums, W)
                for block in range(span_block, end_block):
                    begin, end = max(start, block * positions), min(stop, (block + 1) * positions)
                    slot = (base + blocks_L[block] - block) * positions + begin
                    if block + 1 < stop_block:
                        ahead = (base + blocks_L[block + 1]) * positions * value_width
                        prefetch(values, ahead, positions * value_width)
                    source, at = values, slot * value_width
                    if value_width != W:
                        _pad_rows(values, at, value_width, whole_rows, W, end - begin)
                        source, at = whole_rows, 0
                    _add_rows(
                        scores, begin - start, span, source, at, sums, W, queries, end - begin
                    )
            for g in range(queries):
                h = head * queries + g
                if part < 0:
                    _store_row(sums, g * W, highest[g], totals[g], sinks_H, h, out_THW[b, h])
                else:
                    keep(sums, g * W, highest[g], totals[g], parts_IHX[part, h])

    @entry
    def chunks(pointer):
        job = carray(pointer, 1)[0]
        counters = carray(as_pointer(job.counters), COUNTERS, np.int64)
        width, value_width, positions = job.width, job.value_width, job.positions
        kind, size = job.reach_kind, job.reach_size
        table_CL = carray(
            as_pointer(job.chunk_table_CL), (job.chunks, job.chunk_table_width), np.int32
        )
        work_I4 = carray(as_pointer(job.chunk_work_I4), (job.chunk_pieces, 4), np.int64)
        slots = job.kv_heads * job.blocks * positions
        keys = carray(as_pointer(job.keys_KNPD), slots * width, stored)
        values = carray(as_pointer(job.values_KNPW), slots * value_width, stored)
        q_HTD = carray(as_pointer(job.q_HTD), job.heads * job.q_head_stride, stored)
        out_THW = carray(as_pointer(job.out_THW), (job.tokens, job.heads, value_width), stored)
        sinks_H = carray(as_pointer(job.sinks_H), job.heads * job.has_sinks, np.float32)

        W = padded(value_width)
        queries = job.heads // job.kv_heads
        most = queries * CHUNK_QUERIES if job.chunk_pieces else 0
        q = np.empty(most * width, np.float32)
        scores = np.empty(most * _KEYS, np.float32)
        sums = np.empty(most * W, np.float32)
        highest = np.empty(most, np.float32)
        totals = np.empty(most, np.float32)
        k_DS = np.zeros(width * _KEYS, np.float32)
        v_SW = np.zeros(_KEYS * W, np.float32)

        while True:
            taken = take_next(counters, CHUNKS_TAKEN)
            if taken >= job.chunk_pieces * job.kv_heads:
                break
            piece, head = divmod(taken, job.kv_heads)
            chunk, first_row, start, stop = work_I4[piece]
            own = stop - start
            rows = own * queries
            for g in range(queries):
                for i in range(own):
                    at = (head * queries + g) * job.q_head_stride + (
                        first_row + i
                    ) * job.q_token_stride
                    _load_row(q_HTD, at, width, q, (g * own + i) * width, job.scale)
            blocks_L, base = table_CL[chunk], head * job.blocks
            highest[:] = -np.inf
            totals[:] = 0
            sums[:] = 0
            for begin in range(first_seen(start, kind, size), stop, _KEYS):
                count = min(_KEYS, stop - begin)
                for s in range(count):
                    slot = base * positions + _slot(blocks_L, begin + s, positions)
                    for d in range(width):
                        k_DS[d * _KEYS + s] = as_float32(keys[slot * width + d])
                    for w in range(value_width):
                        v_SW[s * W + w] = as_float32(values[slot * value_width + w])
                _products(q, width, k_DS, scores, rows, padded(count))
                cap(scores, _KEYS, rows, count, job.softcap)
                for i in range(own):
                    lowest = min(count, first_seen(start + i, kind, size) - begin)
                    after = max(0, start + i + 1 - begin)
                    for g in range(queries):
                        at = (g * own + i) * _KEYS
                        for s in range(lowest):
                            scores[at + s] = -np.inf
                        for s in range(after, count):
                            scores[at + s] = -np.inf
                soften(scores, _KEYS, rows, count, highest, totals, sums, W)
                _add_rows(scores, 0, _KEYS, v_SW, 0, sums, W, rows, count)
            for g in range(queries):
                h = head * queries + g
                for i in range(own):
                    r = g * own + i
                    target = out_THW[first_row + i, h]
                    _store_row(sums, r * W, highest[r], totals[r], sinks_H, h, target)

    parts = (write, work, chunks, decodes, compile_merge(stored))
    return Kernels(parts, threads_of())


def compile_merge(stored: type[np.generic]) -> Any:
    """Compile what ends a call: it joins the parts of contexts that were cut."""

    @cfunc(types.void(types.CPointer(JOB_TYPE)), cache=True, error_model="numpy")
    def merge(pointer):
        job = carray(pointer, 1)[0]
        carray(as_pointer(job.counters), COUNTERS, np.int64)[:] = 0
        width = job.value_width
        merges_I3 = carray(as_pointer(job.merges_I3), (job.merges, 3), np.int64)
        parts_IHX = carray(as_pointer(job.parts_IHX), (job.parts, job.heads, width + 2), np.float32)
        out_THW = carray(as_pointer(job.out_THW), (job.tokens, job.heads, width), stored)
        sinks_H = carray(as_pointer(job.sinks_H), job.heads * job.has_sinks, np.float32)
        sums = np.empty(width, np.float32)
        for i in range(job.merges):
            b, first, last = merges_I3[i]
            for h in range(job.heads):
                highest = np.float32(-np.inf)
                for part in range(first, last):
                    highest = max(highest, parts_IHX[part, h, width])
                total = np.float32(0.0)
                sums[:] = 0
                for part in range(first, last):
                    factor = math.exp(parts_IHX[part, h, width] - highest)
                    total += parts_IHX[part, h, width + 1] * factor
                    for w in range(width):
                        sums[w] += parts_IHX[part, h, w] * factor
                _store_row(sums, 0, highest, total, sinks_H, h, out_THW[b, h])

    return merge


def threads_of() -> RunOnThreads:
    """Return what runs compiled code on torch's threads, or on numba's."""
    return torch_threads() or _numba_threads()


def _numba_threads() -> RunOnThreads:
    @njit(types.void(*[types.int64] * 3), parallel=True, nogil=True, cache=True)
    def run(function, argument, threads):
        for _ in prange(threads):
            call(function, argument)

    return run  # type: ignore[no-any-return]


@inner
def first_seen(own, reach_kind, reach_size):
    if reach_kind == SEES_WINDOW:
        return max(0, own - reach_size + 1)
    if reach_kind == SEES_CHUNK:
        return own // reach_size * reach_size
    return 0


@inner
def padded(count):
    return (count + LANES - 1) // LANES * LANES


@inner
def _slot(blocks_L, position, positions):
    return blocks_L[position // positions] * positions + position % positions


@inner
def _copy(source, strides, token, target, slot, slots, heads, width):
    """Store the row of a token in its slot, for each kv head."""
    for head in range(heads):
        begin = head * strides[0] + token * strides[1]
        at = (head * slots + slot) * width
        for i in range(width):
            target[at + i] = source[begin + i]


@inner
def _load_row(source, at, count, target, first, factor):
    for i in range(count):
        target[first + i] = as_float32(source[at + i]) * factor


@inner
def share_of_total(highest, total, sinks_H, head):
    """What sums are multiplied with: 1 over all weights; a sink takes its share, gives nothing."""
    factor = np.float32(1.0)
    if sinks_H.shape[0]:
        top = max(highest, sinks_H[head])
        factor = math.exp(highest - top)  # type: ignore[assignment]
        total = total * factor + math.exp(sinks_H[head] - top)
    return np.float32(factor / total)


@inner
def _store_row(sums, first, highest, total, sinks_H, head, target):
    share = share_of_total(highest, total, sinks_H, head)
    for i in range(target.shape[0]):
        target[i] = as_stored(sums[first + i] * share, target)


@inner
def keep(sums, first, highest, total, target):
    width = target.shape[0] - 2
    for i in range(width):
        target[i] = sums[first + i]
    target[width], target[width + 1] = highest, total


@inner
def _pad_rows(source, first, width, target, target_width, count):
    """Copy rows so that each one ends with zeros, up to a multiple of 16."""
    for row in range(count):
        for i in range(width):
            target[row * target_width + i] = source[first + row * width + i]
        for i in range(width, target_width):
            target[row * target_width + i] = 0


@inner
def cap(scores, span, rows, count, softcap):
    if softcap > 0:
        for r in range(rows):
            for i in range(r * span, r * span + count):
                scores[i] = softcap * math.tanh(scores[i] / softcap)


@inner
def soften(scores, span, rows, count, highest, totals, sums, W):
    """Make weights of scores, relative to the highest so far, to which the sums are brought too."""
    for r in range(rows):
        at = r * span
        for i in range(at + count, at + padded(count)):
            scores[i] = -np.inf
        top = max(highest[r], largest(scores, at, padded(count)))
        if top == -np.inf:
            # none of them is seen
            for i in range(at, at + padded(count)):
                scores[i] = 0
            continue
        if top > highest[r]:
            factor = math.exp(highest[r] - top)
            highest[r] = top
            totals[r] *= factor
            for i in range(r * W, (r + 1) * W):
                sums[i] *= factor
        totals[r] += exponentials(scores, at, padded(count), top)


@inner
def _dots(q, keys, at, scores, first, span, D, rows, count):
    """Scores of every row of Q with `count` rows of K."""
    whole = count // 4 * 4
    r = 0
    while r < rows:
        left = min(4, rows - r)
        a, c = r * D, first + r * span
        for i in range(0, whole, 4):
            b = at + i * D
            if left == 4:
                dot_rows(q, a, D, keys, b, D, scores, c + i, span, D, 4, 4)
            elif left == 3:
                dot_rows(q, a, D, keys, b, D, scores, c + i, span, D, 3, 4)
            elif left == 2:
                dot_rows(q, a, D, keys, b, D, scores, c + i, span, D, 2, 4)
            else:
                dot_rows(q, a, D, keys, b, D, scores, c + i, span, D, 1, 4)
        for i in range(whole, count):
            for one in range(left):
                at_a, at_c = a + one * D, c + i + one * span
                dot_rows(q, at_a, D, keys, at + i * D, D, scores, at_c, span, D, 1, 1)
        r += left


@inner
def _add_rows(weights, first, span, values, at, sums, W, rows, count):
    """Add to each row of sums `count` rows of V by their weights."""
    r = 0
    while r < rows:
        left = min(4, rows - r)
        a, c = first + r * span, r * W
        w = 0
        while w + 4 * LANES <= W:
            if left == 4:
                multiply_add(weights, a, span, values, at + w, W, sums, c + w, W, count, 4, 4, 1)
            elif left == 3:
                multiply_add(weights, a, span, values, at + w, W, sums, c + w, W, count, 3, 4, 1)
            elif left == 2:
                multiply_add(weights, a, span, values, at + w, W, sums, c + w, W, count, 2, 4, 1)
            else:
                multiply_add(weights, a, span, values, at + w, W, sums, c + w, W, count, 1, 4, 1)
            w += 4 * LANES
        while w < W:
            for one in range(left):
                at_a, at_c = a + one * span, c + w + one * W
                multiply_add(weights, at_a, span, values, at + w, W, sums, at_c, W, count, 1, 1, 1)
            w += LANES
        r += left


@inner
def _products(q, width, k_DS, scores, rows, count):
    """Scores of every row of Q with `count` columns of K, a multiple of 16."""
    n, r = width, 0
    wide = count // (4 * LANES) * 4 * LANES
    while r < rows:
        a, c = r * n, r * _KEYS
        if r + 4 <= rows:
            for s in range(0, wide, 4 * LANES):
                multiply_add(q, a, n, k_DS, s, _KEYS, scores, c + s, _KEYS, n, 4, 4, 0)
            for s in range(wide, count, LANES):
                multiply_add(q, a, n, k_DS, s, _KEYS, scores, c + s, _KEYS, n, 4, 1, 0)
            r += 4
        else:
            for s in range(0, count, LANES):
                multiply_add(q, a, n, k_DS, s, _KEYS, scores, c + s, _KEYS, n, 1, 1, 0)
            r += 1
