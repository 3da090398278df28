"""Choose the tiles and splits of the attention kernels. Knows nothing of triton or tensors."""

from __future__ import annotations

from dataclasses import dataclass

# of K or of V in one tile: two of each, in flight at once, fit every GPU since Ampere (99 KiB)
_TILE_BYTES = 16 * 1024
_FEWEST_TOKENS, _MOST_TOKENS = 16, 64
# rows of a matrix product: fewer are padded by the hardware, more take registers
_FEWEST_QUERIES, _MOST_QUERIES = 16, 32
_MOST_SPLITS = 32
# a program each is what keeps the memory of one multiprocessor busy
_PROGRAMS_PER_PROCESSOR = 4
MOST_WIDTH = 256


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """What one program of the decode kernel works on at a time; all powers of two.

    `queries` of the heads that share a kv head against `tokens` of its context; `key_width` and
    `value_width` are those of a head, padded.
    """

    queries: int
    tokens: int
    key_width: int
    value_width: int
    warps: int = 4
    stages: int = 3


def decode_tiles(group: int, key_width: int, value_width: int, element_bytes: int) -> DecodeTiles:
    """Return the tiles for kv heads of these widths, each shared by `group` query heads."""
    key, value = max(16, padded(key_width)), max(16, padded(value_width))
    tokens = _TILE_BYTES // (max(key, value) * element_bytes)
    return DecodeTiles(
        queries=min(_MOST_QUERIES, max(_FEWEST_QUERIES, padded(group))),
        tokens=min(_MOST_TOKENS, max(_FEWEST_TOKENS, tokens)),
        key_width=key,
        value_width=value,
    )


def decode_splits(batch: int, kv_heads: int, processors: int) -> int:
    """Return in how many parts, a power of two, to cut each context so that no processor idles.

    It depends on nothing that changes while a batch has this size, so that it may be baked into
    a graph; a context too short for so many parts leaves the last ones without work.
    """
    wanted = -(-processors * _PROGRAMS_PER_PROCESSOR // max(1, batch * kv_heads))
    return min(_MOST_SPLITS, padded(wanted))


def padded(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()
