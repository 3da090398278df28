"""Products of bfloat16 rows and a weight by numba, two products at a time. Know no models.

The weight lies in panels of 32 outputs, each as the processor reads it: for every pair of inputs
32 pairs side by side. A thread takes panels one by one, keeps one in the nearest cache, and asks
for the next while it multiplies rows with it, 12 at a time. Sums are float32 and rounded once, with
what is done to them after.

Shapes: T rows, I inputs, O outputs, N panels of 32 of them.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, from_dtype, types
from numba.core.cgutils import alloca_once, for_range
from numba.extending import intrinsic
from torch.nn.functional import gelu

from jobrunner.engine.attention import kernels, pair_tiles, tiles
from jobrunner.engine.attention.kernels import inner, threads_of
from jobrunner.engine.attention.pair_tiles import (
    load_pair_everywhere,
    load_pairs,
    multiplies_pairs,
    multiply_add_pairs,
    power,
    store_rounded,
)
from jobrunner.engine.attention.threads import RunOnThreads
from jobrunner.engine.attention.tiles import (
    FLOATS,
    LANES,
    Array,
    Builder,
    Value,
    as_pointer,
    index_of,
    prefetch_line,
    splat_constant,
    take_next,
)
from jobrunner.engine.compiling import kept_compiled

_VECTORS = 2
PANEL = _VECTORS * LANES
# rows that are multiplied together, and those that are before the next panel is taken
_ROWS = 12
_ROWS_AT_A_TIME = 21 * _ROWS

# what is done to sums: nothing, times or plus another tensor, SiLU, or SiLU of the first half of a
# panel times the second
_PLAIN, _TIMES, _PLUS, _SWISH, _GATED = range(5)

_JOB = np.dtype(
    [
        (name, np.int64)
        for name in (
            "x_TI x_stride rows inputs panels_NI32 outputs bias_O other_TO other_stride then out_TO"
            " out_stride taken threads"
        ).split()
    ]
)
_JOB_TYPE = from_dtype(_JOB)


class _Kernels(NamedTuple):
    multiply: Any
    run_on_threads: RunOnThreads


def serves(weight_OI: torch.Tensor) -> bool:
    """Whether such a weight can lie in panels, on a processor that has the products."""
    outputs, inputs = weight_OI.shape
    whole = outputs % PANEL == 0 and inputs % 2 == 0 and inputs > 0
    return weight_OI.dtype == torch.bfloat16 and whole and multiplies_pairs()


class PairProduct:
    """What rows are multiplied with: a weight, `[O, I]`, and a bias, `[O]`, that is added."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._kernels = compiled()
        outputs, inputs = weight_OI.shape
        pairs = weight_OI.contiguous().view(torch.int32)
        self._panels = pairs.view(outputs // PANEL, PANEL, inputs // 2).transpose(1, 2).contiguous()
        self._bias_O = torch.zeros(outputs) if bias_O is None else bias_O.detach().float()
        self._taken = np.zeros(1, np.int64)
        self._job = np.zeros(1, _JOB)
        self._address = self._job.ctypes.data
        self._job["panels_NI32"], self._job["bias_O"] = (
            self._panels.data_ptr(),
            self._bias_O.data_ptr(),
        )
        self._job["inputs"], self._job["outputs"] = inputs, outputs
        self._job["taken"] = self._taken.ctypes.data
        self._inputs, self._outputs = inputs, outputs

    def weight(self) -> torch.Tensor:
        """The weight in its usual order, made anew each time."""
        pairs = self._panels.transpose(1, 2).reshape(self._outputs, self._inputs // 2)
        return pairs.contiguous().view(torch.bfloat16)

    def activate(self, x: torch.Tensor, kind: str, algorithm: str) -> torch.Tensor:
        """Return activated outputs: "none", "swish", or "gelu" by an algorithm."""
        if kind == "swish":
            return self._multiply(x, _SWISH)
        out = self._multiply(x, _PLAIN)
        return gelu(out, approximate=algorithm) if kind == "gelu" else out

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Return SiLU of 16 outputs times the next 16, and so on: half as many."""
        return self._multiply(x, _GATED)

    def times(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return outputs times `other`."""
        return self._multiply(x, _TIMES, other)

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return outputs plus `other`."""
        return self._multiply(x, _PLUS, other)

    def _multiply(
        self, x: torch.Tensor, then: int, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        x_TI = _rows(x)
        width = self._outputs // 2 if then == _GATED else self._outputs
        out = x.new_empty(*x.shape[:-1], width)
        if out.numel() == 0:
            return out
        job = self._job[0]
        job["x_TI"], job["x_stride"], job["rows"] = x_TI.data_ptr(), x_TI.stride(0), len(x_TI)
        job["out_TO"], job["out_stride"], job["then"] = out.data_ptr(), width, then
        if other is not None:
            other_TO = _rows(other)
            job["other_TO"], job["other_stride"] = other_TO.data_ptr(), other_TO.stride(0)
        threads = torch.get_num_threads()
        job["threads"] = threads
        self._taken[0] = 0
        self._kernels.run_on_threads(self._kernels.multiply.address, self._address, threads)
        return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The same as `[T, ...]`, each row in one piece that begins at a pair."""
    if x.dtype != torch.bfloat16:
        raise TypeError(f"rows of bfloat16 are multiplied, not of {x.dtype}")
    rows = x.reshape(-1, x.shape[-1])
    in_pairs = rows.stride(0) % 2 == 0 and rows.data_ptr() % 4 == 0
    return rows if rows.stride(1) == 1 and in_pairs else rows.contiguous()


@cache
def compiled() -> _Kernels:
    """Compile, or find what was compiled before."""
    sources = [Path(str(module.__file__)) for module in (kernels, tiles, pair_tiles)]
    with kept_compiled("pair-products", Path(__file__), *sources):
        return _compile()


def _compile() -> _Kernels:
    @cfunc(types.void(types.CPointer(_JOB_TYPE)), cache=True, error_model="numpy")
    def multiply(pointer):
        job = carray(pointer, 1)[0]
        half, outputs = job.inputs // 2, job.outputs
        taken = carray(as_pointer(job.taken), 1, np.int64)
        x_stride = job.x_stride // 2
        x = carray(as_pointer(job.x_TI), job.rows * x_stride, np.int32)
        panels = carray(as_pointer(job.panels_NI32), outputs * half, np.int32)
        bias = carray(as_pointer(job.bias_O), outputs, np.float32)
        other = carray(as_pointer(job.other_TO), job.rows * job.other_stride, np.uint16)
        out = carray(as_pointer(job.out_TO), job.rows * job.out_stride, np.uint16)
        out_step = PANEL * job.out_stride // outputs
        sums = np.empty(_ROWS * PANEL, np.float32)
        count, size = outputs // PANEL, half * PANEL
        pieces = (job.rows + _ROWS_AT_A_TIME - 1) // _ROWS_AT_A_TIME * count
        while True:
            piece = take_next(taken, 0)
            if piece >= pieces:
                break
            some, panel = divmod(piece, count)
            ahead = min(panel + job.threads, count - 1) * size
            row = some * _ROWS_AT_A_TIME
            stop = min(job.rows, row + _ROWS_AT_A_TIME)
            while row < stop:
                a, b = row * x_stride, panel * size
                left = stop - row
                if left >= _ROWS:
                    together = _ROWS
                    multiply_rows(x, a, x_stride, panels, b, ahead, half, sums, _ROWS)
                elif left >= 4:
                    together = 4
                    multiply_rows(x, a, x_stride, panels, b, ahead, half, sums, 4)
                else:
                    together = 1
                    multiply_rows(x, a, x_stride, panels, b, ahead, half, sums, 1)
                for r in range(together):
                    o = panel * PANEL
                    at = (row + r) * job.out_stride + panel * out_step
                    beside = (row + r) * job.other_stride + o
                    _finish(sums, r * PANEL, bias, o, other, beside, out, at, job.then)
                row += together

    return _Kernels(multiply, threads_of())


@inner
def _finish(sums, first, bias, o, other, beside, out, at, then):
    if then == _TIMES:
        finish(sums, first, bias, o, other, beside, out, at, _TIMES)
    elif then == _PLUS:
        finish(sums, first, bias, o, other, beside, out, at, _PLUS)
    elif then == _SWISH:
        finish(sums, first, bias, o, other, beside, out, at, _SWISH)
    elif then == _GATED:
        finish(sums, first, bias, o, other, beside, out, at, _GATED)
    else:
        finish(sums, first, bias, o, other, beside, out, at, _PLAIN)


@intrinsic(prefer_literal=True)
def multiply_rows(typing_context, x, x_first, x_stride, panel, first, ahead, half, sums, rows):
    """SUMS[rows, 32] = X[rows, half] @ PANEL[half, 32], both in pairs.

    Meanwhile what is `ahead` in the panels is brought near. `rows` is a literal.
    """
    index = types.int64
    signature = types.void(x, index, index, panel, index, index, index, sums, rows)
    row_count = rows.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        x, panel, sums = (Array(context, builder, signature.args[i], values[i]) for i in (0, 3, 7))
        x_first, x_stride, first, ahead, half = (values[i] for i in (1, 2, 4, 5, 6))
        starts = [
            builder.add(x_first, builder.mul(x_stride, index_of(row))) for row in range(row_count)
        ]
        totals = [[alloca_once(builder, FLOATS) for _ in range(_VECTORS)] for _ in range(row_count)]
        for row in totals:
            for total in row:
                builder.store(splat_constant(FLOATS, 0.0), total)
        with for_range(builder, half) as loop:
            offset = builder.mul(loop.index, index_of(PANEL))
            columns = []
            for vector in range(_VECTORS):
                place = builder.add(offset, index_of(LANES * vector))
                prefetch_line(builder, panel, builder.add(ahead, place))
                columns.append(load_pairs(builder, panel, builder.add(first, place)))
            for start, row in zip(starts, totals, strict=True):
                pair = load_pair_everywhere(builder, x, builder.add(start, loop.index))
                for total, column in zip(row, columns, strict=True):
                    multiply_add_pairs(builder, total, pair, column)
        for number, row in enumerate(totals):
            for vector, total in enumerate(row):
                sums.store_row(builder.load(total), index_of(number * PANEL + LANES * vector))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic(prefer_literal=True)
def finish(typing_context, sums, first, bias, bias_at, other, other_at, out, at, then):
    """Add the bias to 32 sums, do what `then` says, a literal, and store them rounded."""
    index = types.int64
    signature = types.void(sums, index, bias, index, other, index, out, index, then)
    what = then.literal_value

    def codegen(context: Any, builder: Builder, signature: Any, values: Any) -> Value:
        sums, bias, other, out = (
            Array(context, builder, signature.args[i], values[i]) for i in (0, 2, 4, 6)
        )
        places = [
            [builder.add(values[i], index_of(LANES * vector)) for i in (1, 3, 5, 7)]
            for vector in range(_VECTORS)
        ]
        rows = [
            builder.fadd(sums.load_row(first), bias.load_row(bias_at))
            for first, bias_at, _, _ in places
        ]
        if what == _GATED:
            gate, up = rows
            store_rounded(builder, out, values[7], builder.fmul(_swish(builder, gate), up))
            return context.get_dummy_value()
        for row, (_, _, other_at, at) in zip(rows, places, strict=True):
            if what == _TIMES:
                row = builder.fmul(row, other.load_row(other_at))
            elif what == _PLUS:
                row = builder.fadd(row, other.load_row(other_at))
            elif what == _SWISH:
                row = _swish(builder, row)
            store_rounded(builder, out, at, row)
        return context.get_dummy_value()

    return signature, codegen


def _swish(builder: Builder, x: Value) -> Value:
    """x / (1 + e^-x), by e^-|x|, which does not overflow."""
    one = splat_constant(FLOATS, 1.0)
    is_negative = builder.fcmp_ordered("<", x, splat_constant(FLOATS, 0.0))
    small = power(builder, builder.select(is_negative, x, builder.fneg(x)))
    share = builder.select(is_negative, small, one)
    return builder.fdiv(builder.fmul(x, share), builder.fadd(one, small))
