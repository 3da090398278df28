"""Run every kernel that could serve here against a plain reference. Knows no model and no rows.

`KERNELS` is the table: a new one is shown by `cbjob doctor` once it stands there.

Shapes: T tokens of a packed row, H query heads, K kv heads, D width of a head, N rows,
I and O widths of a projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from jobrunner.engine.attention.hook import (
    Attention,
    AttentionOptions,
    Piece,
    Singles,
    UnservedError,
)
from jobrunner.engine.attention.plain import plain_attention
from jobrunner.engine.block_pool import BlockPool
from jobrunner.engine.devices import DTYPES, cpu_has_bfloat16
from jobrunner.engine.kv import AttentionCall, KvPool

# of a row's size; what rounding explains, not what a wrong index does
LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}

_HEADS, _KV_HEADS, _WIDTH = 6, 2, 64
_BLOCK_SIZE = 16
# each sequence is computed up to these tokens, one pass after the other: prompts at once and in
# pieces, across the border of a block, then decodes of unequal length beside a piece
_PASSES = ((0, 17, 40), (33, 18, 70), (34, 19, 71), (80, 20, 72))
_ROWS, _IN, _OUT = 37, 192, 320
_SEED = 20240229

# a kernel that cannot be imported, compiled or called says so by one of these
_UNUSABLE = (UnservedError, ImportError, RuntimeError, NotImplementedError, TypeError, ValueError)

Error = Callable[[torch.device, torch.dtype], float]
MakeAttention = Callable[[KvPool, torch.device], Attention]
Project = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to compute a part of a step: `error` is how far it is from that part's reference.

    It raises one of several errors, with the reason as its text, where it cannot run.
    """

    part: str
    name: str
    error: Error


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a kernel here: its relative error, or why it is not usable."""

    part: str
    name: str
    dtype: str
    limit: float
    error: float | None = None
    reason: str | None = None

    @property
    def usable(self) -> bool:
        return self.error is not None

    @property
    def wrong(self) -> bool:
        # NaN is not within any limit
        return self.error is not None and not self.error <= self.limit


def check_kernels(
    device: str, dtypes: Iterable[str], kernels: Sequence[Kernel] | None = None
) -> list[Verdict]:
    """Run each kernel in each number format on `device`; the table's where none are given."""
    chosen = KERNELS if kernels is None else kernels
    where = torch.device(device)
    dtypes = list(dtypes)
    return [_check(kernel, where, dtype) for kernel in chosen for dtype in dtypes]


def _check(kernel: Kernel, device: torch.device, dtype: str) -> Verdict:
    limit = LIMITS[dtype]
    try:
        with torch.inference_mode():
            error = kernel.error(device, DTYPES[dtype])
    except _UNUSABLE as failure:
        reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
        return Verdict(kernel.part, kernel.name, dtype, limit, reason=reason)
    return Verdict(kernel.part, kernel.name, dtype, limit, error=error)


