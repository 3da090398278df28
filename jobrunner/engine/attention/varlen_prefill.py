"""Attention of pieces of prompts by torch's kernel for ragged batches. Knows nothing of decodes.

Shapes: T tokens of all pieces, H query heads, K kv heads, D width of a head, S tokens of all
contexts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from jobrunner.engine.attention.hook import AttentionOptions, Piece
from jobrunner.engine.attention.triton_tiles import MOST_WIDTH
from jobrunner.engine.devices import to_device
from jobrunner.engine.inputs import Put
from jobrunner.engine.kv import KvPool

Varlen = Callable[..., torch.Tensor]

_DTYPES = frozenset({torch.float16, torch.bfloat16})
_OLDEST_MAJOR = 8
# what torch's function must be given, and may be
_POSITIONAL = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
_NAMED = frozenset({"scale", "window_size"})


@dataclass(frozen=True)
class _Ragged:
    """The pieces of one pass. `sources` are blocks and positions of all contexts, if cached."""

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    longest_q: int
    longest_k: int
    sources: tuple[torch.Tensor, torch.Tensor] | None


class VarlenPrefill:
    """Attends over the keys of the pass, or over those of the pool where a piece continues one.

    Another function than torch's is taken to serve every number format on every device.
    """

    def __init__(self, pool: KvPool, device: torch.device, varlen: Varlen | None = None) -> None:
        self._pool = pool
        self._put: Put = partial(to_device, device=device)
        self._varlen, self._refusal = varlen, None
        if varlen is None:
            self._varlen, unknown = torch_varlen()
            self._refusal = unknown or _refusal(pool.dtype, device)
        self._ragged: _Ragged | None = None

    def take_inputs(self, put: Put) -> None:
        """Bring numbers to the device by `put`."""
        self._put = put

    def begin(self, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over these pieces, packed in this order."""
        new = [piece.stop - piece.start for piece in pieces]
        held = [piece.stop for piece in pieces]
        self._ragged = _Ragged(
            starts_q=self._put(np.cumsum([0, *new], dtype=np.int32)),
            starts_k=self._put(np.cumsum([0, *held], dtype=np.int32)),
            longest_q=max(new),
            longest_k=max(held),
            sources=self._sources(pieces) if any(piece.start for piece in pieces) else None,
        )

    def attend(
        self,
        call: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return what each token attends to once its K and V are stored, `[T, H, D]`."""
        ragged = self._ragged
        assert ragged is not None, "a pass was not begun"
        assert self._varlen is not None, "a call that is unserved"
        k_SKD, v_SKD = k_KTD.transpose(0, 1), v_KTD.transpose(0, 1)
        if ragged.sources is not None:
            block_S, position_S = ragged.sources
            k_SKD = self._pool.keys[call].permute(1, 2, 0, 3)[block_S, position_S]
            v_SKD = self._pool.values[call].permute(1, 2, 0, 3)[block_S, position_S]
        window = self._pool.calls[call].reach.window
        # the kernel counts the tokens before the own one; its last query meets the last key
        behind = -1 if window is None else window - 1
        return self._varlen(
            q_HTD.transpose(0, 1),
            k_SKD,
            v_SKD,
            ragged.starts_q,
            ragged.starts_k,
            ragged.longest_q,
            ragged.longest_k,
            scale=options.scale,
            window_size=(behind, 0),
        )

    def unserved(self, call: int, options: AttentionOptions) -> str | None:
        """Return why torch's kernel cannot serve this call of the pass, None where it can."""
        assert self._ragged is not None, "a pass was not begun"
        stores = self._pool.calls[call]
        if options.softcap is not None:
            return "the model caps its scores"
        if options.sinks is not None:
            return "the model has attention sinks"
        if stores.key_width != stores.value_width:
            return "keys and values differ in width"
        if stores.key_width > MOST_WIDTH or stores.key_width % 8:
            return f"a head is {stores.key_width} wide"
        if stores.reach.chunk is not None and self._ragged.longest_k > stores.reach.chunk:
            return "a prompt is longer than the chunks in which the model attends"
        return self._refusal

    def _sources(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._pool.block_size
        positions = [np.arange(piece.stop) for piece in pieces]
        blocks = [
            np.asarray(piece.blocks, np.int64)[position // size]
            for piece, position in zip(pieces, positions, strict=True)
        ]
        return (
            self._put(np.concatenate(blocks)),
            self._put(np.concatenate(positions) % size),
        )


def torch_varlen() -> tuple[Varlen | None, str | None]:
    """Return torch's function in the form that is called here, or why there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return None, f"torch {torch.__version__} has no varlen_attn: {error}"
    return adapted(varlen_attn)


def adapted(varlen_attn: Varlen) -> tuple[Varlen | None, str | None]:
    """Adapt torch's function, or say why it is not one of those known: 2.11 to 2.14.

    From 2.12 on it wants to be told of heads that share keys; 2.11 sees that by itself. Its block
    table and lengths on the device, also of 2.12, stay unused: keys are gathered.
    """
    parameters = inspect.signature(varlen_attn).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty]
    if required != _POSITIONAL or not parameters.keys() >= _NAMED:
        signature = f"varlen_attn({', '.join(parameters)})"
        return None, f"torch {torch.__version__} has an unknown {signature}"
    shares = "enable_gqa" in parameters

    def varlen(
        q_THD: torch.Tensor, k_SKD: torch.Tensor, *rest: object, **more: object
    ) -> torch.Tensor:
        if shares:
            more["enable_gqa"] = q_THD.shape[1] != k_SKD.shape[1]
        return varlen_attn(q_THD, k_SKD, *rest, **more)

    return varlen, None


def _refusal(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why torch's kernel serves nothing here, None where it does."""
    if dtype not in _DTYPES:
        return f"the model computes in {str(dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return f"the device is `{device.type}`"
    major, minor = torch.cuda.get_device_capability(device)
    if major < _OLDEST_MAJOR:
        return f"the GPU is of compute capability {major}.{minor}"
    return None
