"""Decompress a page of a Parquet file as Arrow does."""

from __future__ import annotations

import pyarrow as pa

_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "ZSTD": "zstd", "BROTLI": "brotli"}
# of each of the two lengths before a frame of Hadoop's
_LENGTH_BYTES = 4


def decompressed(content: memoryview, compression: str, size: int) -> memoryview:
    """The `size` bytes that `content` stands for; `compression` is as Arrow's metadata names it.

    Raises ArrowInvalid where it stands for none.
    """
    if compression == "UNCOMPRESSED":
        return content
    if compression == "LZ4":
        return _lz4(content, size)
    try:
        return _decoded(_CODECS[compression], content, size)
    except (KeyError, pa.ArrowInvalid, OSError) as error:
        raise pa.ArrowInvalid(f"a page cannot be decompressed: {error}") from error


def _lz4(content: memoryview, size: int) -> memoryview:
    """One name stands for two ways, of which the file's own names are hidden."""
    found = [*_lz4_raw(content, size), *_lz4_of_hadoop(content, size)]
    # of one that can be read in both ways nobody knows what Arrow makes
    if len(found) != 1:
        raise pa.ArrowInvalid("a page cannot be decompressed as LZ4 in one way")
    return found[0]


def _lz4_raw(content: memoryview, size: int) -> list[memoryview]:
    try:
        return [_decoded("lz4_raw", content, size)]
    except OSError:
        return []


def _lz4_of_hadoop(content: memoryview, size: int) -> list[memoryview]:
    """Frames, each after its length and that which it has in the file."""
    decoded = bytearray()
    while len(content) > 2 * _LENGTH_BYTES:
        lengths = content[:_LENGTH_BYTES], content[_LENGTH_BYTES : 2 * _LENGTH_BYTES]
        length, in_file = (int.from_bytes(part, "big") for part in lengths)
        content = content[2 * _LENGTH_BYTES :]
        if in_file > len(content) or len(decoded) + length > size:
            return []
        if not (frame := _lz4_raw(content[:in_file], length)):
            return []
        decoded += frame[0]
        content = content[in_file:]
    return [] if len(content) or len(decoded) != size else [memoryview(decoded)]


def _decoded(codec: str, content: memoryview, size: int) -> memoryview:
    return memoryview(pa.Codec(codec).decompress(content, size, asbytes=True))
