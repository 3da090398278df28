"""Products of bfloat16 that the processor adds two at a time, as vector code for numba.

Knows nothing of blocks or tokens. Two numbers that are multiplied and added together stand in one
int32, the first one low. K comes in groups of 16 positions, as columns of such pairs, `[D/2, 16]`,
V in groups of as many, as rows of them, `[8, W]`: one load is what one instruction takes.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
from llvmlite.binding import get_host_cpu_features
from numba.core import types
from numba.core.cgutils import alloca_once, for_range
from numba.extending import intrinsic

from jobrunner.engine.attention.tiles import (
    FLOATS,
    HALVES,
    INTS,
    LANES,
    Array,
    Builder,
    Value,
    call_function,
    index_of,
    prefetch_line,
    splat,
    splat_constant,
)

PAIRS_IN_GROUP = LANES // 2


class _BFloat16(ir.Type):  # type: ignore[misc]
    """As LLVM calls it; llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


def multiplies_pairs() -> bool:
    """Whether the processor multiplies and adds pairs of bfloat16."""
    return bool(get_host_cpu_features().get("avx512bf16", False))


def _multiply_add(builder: Builder, total: Value, a: Value, b: Value) -> None:
    """Add the products of 16 pairs to the sums at `total`."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    builder.store(call_function(builder, name, builder.load(total), a, b), total)


def _load_pairs(builder: Builder, array: Array, index: Value) -> Value:
    pointer = builder.bitcast(array.at(index), _PAIRS.as_pointer())
    return builder.load(pointer, align=4)


def _load_pair_everywhere(builder: Builder, array: Array, index: Value) -> Value:
    return builder.bitcast(array.load_everywhere(index), _PAIRS)


@intrinsic(prefer_literal=True)
def score_group(
    typing_context, q, q_first, k, k_first, ahead, half, c, c_first, c_stride, factor, rows, chains
):
    """C[rows, 16] = `factor` * Q[half, rows].T @ K[half, 16], both in pairs.

    Meanwhile K from `ahead` on is brought near. `rows` and `chains` are literals: each row is
    summed in so many chains, as one addition waits for the one before.
    """
    index = types.int64
    places = (q, index, k, index, index, index, c, index, index, types.float32)
    signature = types.void(*places, rows, chains)
    row_count, chain_count = rows.literal_value, chains.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        q, k, c = (Array(context, builder, signature.args[i], values[i]) for i in (0, 2, 6))
        q_first, k_first, ahead, half = values[1], values[3], values[4], values[5]
        c_first, c_stride, factor = values[7:10]
        sums = [
            [alloca_once(builder, FLOATS) for _ in range(chain_count)] for _ in range(row_count)
        ]
        for row in sums:
            for total in row:
                builder.store(splat_constant(FLOATS, 0.0), total)

        def add(place: Value, chain: int) -> None:
            k_at = builder.mul(place, index_of(LANES))
            prefetch_line(builder, k, builder.add(ahead, k_at))
            k_pairs = _load_pairs(builder, k, builder.add(k_first, k_at))
            begin = builder.add(q_first, builder.mul(place, index_of(row_count)))
            for number, row in enumerate(sums):
                pair = _load_pair_everywhere(builder, q, builder.add(begin, index_of(number)))
                _multiply_add(builder, row[chain], pair, k_pairs)

        turns = builder.udiv(half, index_of(chain_count))
        with for_range(builder, turns) as loop:
            first = builder.mul(loop.index, index_of(chain_count))
            for chain in range(chain_count):
                add(builder.add(first, index_of(chain)), chain)
        done = builder.mul(turns, index_of(chain_count))
        with for_range(builder, builder.sub(half, done)) as loop:
            add(builder.add(done, loop.index), 0)
        factors = splat(builder, factor)
        for number, row in enumerate(sums):
            total = builder.load(row[0])
            for chain in row[1:]:
                total = builder.fadd(total, builder.load(chain))
            at = builder.add(c_first, builder.mul(c_stride, index_of(number)))
            c.store_row(builder.fmul(total, factors), at)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def add_groups(
    typing_context,
    a,
    a_first,
    a_stride,
    v,
    starts,
    first_start,
    v_offset,
    ahead,
    v_stride,
    pairs,
    c,
    c_first,
    c_stride,
    rows,
    vectors,
):
    """C[rows, 16 * vectors] += A[rows, pairs] @ V[pairs, 16 * vectors], both in pairs.

    V lies in groups of 8 rows, the first of them `v_offset` behind `starts[first_start]`, the next
    behind the next one. Meanwhile the group `ahead` of each is brought near, which has to stand in
    `starts`, too. `rows` and `vectors` are literals.
    """
    index = types.int64
    places = (a, index, index, v, starts, index, index, index, index, index, c, index, index)
    signature = types.void(*places, rows, vectors)
    row_count, vector_count = rows.literal_value, vectors.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        a, v, starts, c = (
            Array(context, builder, signature.args[i], values[i]) for i in (0, 3, 4, 10)
        )
        a_first, a_stride = values[1:3]
        first_start, v_offset, ahead, v_stride, pairs = values[5:10]
        c_first, c_stride = values[11:13]
        tile = [(row, vector) for row in range(row_count) for vector in range(vector_count)]

        def c_at(row: int, vector: int) -> Value:
            begin = builder.add(c_first, builder.mul(c_stride, index_of(row)))
            return builder.add(begin, index_of(LANES * vector))

        def start_of(group: Value) -> Value:
            place = builder.add(first_start, group)
            return builder.add(builder.load(starts.at(place)), v_offset)

        sums = {place: alloca_once(builder, FLOATS) for place in tile}
        for place in tile:
            builder.store(c.load_row(c_at(*place)), sums[place])
        a_rows = [
            builder.add(a_first, builder.mul(a_stride, index_of(r))) for r in range(row_count)
        ]
        in_group = index_of(PAIRS_IN_GROUP)
        groups = builder.udiv(builder.add(pairs, index_of(PAIRS_IN_GROUP - 1)), in_group)
        with for_range(builder, groups) as outer:
            done = builder.mul(outer.index, in_group)
            left = builder.sub(pairs, done)
            is_whole = builder.icmp_signed(">", left, in_group)
            begin, later = start_of(outer.index), start_of(builder.add(outer.index, ahead))
            with for_range(builder, builder.select(is_whole, in_group, left)) as inner:
                offset = builder.mul(inner.index, v_stride)
                v_pairs = []
                for vector in range(vector_count):
                    at = builder.add(offset, index_of(LANES * vector))
                    prefetch_line(builder, v, builder.add(later, at))
                    v_pairs.append(_load_pairs(builder, v, builder.add(begin, at)))
                for row in range(row_count):
                    at = builder.add(builder.add(a_rows[row], done), inner.index)
                    pair = _load_pair_everywhere(builder, a, at)
                    for vector in range(vector_count):
                        _multiply_add(builder, sums[row, vector], pair, v_pairs[vector])
        for place in tile:
            c.store_row(builder.load(sums[place]), c_at(*place))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def round_row(typing_context, source, first, target, at, count, factor):
    """Store `count` numbers, a multiple of 16, times `factor` as bfloat16."""
    index = types.int64
    signature = types.void(source, index, target, index, index, types.float32)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        source = Array(context, builder, signature.args[0], values[0])
        target = Array(context, builder, signature.args[2], values[2])
        factors = splat(builder, values[5])
        half, one, sixteen = (splat_constant(INTS, number) for number in (0x7FFF, 1, 16))
        no_number = splat_constant(INTS, 0x7FC0)
        with for_range(builder, builder.udiv(values[4], index_of(LANES))) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            row = builder.fmul(source.load_row(builder.add(values[1], offset)), factors)
            bits = builder.bitcast(row, INTS)
            odd = builder.and_(builder.lshr(bits, sixteen), one)
            rounded = builder.lshr(builder.add(builder.add(bits, half), odd), sixteen)
            rounded = builder.select(builder.fcmp_unordered("uno", row, row), no_number, rounded)
            target.store_row(builder.trunc(rounded, HALVES), builder.add(values[3], offset))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def load_pair(typing_context, array, first):
    """Two neighbours of a bfloat16 array as one int32."""
    signature = types.int32(array, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        source = Array(context, builder, signature.args[0], values[0])
        pointer = builder.bitcast(source.at(values[1]), ir.IntType(32).as_pointer())
        return builder.load(pointer, align=2)

    return signature, codegen
