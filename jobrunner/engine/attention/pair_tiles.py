"""Products of bfloat16 that the processor adds two at a time, as vector code for numba.

Knows nothing of blocks or tokens. Two numbers that are multiplied and added together stand in one
int32, the first one low. K comes in groups of 16 positions, as columns of such pairs, `[D/2, 16]`,
V in groups of as many, as rows of them, `[8, W]`: one load is what one instruction takes.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.ir as ir
from llvmlite.binding import get_host_cpu_features
from numba.core import types
from numba.core.cgutils import alloca_once, for_range
from numba.extending import intrinsic

from jobrunner.engine.attention.tiles import (
    FLOATS,
    HALVES,
    INT,
    INTS,
    LANES,
    Array,
    Builder,
    Value,
    call_function,
    index_of,
    multiply_add_row,
    prefetch_line,
    splat,
    splat_constant,
    sum_of_row,
)

PAIRS_IN_GROUP = LANES // 2
# 2^x = 2^n * p(r) for r within 1/2 of 0, of least relative error
_POWER_TERMS = (
    0.00957008505806838,
    0.055917859761068556,
    0.2402474524998248,
    0.6931218148423423,
    0.9999992613131216,
)
# 2^x of it is 0 as float32, as that of -infinity
_LOWEST_TURNS = -200.0


class _BFloat16(ir.Type):  # type: ignore[misc]
    """As LLVM calls it; llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


def multiplies_pairs() -> bool:
    """Whether the processor multiplies and adds pairs of bfloat16."""
    return bool(get_host_cpu_features().get("avx512bf16", False))


def multiply_add_pairs(builder: Builder, total: Value, a: Value, b: Value) -> None:
    """Add the products of 16 pairs to the sums at `total`."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    builder.store(call_function(builder, name, builder.load(total), a, b), total)


def load_pairs(builder: Builder, array: Array, index: Value) -> Value:
    pointer = builder.bitcast(array.at(index), _PAIRS.as_pointer())
    return builder.load(pointer, align=4)


def load_pair_everywhere(builder: Builder, array: Array, index: Value) -> Value:
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
            k_pairs = load_pairs(builder, k, builder.add(k_first, k_at))
            begin = builder.add(q_first, builder.mul(place, index_of(row_count)))
            for number, row in enumerate(sums):
                pair = load_pair_everywhere(builder, q, builder.add(begin, index_of(number)))
                multiply_add_pairs(builder, row[chain], pair, k_pairs)

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
                    v_pairs.append(load_pairs(builder, v, builder.add(begin, at)))
                for row in range(row_count):
                    at = builder.add(builder.add(a_rows[row], done), inner.index)
                    pair = load_pair_everywhere(builder, a, at)
                    for vector in range(vector_count):
                        multiply_add_pairs(builder, sums[row, vector], pair, v_pairs[vector])
        for place in tile:
            c.store_row(builder.load(sums[place]), c_at(*place))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def hide(typing_context, scores, first, group, groups, begin, end):
    """Make -infinity of the scores before `begin` and from `end` on, in groups up to `groups`."""
    index = types.int64
    signature = types.void(scores, index, index, index, index, index)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        scores = Array(context, builder, signature.args[0], values[0])
        first, group, groups = values[1:4]
        begin, end = (splat(builder, builder.trunc(value, INT)) for value in values[4:6])
        lanes = ir.Constant(INTS, list(range(LANES)))
        hidden = splat_constant(FLOATS, float("-inf"))
        with for_range(builder, builder.sub(groups, group)) as loop:
            offset = builder.mul(builder.add(group, loop.index), index_of(LANES))
            columns = builder.add(splat(builder, builder.trunc(offset, INT)), lanes)
            is_seen = builder.and_(
                builder.icmp_signed(">=", columns, begin), builder.icmp_signed("<", columns, end)
            )
            at = builder.add(first, offset)
            scores.store_row(builder.select(is_seen, scores.load_row(at), hidden), at)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def soften_row(
    typing_context, scores, first, groups, weights, at, highest, totals, row, sums, sums_at, width
):
    """Make bfloat16 weights of the scores of a row, relative to the highest so far.

    `highest[row]` becomes that, and `width` sums of before are brought to it, and 16 totals from
    `totals[16 * row]`, to which the weights are added. A NaN makes the totals NaN for good.
    """
    index = types.int64
    places = (scores, index, index, weights, index, highest, totals, index, sums, index, index)
    signature = types.void(*places)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        scores, weights, highest, totals, sums = (
            Array(context, builder, signature.args[i], values[i]) for i in (0, 3, 5, 6, 8)
        )
        first, groups, at = values[1], values[2], values[4]
        row, sums_at, width = values[7], values[9], values[10]
        before = builder.load(highest.at(row))
        held = alloca_once(builder, FLOATS)
        builder.store(splat(builder, before), held)
        with for_range(builder, groups) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            loaded = scores.load_row(builder.add(first, offset))
            builder.store(_larger(builder, builder.load(held), loaded), held)
        top = _largest_lane(builder, builder.load(held))
        # a maximum over nothing that is seen would make NaN of what is not
        none_seen = builder.fcmp_ordered("==", top, splat_constant(FLOATS, float("-inf")))
        base = builder.select(none_seen, splat_constant(FLOATS, 0.0), top)
        factor = power(builder, builder.fsub(splat(builder, before), base))
        totals_at = builder.mul(row, index_of(LANES))
        total = alloca_once(builder, FLOATS)
        builder.store(builder.fmul(totals.load_row(totals_at), factor), total)
        with for_range(builder, groups) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            score = scores.load_row(builder.add(first, offset))
            weight = power(builder, builder.fsub(score, base))
            builder.store(builder.fadd(builder.load(total), weight), total)
            store_rounded(builder, weights, builder.add(at, offset), weight)
        totals.store_row(builder.load(total), totals_at)
        highest_now = builder.extract_element(top, ir.Constant(ir.IntType(32), 0))
        with builder.if_then(builder.fcmp_unordered("!=", highest_now, before)):
            builder.store(highest_now, highest.at(row))
            with for_range(builder, builder.udiv(width, index_of(LANES))) as loop:
                place = builder.add(sums_at, builder.mul(loop.index, index_of(LANES)))
                sums.store_row(builder.fmul(sums.load_row(place), factor), place)
        return context.get_dummy_value()

    return signature, codegen


def _larger(builder: Builder, a: Value, b: Value) -> Value:
    """The larger lanes; of `b` where one is NaN, as processors do it in one instruction."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _largest_lane(builder: Builder, row: Value) -> Value:
    """The largest lane in all lanes."""
    distance = LANES // 2
    while distance:
        lanes = [(lane + distance) % LANES for lane in range(LANES)]
        moved = builder.shuffle_vector(row, row, ir.Constant(INTS, lanes))
        row = _larger(builder, moved, row)
        distance //= 2
    return row


