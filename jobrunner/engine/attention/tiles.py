"""The innermost loops of attention as vector code for numba. Know nothing of blocks or tokens.

numba has no vectors of its own and LLVM finds few in such loops, so these functions emit LLVM's
generic vectors, which every processor gets as what it has: a row of 16 numbers is one AVX-512
register, two of AVX2, four of NEON. Arrays are flat, `first` is the index where a matrix begins
and `stride` the distance of its rows. Numbers of 16 bits are bfloat16, kept as uint16.
"""

from __future__ import annotations

import math
from typing import Any

import llvmlite.ir as ir
from numba.core import types
from numba.core.cgutils import alloca_once, for_range
from numba.extending import intrinsic

LANES = 16
_LINE_BYTES = 64

FLOAT = ir.FloatType()
INT = ir.IntType(32)
INDEX = ir.IntType(64)
FLOATS = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(INT, LANES)
HALVES = ir.VectorType(ir.IntType(16), LANES)
_LOG2_E = math.log2(math.e)
# e^x = 2^n * p(r): Cephes' expf, error below 2 units in the last place
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.166666655, 0.5)
# below it e^x is not a normal float32
_LOWEST_EXPONENT = -87.33654

Value = Any
Builder = Any


class Array:
    """A flat array inside emitted code."""

    def __init__(self, context: Any, builder: Builder, kind: types.Array, value: Value) -> None:
        self._builder = builder
        self._data = context.make_array(kind)(context, builder, value).data
        self._is_bfloat16 = kind.dtype == types.uint16

    def at(self, index: Value) -> Value:
        return self._builder.gep(self._data, [index])

    def load_row(self, index: Value) -> Value:
        """Load 16 numbers as float32."""
        builder, pointer = self._builder, self.at(index)
        if not self._is_bfloat16:
            return builder.load(builder.bitcast(pointer, FLOATS.as_pointer()), align=4)
        halves = builder.load(builder.bitcast(pointer, HALVES.as_pointer()), align=2)
        return self._widen(builder.zext(halves, INTS))

    def _widen(self, bits: Value) -> Value:
        shifted = self._builder.shl(bits, splat_constant(INTS, 16))
        return self._builder.bitcast(shifted, FLOATS)

    def store_row(self, value: Value, index: Value) -> None:
        builder = self._builder
        pointer = builder.bitcast(self.at(index), value.type.as_pointer())
        # by no more than the narrowest number may lie
        builder.store(value, pointer, align=2)

    def load_everywhere(self, index: Value) -> Value:
        """Load one number of 32 bits into all lanes."""
        return splat(self._builder, self._builder.load(self.at(index)))


def splat_constant(kind: ir.VectorType, number: float) -> Value:
    return ir.Constant(kind, [number] * kind.count)


def splat(builder: Builder, scalar: Value) -> Value:
    undefined = ir.Constant(ir.VectorType(scalar.type, 1), ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))


def call_function(builder: Builder, name: str, *values: Value) -> Value:
    kind = values[0].type
    declared = builder.module.globals.get(name)
    if declared is None:
        function_type = ir.FunctionType(kind, [value.type for value in values])
        declared = ir.Function(builder.module, function_type, name)
    return builder.call(declared, values)


