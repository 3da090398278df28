"""Attention over paged bfloat16 KV for processors that add two products at a time.

What `kernels` does, by `pair_tiles`: K and V lie in the pool as the products read them, one group
of 16 positions of a block after the other. Knows nothing of scheduling.

Shapes: as in `kernels`; R rows, each a query of one head. A group's K is `[D/2, 16]` and its V
`[8, W]`, each of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, cfunc, types

from jobrunner.engine.attention import kernels, pair_tiles, tiles
from jobrunner.engine.attention.kernels import (
    CHUNKS_TAKEN,
    COUNTERS,
    DECODES_TAKEN,
    JOB_TYPE,
    WRITES_TAKEN,
    cap,
    first_seen,
    inner,
    keep,
    padded,
    share_of_total,
    threads_of,
)
from jobrunner.engine.attention.pair_tiles import (
    add_groups,
    hide,
    load_pair,
    multiplies_pairs,
    round_row,
    score_group,
    soften_row,
    total_of,
)
from jobrunner.engine.attention.threads import RunOnThreads
from jobrunner.engine.attention.tiles import LANES, as_pointer, call, take_next
from jobrunner.engine.compiling import kept_compiled

# positions that rows see at a time
_SPAN = 256
# queries of a chunk that are computed together
CHUNK_QUERIES = 16
# rows whose scores are computed together, as far as there are so many
_ROWS = 12
# groups from the one that is read to the one that is brought near
_AHEAD = 4


def serves(block_size: int, width: int, value_width: int) -> bool:
    """Whether K and V of this shape can lie in groups, on a processor that has the products."""
    whole = block_size % LANES == 0 and value_width % LANES == 0 and width % 2 == 0
    return whole and multiplies_pairs()


@dataclass(frozen=True)
class PairKernels:
    """The compiled functions; their code lives as long as they do."""

    parts: tuple[Any, ...]
    run_on_threads: RunOnThreads
    chunk_queries: int = CHUNK_QUERIES

    def attend(self, job_address: int, threads: int, chunk_tokens: int) -> None:
        """Store K and V of all tokens, and compute what each attends to, for the JOB there."""
        write, work, chunks, decodes, merge = self.parts
        # decodes store their own
        if chunk_tokens:
            self.run_on_threads(write.address, job_address, threads)
        todo = np.array([chunks.address, decodes.address, job_address])
        self.run_on_threads(work.address, todo.ctypes.data, threads)
        merge.ctypes(job_address)


@cache
def compiled() -> PairKernels:
    """Compile, or find what was compiled before."""
    sources = [Path(str(module.__file__)) for module in (kernels, tiles, pair_tiles)]
    with kept_compiled("attention-pairs", Path(__file__), *sources):
        return _compile()


def _compile() -> PairKernels:
    entry = cfunc(types.void(types.CPointer(JOB_TYPE)), cache=True, error_model="numpy")

    @entry
    def write(pointer):
        job = carray(pointer, 1)[0]
        counters = carray(as_pointer(job.counters), COUNTERS, np.int64)
        keys, values = _keys(job), _halves_of_values(job)
        k = carray(as_pointer(job.k_KTD), job.kv_heads * job.k_head_stride, np.uint16)
        v = carray(as_pointer(job.v_KTW), job.kv_heads * job.v_head_stride, np.uint16)
        stops_C = carray(as_pointer(job.stops_C), job.chunks, np.int64)
        table_CL = carray(
            as_pointer(job.chunk_table_CL), (job.chunks, job.chunk_table_width), np.int32
        )
        work_I4 = carray(as_pointer(job.chunk_work_I4), (job.chunk_pieces, 4), np.int64)
        half = job.width // 2
        while True:
            taken = take_next(counters, WRITES_TAKEN)
            if taken >= job.chunk_pieces * job.kv_heads:
                break
            piece, head = divmod(taken, job.kv_heads)
            chunk, first_row, start, stop = work_I4[piece]
            for position in range(start, stop):
                row = first_row + position - start
                slot = _slot(table_CL[chunk], head * job.blocks, position, job.positions)
                k_at = head * job.k_head_stride + row * job.k_token_stride
                v_at = head * job.v_head_stride + row * job.v_token_stride
                _store(k, k_at, half, keys, v, v_at, job.value_width, values, slot)
            if stop == stops_C[chunk]:
                slot = _slot(table_CL[chunk], head * job.blocks, stop - 1, job.positions)
                _clear_after(values, job.value_width, slot)

    # by address, as in `kernels`
    @cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def work(pointer):
        chunks, decodes, job = carray(pointer, 3)
        call(chunks, job)
        call(decodes, job)

    @entry
    def decodes(pointer):
        job = carray(pointer, 1)[0]
        counters = carray(as_pointer(job.counters), COUNTERS, np.int64)
        W, positions = job.value_width, job.positions
        table_RL = carray(as_pointer(job.table_RL), (job.table_rows, job.table_width), np.int32)
        rows_B = carray(as_pointer(job.decode_rows_B), job.decodes, np.int64)
        lengths_B = carray(as_pointer(job.lengths_B), job.decodes, np.int64)
        work_I4 = carray(as_pointer(job.decode_work_I4), (job.decode_pieces, 4), np.int64)
        parts_IHX = carray(as_pointer(job.parts_IHX), (job.parts, job.heads, W + 2), np.float32)
        keys, values, value_halves = _keys(job), _values(job), _halves_of_values(job)
        q_HTD = carray(as_pointer(job.q_HTD), job.heads * job.q_head_stride, np.uint16)
        k = carray(as_pointer(job.k_KTD), job.kv_heads * job.k_head_stride, np.uint16)
        v = carray(as_pointer(job.v_KTW), job.kv_heads * job.v_head_stride, np.uint16)
        out = carray(as_pointer(job.out_THW), job.tokens * job.heads * W, np.uint16)
        sinks_H = carray(as_pointer(job.sinks_H), job.heads * job.has_sinks, np.float32)

        half, queries = job.width // 2, job.heads // job.kv_heads
        slots = job.table_width * positions if job.decode_pieces else 0
        key_starts, value_starts = _room_for_starts(slots)
        q, scores, weights, weight_pairs = _room_for_rows(queries, half)
        sums, highest, totals = _room_for_sums(queries, W)

        while True:
            taken = take_next(counters, DECODES_TAKEN)
            if taken >= job.decode_pieces * job.kv_heads:
                break
            piece, head = divmod(taken, job.kv_heads)
            b, first, last, part = work_I4[piece]
            blocks_L, base = table_RL[rows_B[b]], head * job.blocks
            if last == lengths_B[b]:
                slot = _slot(blocks_L, base, last - 1, positions)
                k_at = head * job.k_head_stride + b * job.k_token_stride
                v_at = head * job.v_head_stride + b * job.v_token_stride
                _store(k, k_at, half, keys, v, v_at, W, value_halves, slot)
                _clear_after(value_halves, W, slot)
            at = head * queries * job.q_head_stride + b * job.q_token_stride
            _gather_queries(q_HTD, at, job.q_head_stride, 0, queries, 1, q, half)
            _begin_sums(sums, highest, totals, queries, W)
            first = max(first, first_seen(lengths_B[b] - 1, job.reach_kind, job.reach_size))
            origin = first // LANES * LANES
            # of a part that lies before all that is seen, nothing is computed
            if first < last:
                _find_groups(
                    blocks_L, base, positions, origin, last, half, W, key_starts, value_starts
                )
            for begin in range(origin, last, _SPAN):
                count = min(_SPAN, last - begin)
                group = (begin - origin) // LANES
                _score(q, half, keys, key_starts, group, scores, queries, count, job.scale)
                cap(scores, _SPAN, queries, count, job.softcap)
                for g in range(queries):
                    _hide_unseen(scores, g * _SPAN, first - begin, count, count)
                _soften(scores, weights, queries, count, highest, totals, sums, W)
                _add(weight_pairs, values, value_starts, group, sums, W, queries, count)
            for g in range(queries):
                h = head * queries + g
                if part < 0:
                    share = share_of_total(highest[g], total_of(totals, g), sinks_H, h)
                    round_row(sums, g * W, out, (b * job.heads + h) * W, W, share)
                else:
                    keep(sums, g * W, highest[g], total_of(totals, g), parts_IHX[part, h])

    @entry
    def chunks(pointer):
        job = carray(pointer, 1)[0]
        counters = carray(as_pointer(job.counters), COUNTERS, np.int64)
        W, positions = job.value_width, job.positions
        kind, size = job.reach_kind, job.reach_size
        table_CL = carray(
            as_pointer(job.chunk_table_CL), (job.chunks, job.chunk_table_width), np.int32
        )
        work_I4 = carray(as_pointer(job.chunk_work_I4), (job.chunk_pieces, 4), np.int64)
        keys, values = _keys(job), _values(job)
        q_HTD = carray(as_pointer(job.q_HTD), job.heads * job.q_head_stride, np.uint16)
        out = carray(as_pointer(job.out_THW), job.tokens * job.heads * W, np.uint16)
        sinks_H = carray(as_pointer(job.sinks_H), job.heads * job.has_sinks, np.float32)

        half, queries = job.width // 2, job.heads // job.kv_heads
        slots = job.chunk_table_width * positions if job.chunk_pieces else 0
        key_starts, value_starts = _room_for_starts(slots)
        most = queries * CHUNK_QUERIES if job.chunk_pieces else 0
        q, scores, weights, weight_pairs = _room_for_rows(most, half)
        sums, highest, totals = _room_for_sums(most, W)

        while True:
            taken = take_next(counters, CHUNKS_TAKEN)
            if taken >= job.chunk_pieces * job.kv_heads:
                break
            piece, head = divmod(taken, job.kv_heads)
            chunk, first_row, start, stop = work_I4[piece]
            own = stop - start
            rows = own * queries
            at = head * queries * job.q_head_stride + first_row * job.q_token_stride
            _gather_queries(q_HTD, at, job.q_head_stride, job.q_token_stride, rows, own, q, half)
            _begin_sums(sums, highest, totals, rows, W)
            origin = first_seen(start, kind, size) // LANES * LANES
            _find_groups(
                table_CL[chunk],
                head * job.blocks,
                positions,
                origin,
                stop,
                half,
                W,
                key_starts,
                value_starts,
            )
            for begin in range(origin, stop, _SPAN):
                count = min(_SPAN, stop - begin)
                group = (begin - origin) // LANES
                _score(q, half, keys, key_starts, group, scores, rows, count, job.scale)
                cap(scores, _SPAN, rows, count, job.softcap)
                for i in range(own):
                    lowest = first_seen(start + i, kind, size) - begin
                    after = min(count, start + i + 1 - begin)
                    for g in range(queries):
                        _hide_unseen(scores, (g * own + i) * _SPAN, lowest, after, count)
                _soften(scores, weights, rows, count, highest, totals, sums, W)
                _add(weight_pairs, values, value_starts, group, sums, W, rows, count)
            for g in range(queries):
                h = head * queries + g
                for i in range(own):
                    r = g * own + i
                    share = share_of_total(highest[r], total_of(totals, r), sinks_H, h)
                    round_row(sums, r * W, out, ((first_row + i) * job.heads + h) * W, W, share)

    parts = (write, work, chunks, decodes, kernels.compile_merge(np.uint16))
    return PairKernels(parts, threads_of())


@inner
def _keys(job):
    size = job.kv_heads * job.blocks * job.positions * (job.width // 2)
    return carray(as_pointer(job.keys_KNPD), size, np.int32)


@inner
def _values(job):
    size = job.kv_heads * job.blocks * job.positions * job.value_width // 2
    return carray(as_pointer(job.values_KNPW), size, np.int32)


@inner
def _halves_of_values(job):
    size = job.kv_heads * job.blocks * job.positions * job.value_width
    return carray(as_pointer(job.values_KNPW), size, np.uint16)


@inner
def _room_for_starts(slots):
    """Where the K and the V of each group begin, as `_find_groups` notes it."""
    groups = slots // LANES + 2 + _AHEAD
    return np.empty(groups, np.int64), np.empty(groups, np.int64)


@inner
def _room_for_rows(rows, half):
    """Queries, scores and weights of rows, the weights also as pairs."""
    q = np.empty(rows * half, np.int32)
    scores = np.empty(rows * _SPAN, np.float32)
    weights = np.empty(rows * _SPAN, np.uint16)
    return q, scores, weights, weights.view(np.int32)


@inner
def _room_for_sums(rows, W):
    """Sums, highest scores and totals of the weights of rows."""
    sums = np.empty(rows * W, np.float32)
    return sums, np.empty(rows, np.float32), np.empty(rows * LANES, np.float32)


@inner
def _begin_sums(sums, highest, totals, rows, W):
    """Let rows have seen nothing."""
    highest[:rows] = -np.inf
    totals[: rows * LANES] = 0
    sums[: rows * W] = 0


@inner
def _slot(blocks_L, base, position, positions):
    """Where a position lies among those of all blocks of all heads."""
    return (base + blocks_L[position // positions]) * positions + position % positions


@inner
def _store(k, k_at, half, keys, v, v_at, W, values, slot):
    place = slot % LANES
    at = (slot - place) * half + place
    for d in range(half):
        keys[at + d * LANES] = load_pair(k, k_at + 2 * d)
    at = (slot - place % 2) * W + place % 2
    for w in range(W):
        values[at + 2 * w] = v[v_at + w]


@inner
def _clear_after(values, W, slot):
    """Let no number stand beside the last V: it is multiplied, by a weight of zero."""
    if slot % 2 == 0:
        for w in range(W):
            values[slot * W + 2 * w + 1] = 0


@inner
def _gather_queries(q_HTD, first, head_stride, token_stride, rows, own, q, half):
    """Lay out rows, `own` of one head and then those of the next, as `_score` reads them."""
    r = 0
    while r < rows:
        size = _rows_at_once(rows - r)
        for i in range(size):
            at = first + (r + i) // own * head_stride + (r + i) % own * token_stride
            for d in range(half):
                q[r * half + d * size + i] = load_pair(q_HTD, at + 2 * d)
        r += size


@inner
def _rows_at_once(left):
    return _ROWS if left >= _ROWS else min(4, left)


@inner
def _find_groups(blocks_L, base, positions, origin, stop, half, W, key_starts, value_starts):
    """Note where the groups from `origin` up to `stop` begin, and the last one for those behind."""
    groups = (stop - origin + LANES - 1) // LANES
    for group in range(groups):
        slot = _slot(blocks_L, base, origin + group * LANES, positions)
        key_starts[group], value_starts[group] = slot * half, slot // 2 * W
    for group in range(groups, groups + _AHEAD):
        key_starts[group], value_starts[group] = key_starts[groups - 1], value_starts[groups - 1]


@inner
def _score(q, half, keys, starts, first_group, scores, rows, count, scale):
    """Scores of every row with `count` positions, the last group's rest not to be used."""
    r = 0
    while r < rows:
        size, a = _rows_at_once(rows - r), r * half
        for group in range((count + LANES - 1) // LANES):
            begin, ahead = starts[first_group + group], starts[first_group + group + _AHEAD]
            c = r * _SPAN + group * LANES
            if size == _ROWS:
                score_group(q, a, keys, begin, ahead, half, scores, c, _SPAN, scale, _ROWS, 1)
            elif size == 4:
                score_group(q, a, keys, begin, ahead, half, scores, c, _SPAN, scale, 4, 4)
            elif size == 3:
                score_group(q, a, keys, begin, ahead, half, scores, c, _SPAN, scale, 3, 4)
            elif size == 2:
                score_group(q, a, keys, begin, ahead, half, scores, c, _SPAN, scale, 2, 4)
            else:
                score_group(q, a, keys, begin, ahead, half, scores, c, _SPAN, scale, 1, 4)
        r += size


@inner
def _hide_unseen(scores, at, lowest, after, count):
    """Of `count` positions and the rest of their last group, hide those that a row does not see."""
    groups = padded(count) // LANES
    if lowest > 0:
        hide(scores, at, 0, min(groups, padded(lowest) // LANES), lowest, _SPAN)
    if after < groups * LANES:
        hide(scores, at, max(0, after) // LANES, groups, 0, after)


@inner
def _soften(scores, weights, rows, count, highest, totals, sums, W):
    """Make weights of scores."""
    groups = padded(count) // LANES
    for r in range(rows):
        at = r * _SPAN
        soften_row(scores, at, groups, weights, at, highest, totals, r, sums, r * W, W)


@inner
def _add(weights, values, starts, group, sums, W, rows, count):
    """Add to each row of sums the V of `count` positions by their weights."""
    stride, pairs = _SPAN // 2, (count + 1) // 2
    r = 0
    while r < rows:
        left = min(4, rows - r)
        a, c = r * stride, r * W
        w = 0
        while w + 4 * LANES <= W:
            if left == 4:
                add_groups(
                    weights, a, stride, values, starts, group, w, _AHEAD, W, pairs, sums, c, W, 4, 4
                )
            elif left == 3:
                add_groups(
                    weights, a, stride, values, starts, group, w, _AHEAD, W, pairs, sums, c, W, 3, 4
                )
            elif left == 2:
                add_groups(
                    weights, a, stride, values, starts, group, w, _AHEAD, W, pairs, sums, c, W, 2, 4
                )
            else:
                add_groups(
                    weights, a, stride, values, starts, group, w, _AHEAD, W, pairs, sums, c, W, 1, 4
                )
            w, c = w + 4 * LANES, c + 4 * LANES
        while w < W:
            for one in range(left):
                add_groups(
                    weights,
                    a + one * stride,
                    stride,
                    values,
                    starts,
                    group,
                    w,
                    _AHEAD,
                    W,
                    pairs,
                    sums,
                    c + one * W,
                    W,
                    1,
                    1,
                )
            w, c = w + LANES, c + LANES
        r += left