def power(builder: Builder, x: Value) -> Value:
    """e^x for x up to 0, off by 8 in a million at most: far less than bfloat16 tells apart.

    0 for -infinity, NaN for NaN.
    """
    turns = builder.fmul(x, splat_constant(FLOATS, math.log2(math.e)))
    lowest = splat_constant(FLOATS, _LOWEST_TURNS)
    turns = _larger(builder, lowest, turns)
    whole = call_function(builder, "llvm.rint.v16f32", turns)
    rest = builder.fsub(turns, whole)
    series = splat_constant(FLOATS, _POWER_TERMS[0])
    for term in _POWER_TERMS[1:]:
        series = multiply_add_row(builder, series, rest, splat_constant(FLOATS, term))
    # series * 2^whole, by the rounding in force
    name, zero = "llvm.x86.avx512.mask.scalef.ps.512", splat_constant(FLOATS, 0.0)
    everywhere, rounding = ir.Constant(ir.IntType(16), -1), ir.Constant(ir.IntType(32), 4)
    return call_function(builder, name, series, whole, zero, everywhere, rounding)


@intrinsic
def total_of(typing_context, totals, row):
    """Add up the 16 totals of a row."""
    signature = types.float32(totals, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        totals = Array(context, builder, signature.args[0], values[0])
        return sum_of_row(builder, totals.load_row(builder.mul(values[1], index_of(LANES))))

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
        with for_range(builder, builder.udiv(values[4], index_of(LANES))) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            row = builder.fmul(source.load_row(builder.add(values[1], offset)), factors)
            store_rounded(builder, target, builder.add(values[3], offset), row)
        return context.get_dummy_value()

    return signature, codegen


def store_rounded(builder: Builder, target: Array, at: Value, row: Value) -> None:
    """Store 16 numbers as bfloat16, to the nearest, ties to even."""
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    halves = ir.VectorType(_BFloat16(), LANES)
    declared = builder.module.globals.get(name)
    if declared is None:
        declared = ir.Function(builder.module, ir.FunctionType(halves, [FLOATS]), name)
    target.store_row(builder.bitcast(builder.call(declared, [row]), HALVES), at)


@intrinsic
def load_pair(typing_context, array, first):
    """Two neighbours of a bfloat16 array as one int32."""
    signature = types.int32(array, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        source = Array(context, builder, signature.args[0], values[0])
        pointer = builder.bitcast(source.at(values[1]), ir.IntType(32).as_pointer())
        return builder.load(pointer, align=2)

    return signature, codegen