def multiply_add_row(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    # fused where the processor can
    return call_function(builder, "llvm.fmuladd.v16f32", a, b, c)


def index_of(number: int) -> Value:
    return ir.Constant(INDEX, number)


@intrinsic(prefer_literal=True)
def multiply_add(
    typing_context,
    a,
    a_first,
    a_stride,
    b,
    b_first,
    b_stride,
    c,
    c_first,
    c_stride,
    count,
    rows,
    vectors,
    adds,
):
    """C[rows, 16 * vectors] = A[rows, count] @ B[count, 16 * vectors], or += where `adds`.

    A and C are float32; `rows`, `vectors` and `adds` are literals.
    """
    index = types.int64
    places = (a, index, index, b, index, index, c, index, index, index)
    signature = types.void(*places, rows, vectors, adds)
    row_count, vector_count = rows.literal_value, vectors.literal_value
    begins_with_c = bool(adds.literal_value)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        a, b, c = (Array(context, builder, signature.args[i], values[i]) for i in (0, 3, 6))
        a_first, a_stride, b_first, b_stride, c_first, c_stride = (
            values[i] for i in (1, 2, 4, 5, 7, 8)
        )
        tile = [(row, vector) for row in range(row_count) for vector in range(vector_count)]

        def a_at(row: int) -> Value:
            return builder.add(a_first, builder.mul(a_stride, index_of(row)))

        def c_at(row: int, vector: int) -> Value:
            begin = builder.add(c_first, builder.mul(c_stride, index_of(row)))
            return builder.add(begin, index_of(LANES * vector))

        sums = {place: alloca_once(builder, FLOATS) for place in tile}
        for place in tile:
            start = c.load_row(c_at(*place)) if begins_with_c else splat_constant(FLOATS, 0.0)
            builder.store(start, sums[place])
        a_rows = [a_at(row) for row in range(row_count)]
        with for_range(builder, values[9]) as loop:
            begin = builder.add(b_first, builder.mul(b_stride, loop.index))
            b_rows = [
                b.load_row(builder.add(begin, index_of(LANES * v))) for v in range(vector_count)
            ]
            for row in range(row_count):
                number = a.load_everywhere(builder.add(a_rows[row], loop.index))
                for vector in range(vector_count):
                    place = sums[row, vector]
                    added = multiply_add_row(builder, number, b_rows[vector], builder.load(place))
                    builder.store(added, place)
        for place in tile:
            c.store_row(builder.load(sums[place]), c_at(*place))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def dot_rows(
    typing_context,
    a,
    a_first,
    a_stride,
    b,
    b_first,
    b_stride,
    c,
    c_first,
    c_stride,
    width,
    rows,
    columns,
):
    """C[rows, columns] = A[rows, width] @ B[columns, width].T, `width` a multiple of 16.

    A and C are float32; `rows` and `columns` are literals, 16 in product at most.
    """
    index = types.int64
    places = (a, index, index, b, index, index, c, index, index, index)
    signature = types.void(*places, rows, columns)
    row_count, column_count = rows.literal_value, columns.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        a, b, c = (Array(context, builder, signature.args[i], values[i]) for i in (0, 3, 6))
        a_first, a_stride, b_first, b_stride, c_first, c_stride = (
            values[i] for i in (1, 2, 4, 5, 7, 8)
        )
        tile = [(row, column) for row in range(row_count) for column in range(column_count)]

        def begin(first: Value, stride: Value, number: int) -> Value:
            return builder.add(first, builder.mul(stride, index_of(number)))

        a_rows = [begin(a_first, a_stride, row) for row in range(row_count)]
        b_rows = [begin(b_first, b_stride, column) for column in range(column_count)]
        sums = {place: alloca_once(builder, FLOATS) for place in tile}
        for place in tile:
            builder.store(splat_constant(FLOATS, 0.0), sums[place])
        with for_range(builder, builder.udiv(values[9], index_of(LANES))) as loop:
            offset = builder.mul(loop.index, index_of(LANES))
            loaded_b = [b.load_row(builder.add(at, offset)) for at in b_rows]
            for row in range(row_count):
                loaded_a = a.load_row(builder.add(a_rows[row], offset))
                for column in range(column_count):
                    place = sums[row, column]
                    added = multiply_add_row(
                        builder, loaded_a, loaded_b[column], builder.load(place)
                    )
                    builder.store(added, place)
        totals = _sum_each(builder, [builder.load(sums[place]) for place in tile])
        for row in range(row_count):
            lanes = [row * column_count + column for column in range(column_count)]
            part = builder.shuffle_vector(
                totals, totals, ir.Constant(ir.VectorType(INT, column_count), lanes)
            )
            c.store_row(part, begin(c_first, c_stride, row))
        return context.get_dummy_value()

    return signature, codegen


def _sum_each(builder: Builder, vectors: list[Value]) -> Value:
    """Return one vector with the sum over each of up to 16 vectors, in their order.

    Each round adds halves of lanes and joins two vectors in one.
    """
    zero = splat_constant(FLOATS, 0.0)
    vectors = vectors + [zero] * (LANES - len(vectors))
    half = LANES // 2
    while half:
        # lanes in groups of 2 * half, one group for each of the first vectors that is in there
        low = [lane for lane in range(LANES) if lane % (2 * half) < half]
        high = [lane + half for lane in low]
        both = [
            [lane + LANES * second for second in (0, 1) for lane in lanes] for lanes in (low, high)
        ]
        joined = []
        for first, second in zip(vectors[::2], vectors[1::2], strict=True):
            if first is zero and second is zero:
                joined.append(zero)
                continue
            parts = [
                builder.shuffle_vector(first, second, ir.Constant(INTS, lanes)) for lanes in both
            ]
            joined.append(builder.fadd(*parts))
        vectors = joined
        half //= 2
    return vectors[0]


@intrinsic
def exponentials(typing_context, row, first, count, highest):
    """Replace x by e^(x - highest) in `count` numbers, a multiple of 16; return their sum."""
    signature = types.float32(row, types.int64, types.int64, types.float32)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        array = Array(context, builder, signature.args[0], values[0])
        highest = splat(builder, values[3])
        total = alloca_once(builder, FLOATS)
        builder.store(splat_constant(FLOATS, 0.0), total)
        with for_range(builder, builder.udiv(values[2], index_of(LANES))) as loop:
            at = builder.add(values[1], builder.mul(loop.index, index_of(LANES)))
            power = _exponential(builder, builder.fsub(array.load_row(at), highest))
            array.store_row(power, at)
            builder.store(builder.fadd(builder.load(total), power), total)
        return sum_of_row(builder, builder.load(total))

    return signature, codegen


def _exponential(builder: Builder, x: Value) -> Value:
    """e^x for x up to 0; 0 where it is too small for a normal number."""
    lowest = splat_constant(FLOATS, _LOWEST_EXPONENT)
    is_small = builder.fcmp_ordered("<", x, lowest)
    x = builder.select(is_small, lowest, x)
    turns = builder.fmul(x, splat_constant(FLOATS, _LOG2_E))
    turns = call_function(builder, "llvm.rint.v16f32", turns)
    rest = multiply_add_row(builder, turns, splat_constant(FLOATS, -_LN2_HIGH), x)
    rest = multiply_add_row(builder, turns, splat_constant(FLOATS, -_LN2_LOW), rest)
    series = splat_constant(FLOATS, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        series = multiply_add_row(builder, series, rest, splat_constant(FLOATS, term))
    series = multiply_add_row(builder, series, builder.fmul(rest, rest), rest)
    series = builder.fadd(series, splat_constant(FLOATS, 1.0))
    exponent = builder.shl(builder.fptosi(turns, INTS), splat_constant(INTS, 23))
    power = builder.bitcast(builder.add(builder.bitcast(series, INTS), exponent), FLOATS)
    power = builder.select(is_small, splat_constant(FLOATS, 0.0), power)
    # whatever the conversion to int made of it
    return builder.select(builder.fcmp_unordered("uno", x, x), x, power)


@intrinsic
def largest(typing_context, row, first, count):
    """Return the largest of `count` numbers, a multiple of 16."""
    signature = types.float32(row, types.int64, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        array = Array(context, builder, signature.args[0], values[0])
        found = alloca_once(builder, FLOATS)
        builder.store(splat_constant(FLOATS, float("-inf")), found)
        with for_range(builder, builder.udiv(values[2], index_of(LANES))) as loop:
            at = builder.add(values[1], builder.mul(loop.index, index_of(LANES)))
            loaded, held = array.load_row(at), builder.load(found)
            is_more = builder.fcmp_unordered(">", loaded, held)
            builder.store(builder.select(is_more, loaded, held), found)
        return _reduce(builder, "llvm.vector.reduce.fmax.v16f32", builder.load(found))

    return signature, codegen


def sum_of_row(builder: Builder, vector: Value) -> Value:
    return _reduce(builder, "llvm.vector.reduce.fadd.v16f32", vector, start=-0.0)


def _reduce(builder: Builder, name: str, vector: Value, start: float | None = None) -> Value:
    begin = [] if start is None else [ir.Constant(FLOAT, start)]
    declared = builder.module.globals.get(name)
    if declared is None:
        kinds = [value.type for value in begin] + [FLOATS]
        declared = ir.Function(builder.module, ir.FunctionType(FLOAT, kinds), name)
    # in any order
    flags = () if start is None else ("reassoc",)
    return builder.call(declared, [*begin, vector], fastmath=flags)


def prefetch_line(builder: Builder, array: Array, index: Value) -> None:
    """Ask for the line of the cache with this element to be brought near."""
    pointer_type = ir.IntType(8).as_pointer()
    name = "llvm.prefetch.p0"
    declared = builder.module.globals.get(name)
    if declared is None:
        kinds = [pointer_type, INT, INT, INT]
        declared = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), kinds), name)
    for_reading, locality, of_data = (ir.Constant(INT, number) for number in (0, 3, 1))
    pointer = builder.bitcast(array.at(index), pointer_type)
    builder.call(declared, [pointer, for_reading, locality, of_data])


