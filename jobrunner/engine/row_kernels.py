"""Norms and rotary positions of bfloat16 rows in one pass, compiled by numba. Know no models.

bfloat16 is read as uint16 and widened by a shift; sums and products are float32; what is stored
is rounded once, to the nearest, ties to even. One thread: so little work is done before another
one is awake. A kernel is given the address of its job, as it takes longer to hand over arrays
than to norm a row.
Shapes: R rows, W width of a row, T tokens, H heads, K kv heads, D width of a
head, X heads of both kinds.
"""

from __future__ import annotations

import struct
from array import array
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, cfunc, njit, types

from jobrunner.engine.attention import tiles
from jobrunner.engine.attention.tiles import as_pointer
from jobrunner.engine.compiling import kept_compiled

_U16, _U32 = np.uint16, np.uint32
_F32 = np.float32

# sums may be in any order, so that they are made of vectors; NaN stays NaN
_inner = njit(
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    error_model="numpy",
    fastmath={"reassoc", "contract"},
)


class _Kernels(NamedTuple):
    """The compiled functions. Their code lives as long as they do."""

    norm: Any
    rotate: Any


@cache
def _kernels() -> _Kernels:
    """Compile, or find what was compiled before."""
    with kept_compiled("rows", Path(__file__), Path(tiles.__file__)):
        return _compile()


