"""Norms and rotary positions of bfloat16 rows in one pass, compiled by numba. Know no models.

bfloat16 is read as uint16 and widened by a shift; sums and products are float32; what is stored
is rounded once, to the nearest, ties to even. One thread: so little work is done before another
one is awake. Shapes: R rows, W width of a row, T tokens, H heads, D width of a head.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

_U16, _U32 = np.uint16, np.uint32
_F32 = np.float32
# sums may be in any order, so that they are made of vectors; NaN stays NaN
_kernel = njit(fastmath={"reassoc", "contract"}, nogil=True, cache=True)


def rms_norm(x: torch.Tensor, weight_W: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Divide each row of a bfloat16 tensor by its root mean square, times a float32 weight."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _norm(_bits(x.view(-1, width)), weight_W.numpy(), _F32(epsilon), _bits(out.view(-1, width)))
    return out


def rotate(x_HTD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Return `x * cos + (-second half of x, first half of x) * sin`, heads innermost in memory.

    Everything is bfloat16.
    """
    heads, tokens, width = x_HTD.shape
    out_THD = x_HTD.new_empty(tokens, heads, width)
    _rotate(_bits(x_HTD.transpose(0, 1)), _bits(cos_TD), _bits(sin_TD), _bits(out_THD))
    return out_THD.transpose(0, 1)


def _bits(x: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = x.view(torch.uint16).numpy()
    return bits


@_kernel
def _norm(x_RW, weight_W, epsilon, out_RW):  # type: ignore[no-untyped-def]
    rows, width = x_RW.shape
    wide_W = np.empty(width, _F32)
    bits_W = wide_W.view(_U32)
    for row in range(rows):
        for i in range(width):
            bits_W[i] = _U32(x_RW[row, i]) << _U32(16)
        total = _F32(0)
        for i in range(width):
            total += wide_W[i] * wide_W[i]
        factor = _F32(1) / np.sqrt(total / _F32(width) + epsilon)
        for i in range(width):
            wide_W[i] = wide_W[i] * factor * weight_W[i]
        for i in range(width):
            # a NaN of bfloat16 has room for the carry
            bits = bits_W[i]
            out_RW[row, i] = _U16(
                (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
            )


@_kernel
def _rotate(x_THD, cos_TD, sin_TD, out_THD):  # type: ignore[no-untyped-def]
    tokens, heads, width = x_THD.shape
    half = width // 2
    wide_W = np.empty(width, _F32)
    cos_W = np.empty(width, _F32)
    sin_W = np.empty(width, _F32)
    out_W = np.empty(width, _F32)
    bits_W, out_bits_W = wide_W.view(_U32), out_W.view(_U32)
    cos_bits_W, sin_bits_W = cos_W.view(_U32), sin_W.view(_U32)
    for token in range(tokens):
        for i in range(width):
            cos_bits_W[i] = _U32(cos_TD[token, i]) << _U32(16)
            sin_bits_W[i] = _U32(sin_TD[token, i]) << _U32(16)
        for head in range(heads):
            for i in range(width):
                bits_W[i] = _U32(x_THD[token, head, i]) << _U32(16)
            for i in range(half):
                out_W[i] = wide_W[i] * cos_W[i] - wide_W[i + half] * sin_W[i]
                out_W[i + half] = wide_W[i + half] * cos_W[i + half] + wide_W[i] * sin_W[i + half]
            for i in range(width):
                bits = out_bits_W[i]
                bits += _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))
                out_THD[token, head, i] = _U16(bits >> _U32(16))
