"""Read the compact protocol of thrift, as far as the page headers of Parquet need it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

# a page header has two levels
_MOST_NESTING = 8


class Thrift:
    """Reads the compact protocol of thrift. Raises IndexError where the bytes end."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.place = 0

    def struct(self, nesting: int = 0) -> dict[int, Any]:
        if nesting > _MOST_NESTING:
            raise pa.ArrowInvalid("a page header is damaged")
        fields: dict[int, Any] = {}
        number = 0
        while first := self._byte():
            number = number + (first >> 4) if first >> 4 else _signed(self._varint())
            fields[number] = self._value(first & 15, nesting)
        return fields

    def _value(self, kind: int, nesting: int) -> object:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return _signed(self._varint())
        if kind in (7, 8):
            self._skip(8 if kind == 7 else self._varint())
            return None
        if kind == 12:
            return self.struct(nesting + 1)
        # a page header has no lists
        raise pa.ArrowInvalid("a page header is damaged")

    def _skip(self, size: int) -> None:
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
        raise pa.ArrowInvalid("a page header is damaged")


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
