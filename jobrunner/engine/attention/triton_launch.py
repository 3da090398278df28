"""Launch the kernels over the KV pool with the tiles that fit. Knows nothing of steps or models.

Shapes: T tokens of a pass, B sequences that decode, H query heads, K kv heads, N blocks,
P positions of a block, D width of a query or key head, W width of a value head, E elements of a
block, R splits of a context.
"""

from __future__ import annotations

import torch

from jobrunner.engine.attention import triton_kernels as kernels
from jobrunner.engine.attention.hook import AttentionOptions
from jobrunner.engine.attention.triton_tiles import decode_tiles, padded
from jobrunner.engine.kv import Reach

_COPIED_ELEMENTS = 2048


def decode(
    out_BHW: torch.Tensor,
    q_HBD: torch.Tensor,
    keys_KNPD: torch.Tensor,
    values_KNPW: torch.Tensor,
    table: torch.Tensor,
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    options: AttentionOptions,
    reach: Reach,
    splits: int,
) -> None:
    """Fill in what one token of each sequence attends to; its K and V are in the pool.

    Row `rows_B` of `table` lists the blocks of a sequence of `lengths_B` tokens. All of these,
    and the outputs, may stay where they are while a graph of this is played again.
    """
    heads, batch, key_width = q_HBD.shape
    kv_heads, _, block_size, value_width = values_KNPW.shape
    group = heads // kv_heads
    tiles = decode_tiles(group, key_width, value_width, keys_KNPD.element_size())
    _last_is_dense(out_BHW, q_HBD, keys_KNPD, values_KNPW)
    parts = splits if splits > 1 else 0
    part_BHRW = q_HBD.new_empty((batch, heads, parts, value_width), dtype=torch.float32)
    top_BHR, sum_BHR = q_HBD.new_empty((2, batch, heads, parts), dtype=torch.float32)
    sinks = options.sinks
    shared = {
        "HEADS": heads,
        "VALUE_WIDTH": value_width,
        "TOKENS": tiles.tokens,
        "PADDED_VALUE": tiles.value_width,
        "SPLITS": splits,
        "WINDOW": reach.window or 0,
        "CHUNK": reach.chunk or 0,
        "SINKS": sinks is not None,
    }
    kernels.decode_kernel[(batch, kv_heads * -(-group // tiles.queries), splits)](
        out_BHW,
        part_BHRW,
        top_BHR,
        sum_BHR,
        q_HBD,
        keys_KNPD,
        values_KNPW,
        table,
        rows_B,
        lengths_B,
        sinks,
        options.scale,
        options.softcap or 1.0,
        q_HBD.stride(0),
        q_HBD.stride(1),
        out_BHW.stride(0),
        out_BHW.stride(1),
        table.stride(0),
        *keys_KNPD.stride()[:3],
        *values_KNPW.stride()[:3],
        GROUP=group,
        KEY_WIDTH=key_width,
        BLOCK_SIZE=block_size,
        QUERIES=tiles.queries,
        PADDED_KEY=tiles.key_width,
        SOFTCAP=options.softcap is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **shared,
    )
    if splits > 1:
        kernels.reduce_kernel[(batch, heads)](
            out_BHW,
            part_BHRW,
            top_BHR,
            sum_BHR,
            lengths_B,
            sinks,
            out_BHW.stride(0),
            out_BHW.stride(1),
            num_warps=tiles.warps,
            **shared,
        )


def write(
    keys_KNPD: torch.Tensor,
    values_KNPW: torch.Tensor,
    k_KTD: torch.Tensor,
    v_KTW: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Store K and V of T tokens in slots, a slot being `block * block_size + position`."""
    _last_is_dense(keys_KNPD, values_KNPW, k_KTD, v_KTW)
    kv_heads, tokens, key_width = k_KTD.shape
    value_width = v_KTW.shape[-1]
    kernels.write_kernel[(tokens,)](
        keys_KNPD,
        values_KNPW,
        k_KTD,
        v_KTW,
        slots_T,
        *k_KTD.stride()[:2],
        *v_KTW.stride()[:2],
        *keys_KNPD.stride()[:3],
        *values_KNPW.stride()[:3],
        HEADS=kv_heads,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        BLOCK_SIZE=keys_KNPD.shape[2],
        PADDED_HEADS=padded(kv_heads),
        PADDED_KEY=padded(key_width),
        PADDED_VALUE=padded(value_width),
    )


def gather_blocks(pool_NE: torch.Tensor, blocks: torch.Tensor, staged_NE: torch.Tensor) -> None:
    """Copy blocks of the pool one behind the other."""
    _copy_blocks(pool_NE, blocks, staged_NE, gather=True)


def scatter_blocks(pool_NE: torch.Tensor, blocks: torch.Tensor, staged_NE: torch.Tensor) -> None:
    """Copy what lies one behind the other to blocks of the pool."""
    _copy_blocks(pool_NE, blocks, staged_NE, gather=False)


def _copy_blocks(
    pool_NE: torch.Tensor, blocks: torch.Tensor, staged_NE: torch.Tensor, *, gather: bool
) -> None:
    if not (pool_NE.is_contiguous() and staged_NE.is_contiguous()):
        raise ValueError("blocks are copied between contiguous tensors")
    elements = pool_NE.shape[1]
    copied = min(_COPIED_ELEMENTS, padded(elements))
    kernels.copy_blocks_kernel[(len(blocks), -(-elements // copied))](
        pool_NE, staged_NE, blocks, elements, COPIED=copied, GATHER=gather
    )


def _last_is_dense(*tensors: torch.Tensor) -> None:
    """Raise ValueError unless neighbours in a head are neighbours in memory, as kernels assume."""
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"a tensor of strides {tensor.stride()} reaches an attention kernel")
