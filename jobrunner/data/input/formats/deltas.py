"""Tell what the texts of a Parquet page take whose lengths are written as differences.

Two encodings write them so: DELTA_LENGTH_BYTE_ARRAY, all lengths and then all texts, and
DELTA_BYTE_ARRAY, what each text shares with the one before, then the rest as in the first. A few
bytes can be any number of lengths, of any size, and Arrow allocates what they ask for. They are
packed as in https://parquet.apache.org/docs/file-format/data-pages/encodings/.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

_LENGTH_BITS = 32
_LARGEST = (1 << _LENGTH_BITS) - 1
# lengths that are unpacked at once
_TOGETHER = 2**16
# no writer makes so many, and each takes time
_MOST_LENGTHS = 2**24


def check_lengths(content: memoryview, values: int) -> None:
    """Hold that the lengths at the start of `content` are no more than `values`, nor too many.

    Raises ArrowInvalid where they are, or are damaged.
    """
    _Lengths(content, values)


def shared_bytes(content: memoryview, values: int) -> int:
    """What the texts of a DELTA_BYTE_ARRAY page share with those before them, in bytes.

    Raises ArrowInvalid as `check_lengths` does.
    """
    shared = _Lengths(content, values)
    total = sum(shared.sums())
    check_lengths(content[shared.place :], values)
    return total


class _Lengths:
    """Reads lengths in the encoding DELTA_BINARY_PACKED; `place` is the next byte."""

    def __init__(self, content: memoryview, values: int) -> None:
        self._content = content
        self.place = 0
        in_block, self._parts, self._count = self._varint(), self._varint(), self._varint()
        self._last = _signed(self._varint()) & _LARGEST
        # a part is whole bytes of whole words
        if not self._parts or not in_block or in_block % (32 * self._parts):
            raise _damaged()
        if self._count > values:
            raise pa.ArrowInvalid(f"a page of {values:,} values has {self._count:,} lengths")
        if self._count > _MOST_LENGTHS:
            raise pa.ArrowInvalid(
                f"a page has {self._count:,} lengths, the limit is {_MOST_LENGTHS:,}"
            )
        self._in_part = in_block // self._parts

    def sums(self) -> Iterator[int]:
        """What the lengths come to together, some after some."""
        if self._count:
            yield self._last
        left = self._count - 1
        while left > 0:
            least = _signed(self._varint())
            for width in self._bytes(self._parts):
                # the widths of parts without values mean nothing
                if left > 0:
                    yield from self._part(least, width, min(left, self._in_part))
                    left -= self._in_part

    def _part(self, least: int, width: int, values: int) -> Iterator[int]:
        if width > _LENGTH_BITS:
            raise _damaged()
        packed = self._bytes(self._in_part * width // 8)
        for start in range(0, values, _TOGETHER):
            count = min(_TOGETHER, values - start)
            # as in the format, sums wrap around
            steps = np.full(count, least, np.int64)
            if width:
                steps += _unpacked(packed[start * width // 8 :], width, count)
            steps[0] += self._last
            lengths = np.cumsum(steps).astype(np.uint32)
            self._last = int(lengths[-1])
            # none is negative: Arrow refuses it
            yield int(lengths.sum(dtype=np.uint64))

    def _varint(self) -> int:
        value = 0
        for shift in range(0, _LENGTH_BITS, 7):
            byte = self._bytes(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value & _LARGEST
        raise _damaged()

    def _bytes(self, size: int) -> memoryview[int]:
        start, self.place = self.place, self.place + size
        if self.place > len(self._content):
            raise _damaged()
        return self._content[start : self.place]


def _unpacked(packed: memoryview, width: int, count: int) -> np.ndarray:
    """The first `count` numbers of so many bits each."""
    held = np.frombuffer(packed, np.uint8, -(-count * width // 8))
    bits = np.unpackbits(held, count=count * width, bitorder="little").reshape(count, width)
    powers = np.uint32(1) << np.arange(width, dtype=np.uint32)
    return bits @ powers


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)


def _damaged() -> pa.ArrowInvalid:
    return pa.ArrowInvalid("the lengths of a page are damaged")
