"""Attention over paged KV with plain torch, on any device. Knows nothing of scheduling.

Shapes: T tokens of the packed row, H query heads, K kv heads, G query heads per kv head,
D width of a query or key head, W width of a value head, B sequences that decode, C tokens of
a chunk, S context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from jobrunner.engine.attention.hook import AttentionOptions, Piece, Singles
from jobrunner.engine.devices import to_device
from jobrunner.engine.inputs import Put
from jobrunner.engine.kv import EVERYTHING, KvPool, Reach, bytes_per_token

# decodes share a padded batch while the longest context is not much longer than the shortest
_PADDING_RATIO = 1.25
_PADDING_TOKENS = 32
# on a CPU, what is gathered for one batch should still be in the cache when it is used
_CACHE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class _Decodes:
    """Rows `first` up to `last` of the packed row: one token each, contexts of similar length."""

    first: int
    last: int
    shortest: int
    lengths: torch.Tensor
    blocks: torch.Tensor
    masks: dict[Reach, torch.Tensor] = field(default_factory=dict)

    def hidden(self, context: int, reach: Reach) -> torch.Tensor:
        """True where a token must not look, `[B, S]`; built once for all layers."""
        if reach not in self.masks:
            position_S = torch.arange(context, device=self.lengths.device)
            own_B1 = self.lengths.unsqueeze(1) - 1
            hidden_BS = position_S > own_B1
            if reach != EVERYTHING:
                hidden_BS |= position_S < reach.first_seen(own_B1)
            self.masks[reach] = hidden_BS
        return self.masks[reach]


@dataclass(frozen=True)
class _Chunk:
    """Rows `first` up to `last` of the packed row: tokens `start` up to `stop` of a sequence.

    `blocks` is None where the chunk begins the sequence and finds all it needs in the pass.
    """

    first: int
    last: int
    start: int
    stop: int
    blocks: torch.Tensor | None
    masks: dict[Reach, torch.Tensor] = field(default_factory=dict)

    def hidden(self, reach: Reach, device: torch.device) -> torch.Tensor:
        """True where a token must not look, `[C, S]`; built once for all layers."""
        if reach not in self.masks:
            position_S = torch.arange(self.stop, device=device)
            own_C1 = position_S[self.start :].unsqueeze(1)
            hidden_CS = position_S > own_C1
            if reach != EVERYTHING:
                hidden_CS |= position_S < reach.first_seen(own_C1)
            self.masks[reach] = hidden_CS
        return self.masks[reach]


class TorchPagedAttention:
    """Keeps K and V in the pool and attends over it; everything per step is built in `begin`."""

    def __init__(self, pool: KvPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._put: Put = partial(to_device, device=device)
        self._call = 0
        token_bytes = max(bytes_per_token([call], pool.dtype) for call in pool.calls)
        self._group_tokens = _CACHE_BYTES // token_bytes if device.type == "cpu" else None
        self._slots_T = torch.empty(0, dtype=torch.long)
        self._decodes: list[_Decodes] = []
        self._chunks: list[_Chunk] = []

    def take_inputs(self, put: Put) -> None:
        """Bring numbers to the device by `put`."""
        self._put = put

    def begin(self, singles: Singles, pieces: Sequence[Piece]) -> None:
        """Prepare for one forward pass over single tokens and then pieces, packed in this order.

        Of the single tokens those with the shortest context come first.
        """
        self._call = 0
        size = self._pool.block_size
        self._slots_T = self._put(slots_of(singles, pieces, size))
        self._decodes = [
            self._decode_group(singles, first, last)
            for first, last in decode_groups(singles.lengths.tolist(), self._group_tokens)
        ]
        self._chunks = []
        first = len(singles)
        for piece in pieces:
            self._chunks.append(self._chunk(piece, first))
            first += piece.stop - piece.start

    def attend(
        self,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store K and V, and return what each token attends to, `[T, H, W]`."""
        call = self._call
        self._call += 1
        self._pool.write(call, self._slots_T, k_KTD, v_KTW)
        return self.read(call, q_HTD, k_KTD, v_KTW, options)

    def read(
        self,
        call: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTW: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return what each token attends to once its K and V are stored, `[T, H, W]`."""
        heads, tokens, _ = q_HTD.shape
        out_THW = q_HTD.new_empty(tokens, heads, v_KTW.shape[-1])
        q_KGTD = q_HTD.unflatten(0, (k_KTD.shape[0], -1))
        for group in self._decodes:
            rows = slice(group.first, group.last)
            out_BKGW = out_THW[rows].unflatten(1, q_KGTD.shape[:2])
            out_BKGW.copy_(self._decode(call, group, q_KGTD[:, :, rows], options))
        for chunk in self._chunks:
            rows = slice(chunk.first, chunk.last)
            k_KSD, v_KSW = k_KTD[:, rows], v_KTW[:, rows]
            if chunk.blocks is not None:
                k_KSD, v_KSW = self._pool.gather(call, chunk.blocks)
                k_KSD, v_KSW = k_KSD[:, : chunk.stop], v_KSW[:, : chunk.stop]
            reach = self._pool.calls[call].reach
            out_HCW = self._prefill(chunk, q_HTD[:, rows], k_KSD, v_KSW, options, reach)
            out_THW[rows] = out_HCW.transpose(0, 1)
        return out_THW

    def _decode(
        self, call: int, group: _Decodes, q_KGBD: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """One token each: the query heads of a kv head are the rows of one small product."""
        kv_heads, queries, batch, _ = q_KGBD.shape
        k, v = self._pool.gather(call, group.blocks)
        k_NSD = k.unflatten(1, (batch, -1)).flatten(0, 1)
        v_NSW = v.unflatten(1, (batch, -1)).flatten(0, 1)
        q_NGD = q_KGBD.transpose(1, 2).flatten(0, 1)
        scores_KBGS = _scores(q_NGD, k_NSD, options).unflatten(0, (kv_heads, batch))
        context = k_NSD.shape[1]
        reach = self._pool.calls[call].reach
        # where all is seen, only the ends of the contexts differ
        seen = group.shortest if reach == EVERYTHING else 0
        if seen < context:
            hidden_BS = group.hidden(context, reach)
            scores_KBGS[..., seen:].masked_fill_(hidden_BS[:, None, seen:], float("-inf"))
        sinks = options.sinks
        sinks_K1G1 = None if sinks is None else sinks.view(kv_heads, 1, queries, 1)
        weights_KBGS = _weights(scores_KBGS, sinks_K1G1)
        out_NGW = torch.bmm(weights_KBGS.flatten(0, 1), v_NSW)
        return out_NGW.unflatten(0, (kv_heads, batch)).transpose(0, 1)

    def _prefill(
        self,
        chunk: _Chunk,
        q_HCD: torch.Tensor,
        k_KSD: torch.Tensor,
        v_KSW: torch.Tensor,
        options: AttentionOptions,
        reach: Reach,
    ) -> torch.Tensor:
        if options.softcap is not None or options.sinks is not None:
            return self._prefill_by_hand(chunk, q_HCD, k_KSD, v_KSW, options, reach)
        # `is_causal` lines up the first query with the first key, so it serves no later chunk
        causal = chunk.start == 0 and reach.first_seen(chunk.stop - 1) <= 0
        mask_CS = None if causal else ~chunk.hidden(reach, self._device)
        out_1HCW: torch.Tensor = scaled_dot_product_attention(
            q_HCD.unsqueeze(0),
            k_KSD.unsqueeze(0),
            v_KSW.unsqueeze(0),
            attn_mask=mask_CS,
            is_causal=causal,
            scale=options.scale,
            enable_gqa=q_HCD.shape[0] != k_KSD.shape[0],
        )
        return out_1HCW[0]

    def _prefill_by_hand(
        self,
        chunk: _Chunk,
        q_HCD: torch.Tensor,
        k_KSD: torch.Tensor,
        v_KSW: torch.Tensor,
        options: AttentionOptions,
        reach: Reach,
    ) -> torch.Tensor:
        kv_heads, length = k_KSD.shape[0], q_HCD.shape[1]
        q_KRD = q_HCD.unflatten(0, (kv_heads, -1)).flatten(1, 2)
        scores_KGCS = _scores(q_KRD, k_KSD, options).unflatten(1, (-1, length))
        scores_KGCS.masked_fill_(chunk.hidden(reach, self._device), float("-inf"))
        sinks = options.sinks
        sinks_KG11 = None if sinks is None else sinks.view(kv_heads, -1, 1, 1)
        weights_KGCS = _weights(scores_KGCS, sinks_KG11)
        out_KRW = torch.bmm(weights_KGCS.flatten(1, 2), v_KSW)
        return out_KRW.unflatten(1, (-1, length)).flatten(0, 1)

    def _decode_group(self, singles: Singles, first: int, last: int) -> _Decodes:
        lengths = singles.lengths[first:last]
        last_block = (lengths - 1) // self._pool.block_size
        # any block would do for padding; its own keeps a broken row to itself
        place = np.minimum(np.arange(int(last_block[-1]) + 1), last_block[:, None])
        blocks = singles.table[singles.rows[first:last, None], place].astype(np.int64)
        return _Decodes(
            first=first,
            last=last,
            shortest=int(lengths[0]),
            lengths=self._put(lengths),
            blocks=self._put(blocks.reshape(-1)),
        )

    def _chunk(self, piece: Piece, first: int) -> _Chunk:
        blocks = None
        if piece.start > 0:
            held = -(-piece.stop // self._pool.block_size)
            blocks = self._put(np.array(piece.blocks[:held]))
        last = first + piece.stop - piece.start
        return _Chunk(first, last, piece.start, piece.stop, blocks)


def slots_of(singles: Singles, pieces: Sequence[Piece], block_size: int) -> np.ndarray:
    """Where each token of a packed row is stored, `block * block_size + position`."""
    own = [_single_slots(singles, block_size), *(_slots(piece, block_size) for piece in pieces)]
    return np.concatenate(own)


def _slots(piece: Piece, block_size: int) -> np.ndarray:
    """The slots of a piece's own tokens."""
    position = np.arange(piece.start, piece.stop)
    return np.asarray(piece.blocks)[position // block_size] * block_size + position % block_size


def _single_slots(singles: Singles, block_size: int) -> np.ndarray:
    position = singles.lengths - 1
    blocks = singles.table[singles.rows, position // block_size].astype(np.int64)
    slots: np.ndarray = blocks * block_size + position % block_size
    return slots


def decode_groups(lengths: Sequence[int], most_tokens: int | None) -> list[tuple[int, int]]:
    """Cut contexts, the shortest first, where padding or the whole would grow too large.

    Return the first and the last + 1 of each group.
    """
    groups: list[tuple[int, int]] = []
    first = 0
    for index, length in enumerate(lengths):
        padded = length > _PADDING_RATIO * lengths[first] + _PADDING_TOKENS
        tokens = (index - first + 1) * length
        if padded or (most_tokens is not None and tokens > most_tokens and index > first):
            groups.append((first, index))
            first = index
    if lengths:
        groups.append((first, len(lengths)))
    return groups


def _scores(q_NRD: torch.Tensor, k_NSD: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    scores_NRS = torch.baddbmm(
        q_NRD.new_empty(1), q_NRD, k_NSD.transpose(1, 2), beta=0, alpha=options.scale
    )
    if options.softcap is not None:
        scores_NRS = options.softcap * torch.tanh(scores_NRS / options.softcap)
    return scores_NRS


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the context; a sink takes its share and is dropped."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
