"""Triton kernels over the KV pool. Know nothing of torch, steps or models.

Shapes: T tokens of a pass, B sequences that decode, H query heads, K kv heads, G query heads of
one kv head, N blocks, P positions of a block, S tokens of a context, D width of a query or key
head, W width of a value head, E elements of a block, R splits of a context.
"""

import triton
import triton.language as tl

# exp2 is what the hardware has
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _first_seen(length, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that the last of `length` tokens sees."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    if CHUNK > 0:
        first = (length - 1) // CHUNK * CHUNK
    return first


@triton.jit
def _tiles_per_split(length, first, TOKENS: tl.constexpr, SPLITS: tl.constexpr):
    """How many tiles of its context a split takes; the first begins at a whole tile."""
    tiles = tl.cdiv(length, TOKENS) - first // TOKENS
    return tl.maximum(tl.cdiv(tiles, SPLITS), 1)


# the width of a table changes from step to step, and nothing depends on what divides it
@triton.jit(do_not_specialize=["table_row"])
def decode_kernel(
    out_ptr,
    part_ptr,
    top_ptr,
    sum_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    rows_ptr,
    lengths_ptr,
    sinks_ptr,
    scale,
    softcap,
    q_head,
    q_row,
    out_row,
    out_head,
    table_row,
    key_head,
    key_block,
    key_position,
    value_head,
    value_block,
    value_position,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One split of one context under the query heads of one kv head; done where SPLITS is 1."""
    # the longest contexts come last in the batch and should begin first
    batch = tl.num_programs(0)
    sequence = batch - 1 - tl.program_id(0)
    groups: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    kv_head = tl.program_id(1) // groups
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = _first_seen(length, WINDOW, CHUNK)
    span = _tiles_per_split(length, first, TOKENS, SPLITS) * TOKENS
    begin = first // TOKENS * TOKENS + split * span
    end = tl.minimum(begin + span, length)
    if begin >= length:
        return

    query = tl.program_id(1) % groups * QUERIES + tl.arange(0, QUERIES)
    real = query < GROUP
    head = kv_head * GROUP + query
    d = tl.arange(0, PADDED_KEY)
    w = tl.arange(0, PADDED_VALUE)
    t = tl.arange(0, TOKENS)
    q_at = sequence.to(tl.int64) * q_row + head[:, None] * q_head + d[None, :]
    q_GD = tl.load(q_ptr + q_at, mask=real[:, None] & (d < KEY_WIDTH)[None, :], other=0.0)
    table_ptr += tl.load(rows_ptr + sequence).to(tl.int64) * table_row
    keys_ptr += kv_head.to(tl.int64) * key_head
    values_ptr += kv_head.to(tl.int64) * value_head

    top_G = tl.full([QUERIES], float("-inf"), tl.float32)
    sum_G = tl.zeros([QUERIES], tl.float32)
    out_GW = tl.zeros([QUERIES, PADDED_VALUE], tl.float32)
    for start in range(begin, end, TOKENS):
        s = start + t
        held = s < end
        block = tl.load(table_ptr + s // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
        place = s % BLOCK_SIZE
        key_at = block * key_block + place * key_position
        k_mask = held[None, :]
        if PADDED_KEY != KEY_WIDTH:
            k_mask = k_mask & (d < KEY_WIDTH)[:, None]
        k_DS = tl.load(keys_ptr + key_at[None, :] + d[:, None], mask=k_mask, other=0.0)
        scores_GS = tl.dot(q_GD, k_DS, input_precision="ieee") * scale
        if SOFTCAP:
            # tanh, without running over
            scores_GS = softcap * (1 - 2 / (1 + tl.exp(2 * scores_GS / softcap)))
        scores_GS *= _LOG2E
        scores_GS = tl.where((held & (s >= first))[None, :], scores_GS, float("-inf"))
        # a tile always has a token that is seen, so that the top is finite
        new_top_G = tl.maximum(top_G, tl.max(scores_GS, 1))
        weights_GS = tl.exp2(scores_GS - new_top_G[:, None])
        fade_G = tl.exp2(top_G - new_top_G)
        sum_G = sum_G * fade_G + tl.sum(weights_GS, 1)
        value_at = block * value_block + place * value_position
        v_mask = held[:, None]
        if PADDED_VALUE != VALUE_WIDTH:
            v_mask = v_mask & (w < VALUE_WIDTH)[None, :]
        v_SW = tl.load(values_ptr + value_at[:, None] + w[None, :], mask=v_mask, other=0.0)
        out_GW *= fade_G[:, None]
        out_GW += tl.dot(weights_GS.to(v_SW.dtype), v_SW, input_precision="ieee")
        top_G = new_top_G

    out_mask = real[:, None] & (w < VALUE_WIDTH)[None, :]
    if SPLITS == 1:
        if SINKS:
            sink_G = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * _LOG2E
            new_top_G = tl.maximum(top_G, sink_G)
            fade_G = tl.exp2(top_G - new_top_G)
            sum_G = sum_G * fade_G + tl.exp2(sink_G - new_top_G)
            out_GW *= fade_G[:, None]
        out_at = sequence.to(tl.int64) * out_row + head[:, None] * out_head + w[None, :]
        out_GW /= sum_G[:, None]
        tl.store(out_ptr + out_at, out_GW.to(out_ptr.dtype.element_ty), mask=out_mask)
    else:
        part = (sequence.to(tl.int64) * HEADS + head) * SPLITS + split
        tl.store(top_ptr + part, top_G, mask=real)
        tl.store(sum_ptr + part, sum_G, mask=real)
        tl.store(part_ptr + part[:, None] * VALUE_WIDTH + w[None, :], out_GW, mask=out_mask)


@triton.jit
def reduce_kernel(
    out_ptr,
    part_ptr,
    top_ptr,
    sum_ptr,
    lengths_ptr,
    sinks_ptr,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the splits of one context under one query head."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    first = _first_seen(length, WINDOW, CHUNK)
    span = _tiles_per_split(length, first, TOKENS, SPLITS) * TOKENS
    r = tl.arange(0, SPLITS)
    w = tl.arange(0, PADDED_VALUE)
    worked = first // TOKENS * TOKENS + r * span < length
    part = (sequence.to(tl.int64) * HEADS + head) * SPLITS + r
    top_R = tl.load(top_ptr + part, mask=worked, other=float("-inf"))
    sum_R = tl.load(sum_ptr + part, mask=worked, other=0.0)
    mask = worked[:, None] & (w < VALUE_WIDTH)[None, :]
    part_RW = tl.load(part_ptr + part[:, None] * VALUE_WIDTH + w[None, :], mask=mask, other=0.0)
    top = tl.max(top_R, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    fade_R = tl.exp2(top_R - top)
    total = tl.sum(sum_R * fade_R, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    out_W = tl.sum(part_RW * fade_R[:, None], 0) / total
    out_at = sequence.to(tl.int64) * out_row + head * out_head + w
    tl.store(out_ptr + out_at, out_W.to(out_ptr.dtype.element_ty), mask=w < VALUE_WIDTH)


@triton.jit
def write_kernel(
    keys_ptr,
    values_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_head,
    k_token,
    v_head,
    v_token,
    key_head,
    key_block,
    key_position,
    value_head,
    value_block,
    value_position,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
):
    """Store K and V of one token, all heads, in its slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = tl.arange(0, PADDED_HEADS)[:, None]
    d = tl.arange(0, PADDED_KEY)[None, :]
    w = tl.arange(0, PADDED_VALUE)[None, :]
    k_mask = (head < HEADS) & (d < KEY_WIDTH)
    v_mask = (head < HEADS) & (w < VALUE_WIDTH)
    k_KD = tl.load(k_ptr + token * k_token + head * k_head + d, mask=k_mask)
    v_KW = tl.load(v_ptr + token * v_token + head * v_head + w, mask=v_mask)
    key_at = block * key_block + place * key_position + head.to(tl.int64) * key_head
    value_at = block * value_block + place * value_position + head.to(tl.int64) * value_head
    tl.store(keys_ptr + key_at + d, k_KD, mask=k_mask)
    tl.store(values_ptr + value_at + w, v_KW, mask=v_mask)


@triton.jit
def copy_blocks_kernel(
    pool_ptr,
    staged_ptr,
    blocks_ptr,
    elements,
    COPIED: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Copy a part of one block between the pool and its place among staged ones."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks_ptr + index).to(tl.int64)
    e = tl.program_id(1) * COPIED + tl.arange(0, COPIED)
    mask = e < elements
    pool_at = pool_ptr + block * elements + e
    staged_at = staged_ptr + index * elements + e
    if GATHER:
        tl.store(staged_at, tl.load(pool_at, mask=mask), mask=mask)
    else:
        tl.store(pool_at, tl.load(staged_at, mask=mask), mask=mask)