def rms_norm(x: torch.Tensor, weight_W: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide each row of a bfloat16 tensor by its root mean square, times a float32 weight."""
    shape, strides = x.shape, x.stride()
    if len(shape) == 4 and shape[0] == 1 and strides[3] == 1:
        # heads of each token, maybe beside what else was multiplied with them
        _, inner, width = shape[1:]
        steps = strides[1:3]
    else:
        x = x.contiguous()
        inner, width = 1, shape[-1]
        steps = (width, 0)
    out = torch.empty(shape, dtype=torch.bfloat16)
    _norm(x, inner, steps, None, None, out, weight_W, epsilon)
    return out


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight_W: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x + y`, rounded, and its norm; both are bfloat16 and of one shape."""
    x, y = x.contiguous(), y.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _norm(x, 1, (x.shape[-1], 0), y, total, out, weight_W, epsilon)
    return total, out


def rotate(
    q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x * cos + (-second half of x, first half of x) * sin` of queries and of keys.

    Everything is bfloat16. In memory the results lie side by side, those of a token together.
    """
    _, q_head_stride, q_token_stride, q_stride = q_1HTD.stride()
    _, k_head_stride, k_token_stride, k_stride = k_1KTD.stride()
    _, cos_token_stride, cos_stride = cos_1TD.stride()
    _, sin_token_stride, sin_stride = sin_1TD.stride()
    if not q_stride == k_stride == cos_stride == sin_stride == 1:
        q_1HTD, k_1KTD, cos_1TD, sin_1TD = (
            x.clone(memory_format=torch.contiguous_format)
            for x in (q_1HTD, k_1KTD, cos_1TD, sin_1TD)
        )
        return rotate(q_1HTD, k_1KTD, cos_1TD, sin_1TD)
    _, heads, tokens, width = q_1HTD.shape
    kv_heads = k_1KTD.shape[1]
    out_1TXD = torch.empty((1, tokens, heads + kv_heads, width), dtype=torch.bfloat16)
    # fmt: off
    job = array("q", (
        tokens, heads, kv_heads, width,
        q_1HTD.data_ptr(), q_head_stride, q_token_stride,
        k_1KTD.data_ptr(), k_head_stride, k_token_stride,
        cos_1TD.data_ptr(), cos_token_stride, sin_1TD.data_ptr(), sin_token_stride,
        out_1TXD.data_ptr(),
    ))
    # fmt: on
    _kernels().rotate.ctypes(job.buffer_info()[0])
    q_out, k_out = out_1TXD.transpose(1, 2).split_with_sizes((heads, kv_heads), 1)
    return q_out, k_out


def _norm(
    x: torch.Tensor,
    inner: int,
    steps: tuple[int, int],
    other: torch.Tensor | None,
    total: torch.Tensor | None,
    out: torch.Tensor,
    weight_W: torch.Tensor,
    epsilon: float,
) -> None:
    """Norm the rows of a tensor, `inner` to each of its outer ones, plus those of `other`."""
    width = x.shape[-1]
    # fmt: off
    job = array("q", (
        x.numel() // width, inner, width,
        x.data_ptr(), *steps,
        0 if other is None else other.data_ptr(), 0 if total is None else total.data_ptr(),
        weight_W.data_ptr(), _bits_of(epsilon), out.data_ptr(),
    ))
    # fmt: on
    _kernels().norm.ctypes(job.buffer_info()[0])


@cache
def _bits_of(number: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits


def _compile() -> _Kernels:
    entry = cfunc(types.void(types.voidptr), cache=True, error_model="numpy")

    @entry
    def norm(pointer):  # type: ignore[no-untyped-def]
        job = carray(pointer, 11, np.int64)
        rows, inner, width = job[0], job[1], job[2]
        x = carray(as_pointer(job[3]), rows // inner * job[4] + inner * job[5], _U16)
        other_RW = carray(as_pointer(job[6]), (rows * (job[6] != 0), width), _U16)
        total_RW = carray(as_pointer(job[7]), other_RW.shape, _U16)
        weight_W = carray(as_pointer(job[8]), width, _F32)
        out_RW = carray(as_pointer(job[10]), (rows, width), _U16)
        _norm_rows(x, (inner, job[4], job[5]), other_RW, total_RW, weight_W, _U32(job[9]), out_RW)

    @entry
    def rotate(pointer):  # type: ignore[no-untyped-def]
        job = carray(pointer, 15, np.int64)
        tokens, heads, kv_heads, width = job[0], job[1], job[2], job[3]
        q = carray(as_pointer(job[4]), heads * job[5] + tokens * job[6], _U16)
        k = carray(as_pointer(job[7]), kv_heads * job[8] + tokens * job[9], _U16)
        # of rows that lie apart the first numbers are meant
        cos = carray(as_pointer(job[10]), (tokens, job[11]), _U16)
        sin = carray(as_pointer(job[12]), (tokens, job[13]), _U16)
        out_THD = carray(as_pointer(job[14]), (tokens, heads + kv_heads, width), _U16)
        _rotate_rows(q, (job[5], job[6]), k, (job[8], job[9]), heads, cos, sin, out_THD)

    return _Kernels(norm, rotate)


@_inner
def _wide(bits):  # type: ignore[no-untyped-def]
    return _U32(bits) << _U32(16)


@_inner
def _rounded(bits):  # type: ignore[no-untyped-def]
    # a NaN of bfloat16 has room for the carry
    return _U16((bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16))


@_inner
def _norm_rows(x, steps, other_RW, total_RW, weight_W, epsilon_bits, out_RW):  # type: ignore[no-untyped-def]
    rows, width = out_RW.shape
    inner, outer_stride, inner_stride = steps
    wide_W, other_W = np.empty(width, _F32), np.empty(width, _F32)
    bits_W, other_bits_W = wide_W.view(_U32), other_W.view(_U32)
    bits_W[0] = epsilon_bits
    epsilon = wide_W[0]
    for row in range(rows):
        at = row // inner * outer_stride + row % inner * inner_stride
        x_W = x[at : at + width]
        for i in range(width):
            bits_W[i] = _wide(x_W[i])
        if len(other_RW):
            for i in range(width):
                other_bits_W[i] = _wide(other_RW[row, i])
            for i in range(width):
                wide_W[i] += other_W[i]
            # what is normed is what goes on: the rounded sum
            for i in range(width):
                total_RW[row, i] = _rounded(bits_W[i])
            for i in range(width):
                bits_W[i] = _wide(total_RW[row, i])
        squares = _F32(0)
        for i in range(width):
            squares += wide_W[i] * wide_W[i]
        factor = _F32(1) / np.sqrt(squares / _F32(width) + epsilon)
        for i in range(width):
            wide_W[i] = wide_W[i] * factor * weight_W[i]
        for i in range(width):
            out_RW[row, i] = _rounded(bits_W[i])


@_inner
def _rotate_rows(q, q_strides, k, k_strides, heads, cos, sin, out_THD):  # type: ignore[no-untyped-def]
    tokens, together, width = out_THD.shape
    half = width // 2
    cos_D, sin_D = np.empty(width, _F32), np.empty(width, _F32)
    wide_D, out_D = np.empty(width, _F32), np.empty(width, _F32)
    cos_bits_D, sin_bits_D = cos_D.view(_U32), sin_D.view(_U32)
    bits_D, out_bits_D = wide_D.view(_U32), out_D.view(_U32)
    for token in range(tokens):
        for i in range(width):
            cos_bits_D[i] = _wide(cos[token, i])
            sin_bits_D[i] = _wide(sin[token, i])
        for head in range(together):
            if head < heads:
                at = head * q_strides[0] + token * q_strides[1]
                x_D = q[at : at + width]
            else:
                at = (head - heads) * k_strides[0] + token * k_strides[1]
                x_D = k[at : at + width]
            for i in range(width):
                bits_D[i] = _wide(x_D[i])
            for i in range(half):
                out_D[i] = wide_D[i] * cos_D[i] - wide_D[i + half] * sin_D[i]
                out_D[i + half] = wide_D[i + half] * cos_D[i + half] + wide_D[i] * sin_D[i + half]
            for i in range(width):
                out_THD[token, head, i] = _rounded(out_bits_D[i])