@intrinsic
def prefetch(typing_context, array, first, count):
    """Ask for `count` numbers from `first` on to be brought near."""
    signature = types.void(array, types.int64, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        kind = signature.args[0]
        data = Array(context, builder, kind, values[0])
        per_line = index_of(_LINE_BYTES * 8 // kind.dtype.bitwidth)
        lines = builder.udiv(builder.add(values[2], builder.sub(per_line, index_of(1))), per_line)
        with for_range(builder, lines) as loop:
            prefetch_line(builder, data, builder.add(values[1], builder.mul(loop.index, per_line)))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def as_float32(typing_context, number):
    """Widen a number as it is stored."""
    signature = types.float32(number)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        if signature.args[0] == types.float32:
            return values[0]
        bits = builder.shl(builder.zext(values[0], INT), ir.Constant(INT, 16))
        return builder.bitcast(bits, FLOAT)

    return signature, codegen


@intrinsic
def as_stored(typing_context, number, array):
    """Round a float32 to what the array stores, bfloat16 to the nearest, ties to even."""
    signature = array.dtype(types.float32, array)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        if signature.return_type == types.float32:
            return values[0]
        bits = builder.bitcast(values[0], INT)
        shift = ir.Constant(INT, 16)
        odd = builder.and_(builder.lshr(bits, shift), ir.Constant(INT, 1))
        rounded = builder.add(builder.add(bits, ir.Constant(INT, 0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", values[0], values[0])
        chosen = builder.select(is_nan, ir.Constant(INT, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, shift), ir.IntType(16))

    return signature, codegen


@intrinsic
def take_next(typing_context, counters, index):
    """Add 1 to a number of an int64 array as no other thread can; return it from before."""
    signature = types.int64(counters, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        array = Array(context, builder, signature.args[0], values[0])
        return builder.atomic_rmw("add", array.at(values[1]), index_of(1), "monotonic")

    return signature, codegen


@intrinsic
def as_pointer(typing_context, address):
    """Make a pointer of an address."""
    signature = types.voidptr(types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return signature, codegen


@intrinsic
def call(typing_context, function, argument):
    """Call the C function at one address with another as its only argument."""
    signature = types.void(types.int64, types.int64)

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        pointer = ir.IntType(8).as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer]).as_pointer()
        function = builder.inttoptr(values[0], function_type)
        builder.call(function, [builder.inttoptr(values[1], pointer)])
        return context.get_dummy_value()

    return signature, codegen
