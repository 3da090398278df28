"""Read the compact protocol of thrift, as far as the page headers of Parquet need it.

What is kept are booleans, numbers of 32 bits and structs: Arrow passes over a field that has not
the type it should have, and no field it goes by has another.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

# as thrift has it
_MOST_NESTING = 64
_LAST_FIELD = 2**15 - 1
# a page header has two levels, and no field after these is looked at
_KEPT_LEVELS = 2
_KEPT_FIELDS = 8


class Thrift:
    """Reads the compact protocol of thrift. Raises IndexError where the bytes end."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 0

    def struct(self, nesting: int = 0) -> dict[int, Any]:
        """The fields by their numbers. Raises ArrowInvalid where two readers may differ."""
        fields: dict[int, Any] = {}
        seen: set[int] = set()
        number = 0
        while first := self._byte():
            number = number + (first >> 4) if first >> 4 else _signed(self._varint())
            if not 0 < number <= _LAST_FIELD or number in seen:
                raise damaged()
            seen.add(number)
            value = self._value(first & 15, nesting)
            if value is not None and nesting < _KEPT_LEVELS and number <= _KEPT_FIELDS:
                fields[number] = value
        return fields

    def _value(self, kind: int, nesting: int) -> object:
        if kind in (1, 2):
            return kind == 1
        if kind == 5:
            return _of_32_bits(_signed(self._varint()))
        if kind == 12:
            return self.struct(_deeper(nesting))
        self._skip(kind, nesting)
        return None

    def _skip(self, kind: int, nesting: int) -> None:
        # of bytes, floating point numbers and UUIDs; each boolean of a list is a byte, too
        sizes = {1: 1, 2: 1, 3: 1, 7: 8, 13: 16}
        if kind in (4, 5, 6):
            self._varint()
        elif kind in (9, 10):
            self._skip_list(_deeper(nesting))
        elif kind == 11:
            self._skip_map(_deeper(nesting))
        elif kind == 12:
            self.struct(_deeper(nesting))
        elif kind == 8:
            self._skip_bytes(self._varint())
        elif kind in sizes:
            self._skip_bytes(sizes[kind])
        else:
            raise damaged()

    def _skip_list(self, nesting: int) -> None:
        first = self._byte()
        count = first >> 4 if first >> 4 < 15 else self._varint()
        for _ in range(count):
            self._skip(first & 15, nesting)

    def _skip_map(self, nesting: int) -> None:
        count = self._varint()
        kinds = self._byte() if count else 0
        for _ in range(count):
            self._skip(kinds >> 4, nesting)
            self._skip(kinds & 15, nesting)

    def _skip_bytes(self, size: int) -> None:
        self.place += size
        if self.place > len(self.content):
            raise IndexError

    def _byte(self) -> int:
        self.place += 1
        return self.content[self.place - 1]

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise damaged()


def damaged(why: str = "") -> pa.ArrowInvalid:
    """What is raised for a page header that cannot be right."""
    return pa.ArrowInvalid("a page header is damaged" + (f": {why}" if why else ""))


def _deeper(nesting: int) -> int:
    if nesting >= _MOST_NESTING:
        raise damaged()
    return nesting + 1


def _of_32_bits(number: int) -> int:
    if not -(2**31) <= number < 2**31:
        raise damaged(f"{number:,} is no number of 32 bits")
    return number


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