class _Tokens(NamedTuple):
    """What a whole sequence asks and stores, `[H, T, D]` and `[K, T, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attention_error(make: MakeAttention, make_pool: Callable[..., KvPool] = KvPool) -> Error:
    """Compare an attention backend with plain attention, on ragged prompts and decodes."""

    def error(device: torch.device, dtype: torch.dtype) -> float:
        stops = list(zip(*_PASSES, strict=True))
        width = -(-max(map(max, stops)) // _BLOCK_SIZE)
        call = AttentionCall(_KV_HEADS, _WIDTH, _WIDTH)
        pool = make_pool([call], width * len(stops), _BLOCK_SIZE, dtype, device)
        attention = make(pool, device)
        numbers = _numbers(device, dtype)
        sequences = [
            _Tokens(*(numbers(h, stop[-1], _WIDTH) for h in (_HEADS, _KV_HEADS, _KV_HEADS)))
            for stop in stops
        ]
        options = AttentionOptions(scale=_WIDTH**-0.5)
        actual = _in_passes(attention, sequences, width, options)
        expected = [plain_attention(*t, scale=options.scale) for t in sequences]
        return _relative(torch.cat(actual), torch.cat(expected))

    return error


def _in_passes(
    attention: Attention,
    sequences: Sequence[_Tokens],
    width: int,
    options: AttentionOptions,
) -> list[torch.Tensor]:
    """What each token of each sequence attends to, computed side by side as an engine does."""
    count = len(sequences)
    # neighbours in a sequence are not neighbours in memory
    table = np.arange(width * count, dtype=np.int32).reshape(width, count).T.copy()
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * count
    for stops in _PASSES:
        turns = [(s, done[s], stop) for s, stop in enumerate(stops) if stop > done[s]]
        # single tokens come first, the shortest context in front
        turns.sort(key=lambda turn: (turn[2] - turn[1] > 1, turn[2]))
        single = [turn for turn in turns if turn[2] - turn[1] == 1]
        attention.begin(
            Singles(
                table,
                np.array([s for s, _, _ in single], np.int64),
                np.array([stop for _, _, stop in single], np.int64),
            ),
            [Piece(start, stop, table[s].tolist()) for s, start, stop in turns[len(single) :]],
        )
        q_HTD, k_KTD, v_KTD = (
            torch.cat([sequences[s][which][:, start:stop] for s, start, stop in turns], dim=1)
            for which in range(3)
        )
        out_THD = attention.attend(q_HTD, k_KTD, v_KTD, options)
        lengths = [stop - start for _, start, stop in turns]
        for (s, _, stop), part_THD in zip(turns, out_THD.split(lengths), strict=True):
            parts[s].append(part_THD)
            done[s] = stop
    return [torch.cat(part) for part in parts]


def projection_error(project: Project) -> Error:
    """Compare a projection, `[N, I]` with weights `[O, I]` to `[N, O]`, with one in float64."""

    def error(device: torch.device, dtype: torch.dtype) -> float:
        numbers = _numbers(device, dtype)
        x_NI, weight_OI = numbers(_ROWS, _IN), numbers(_OUT, _IN)
        return _relative(project(x_NI, weight_OI), x_NI.double() @ weight_OI.double().T)

    return error


def _numbers(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A source of normal numbers, the same on every device and each time."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return draw


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of the worst row, relative to its size: one lost token must not hide."""
    off_N = (actual.double() - expected).flatten(1).norm(dim=1)
    return float((off_N / expected.flatten(1).norm(dim=1)).max())


def _torch_paged(pool: KvPool, device: torch.device) -> Attention:
    from jobrunner.engine.attention.torch_paged import TorchPagedAttention

    return TorchPagedAttention(pool, device)


def _numba(pool: KvPool, device: torch.device) -> Attention:
    if device.type != "cpu":
        raise UnservedError(f"these kernels are for a CPU, not for {device.type}")

    from jobrunner.engine.attention.numba_paged import NumbaPagedAttention

    return NumbaPagedAttention(pool, device)


def _triton(pool: KvPool, device: torch.device) -> Attention:
    from jobrunner.engine.attention.choice import triton_backend, why_no_triton

    if device.type == "cpu" and pool.dtype == torch.bfloat16:
        raise UnservedError("Triton's interpreter multiplies bfloat16 wrongly")
    reason = why_no_triton(device, pool.calls)
    if reason is not None:
        raise UnservedError(reason)
    return triton_backend().make_attention(pool, device)


def _packed(x_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    from jobrunner.engine.linears import PackedLinear

    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.bfloat16:
        raise UnservedError("weights are packed for a CPU, in bfloat16")
    if not cpu_has_bfloat16():
        raise UnservedError("the processor has no bfloat16")
    linear = torch.nn.Linear(*weight_OI.shape[::-1], bias=False, dtype=weight_OI.dtype)
    linear.weight.copy_(weight_OI)
    out_NO: torch.Tensor = PackedLinear(linear)(x_NI)
    return out_NO


# each backend is imported when it is made: what it needs may not be here
KERNELS = (
    Kernel("attention", "torch", attention_error(_torch_paged)),
    Kernel("attention", "numba", attention_error(_numba)),
    Kernel("attention", "triton", attention_error(_triton, BlockPool)),
    Kernel("projection", "torch", projection_error(torch.nn.functional.linear)),
    Kernel("projection", "packed", projection_error(_packed)),
)
