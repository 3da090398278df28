"""Decompress a page of a Parquet file as Arrow does."""

from __future__ import annotations

import pyarrow as pa

# "LZ4" is what the format calls LZ4_RAW
_CODECS = {
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "ZSTD": "zstd",
    "BROTLI": "brotli",
    "LZ4": "lz4_raw",
}
# how Arrow's metadata names what the format calls LZ4
_LZ4_OF_HADOOP = "UNKNOWN"
# of each of the two lengths before a frame of Hadoop's
_LENGTH_BYTES = 4
# of an LZ4 match: of its place, and the least that it has
_PLACE_BYTES, _LEAST_MATCH = 2, 4


def decompressed(content: memoryview, compression: str, size: int) -> memoryview:
    """The `size` bytes that `content` stands for; `compression` is as Arrow's metadata names it.

    Raises ArrowInvalid where it stands for none.
    """
    if compression == "UNCOMPRESSED":
        return content
    try:
        if compression == _LZ4_OF_HADOOP:
            return _lz4(content, size)
        return _decoded(_CODECS[compression], content, size)
    except (KeyError, pa.ArrowInvalid, OSError) as error:
        raise pa.ArrowInvalid(f"a page cannot be decompressed: {error}") from error


def _lz4(content: memoryview, size: int) -> memoryview:
    """As frames of Hadoop's, and where they are none without frames: old writers made both."""
    frames = _of_hadoop(content, size)
    if frames is None:
        return _decoded("lz4_raw", content, size)
    if len(frames) != size:
        raise pa.ArrowInvalid(f"it has {len(frames):,} bytes, not {size:,}")
    return frames


def _of_hadoop(content: memoryview, size: int) -> memoryview | None:
    """Frames, each after its length and that which it has in the file; None if they are none."""
    decoded = bytearray()
    while len(content) >= 2 * _LENGTH_BYTES:
        lengths = content[:_LENGTH_BYTES], content[_LENGTH_BYTES : 2 * _LENGTH_BYTES]
        length, in_file = (int.from_bytes(part, "big") for part in lengths)
        content = content[2 * _LENGTH_BYTES :]
        left = size - len(decoded)
        if in_file > len(content) or length > left:
            return None
        try:
            frame = _decoded("lz4_raw", content[:in_file], left)
        except OSError:
            return None
        if _length_of_lz4(content[:in_file]) != length:
            return None
        decoded += frame[:length]
        content = content[in_file:]
    return None if len(content) else memoryview(decoded)


def _length_of_lz4(block: memoryview) -> int:
    """How many bytes an undamaged block of LZ4 stands for, which the library does not say.

    As in https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md.
    """
    length = place = 0
    while True:
        token = block[place]
        literals, place = _count_of_lz4(block, token >> 4, place + 1)
        length += literals
        place += literals
        # the last has no match
        if place >= len(block):
            return length
        match, place = _count_of_lz4(block, token & 15, place + _PLACE_BYTES)
        length += match + _LEAST_MATCH


def _count_of_lz4(block: memoryview, count: int, place: int) -> tuple[int, int]:
    """A count of which four bits are known, and the place after it."""
    more = 255 if count == 15 else 0
    while more == 255:
        more = block[place]
        count += more
        place += 1
    return count, place


def _decoded(codec: str, content: memoryview, size: int) -> memoryview:
    return memoryview(pa.Codec(codec).decompress(content, size, asbytes=True))
