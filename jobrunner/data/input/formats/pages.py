"""Tell from the page headers of a Parquet file what its column chunks may decode to.

The footer is no help: it says nothing of single pages, and nothing makes it tell the truth, while
Arrow allocates what a page header asks for. It decodes no value beside those of dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

# what Arrow accepts
_MOST_HEADER_BYTES = 16 * 2**20
_FIRST_HEADER_BYTES = 512
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN_DICTIONARY, _DELTA_PACKED, _DELTA_LENGTHS, _DELTA_TEXT, _RLE_DICTIONARY = 2, 5, 6, 7, 8
_DICTIONARY = (_PLAIN_DICTIONARY, _RLE_DICTIONARY)
_DELTA = (_DELTA_PACKED, _DELTA_LENGTHS, _DELTA_TEXT)
# of a number, and of the place of a value in a dictionary or a list
_NUMBER_BYTES = 8
# of the length before a text
_LENGTH_BYTES = 4
# in a larger dictionary nobody looks for the longest value
_MOST_DICTIONARY_BYTES = 16 * 2**20
_CODECS = {
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "ZSTD": "zstd",
    "BROTLI": "brotli",
    "LZ4": "lz4_raw",
    "UNCOMPRESSED": "",
}
# nested types of thrift: a page header has two levels
_MOST_NESTING = 8


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What the pages of one column chunk hold, in bytes where not said otherwise.

    `compressed` lies in the file. `largest` is the largest page, `largest_compressed` what that
    has in the file. `dictionary` is the dictionary page, if any; its content is in the file from
    the first to the second number of `dictionary_place`. `in_dictionary` are the values that are
    places in it, `values` all values; `plain` is what all other values take together.
    """

    compressed: int
    largest: int
    largest_compressed: int
    dictionary: int
    dictionary_place: tuple[int, int]
    in_dictionary: int
    values: int
    plain: int


def chunk_size(file: Any, chunk: Any) -> ChunkSize:
    """Walk through the page headers of a column chunk, as its metadata places it in `file`.

    Raises ArrowInvalid where they cannot be read.
    """
    largest = largest_compressed = dictionary = in_dictionary = values = plain = 0
    place = (0, 0)
    for page in _pages(file, chunk):
        held = page.size
        if page.encoding in _DELTA:
            # runs of them take no space in the page
            held = max(held, page.values * _NUMBER_BYTES)
        if held > largest:
            largest, largest_compressed = held, page.place[1] - page.place[0]
        if page.kind == _DICTIONARY_PAGE:
            dictionary, place = page.size, page.place
            continue
        values += page.values
        if page.encoding in _DICTIONARY:
            in_dictionary += page.values
        else:
            plain += held
    return ChunkSize(
        chunk.total_compressed_size,
        largest,
        largest_compressed,
        dictionary,
        place,
        in_dictionary,
        values,
        plain,
    )


def longest_in_dictionary(file: Any, chunk: Any, size: ChunkSize) -> int:
    """The bytes of the longest text in a dictionary page; of the page where that is not told."""
    start, stop = size.dictionary_place
    if size.dictionary > _MOST_DICTIONARY_BYTES or stop - start > _MOST_DICTIONARY_BYTES:
        return size.dictionary
    file.seek(start)
    content = file.read(stop - start)
    try:
        if codec := _CODECS[chunk.compression]:
            content = pa.Codec(codec).decompress(content, size.dictionary, asbytes=True)
    except (KeyError, pa.ArrowException, OSError):
        # Arrow will say what is wrong, if it is
        return size.dictionary
    longest = place = 0
    while place + _LENGTH_BYTES <= len(content):
        length = int.from_bytes(content[place : place + _LENGTH_BYTES], "little")
        longest = max(longest, length)
        place += _LENGTH_BYTES + length
    return min(longest, size.dictionary)


@dataclass(frozen=True, slots=True)
class _Page:
    kind: int
    size: int
    values: int
    encoding: int
    place: tuple[int, int]


def _pages(file: Any, chunk: Any) -> Iterator[_Page]:
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < place:
        place = chunk.dictionary_page_offset
    end = place + chunk.total_compressed_size
    left = chunk.num_values
    # as Arrow goes: to the last value, or the end
    while left > 0 and place < end:
        header, header_bytes = _header_at(file, place)
        start = place + header_bytes
        place = start + _number(header, 3)
        page = _page_of(header, (start, place))
        if page.kind != _DICTIONARY_PAGE:
            left -= page.values
        yield page


def _page_of(header: dict[int, Any], place: tuple[int, int]) -> _Page:
    kind = _number(header, 1)
    # the place of the page's own header, and that of the encoding in it
    own, encoding = {_DATA_PAGE: (5, 2), _DICTIONARY_PAGE: (7, 2), _DATA_PAGE_V2: (8, 4)}.get(
        kind, (0, 0)
    )
    if not own:
        return _Page(kind, _number(header, 2), 0, 0, place)
    details = header.get(own)
    if not isinstance(details, dict):
        raise pa.ArrowInvalid("a page header is damaged")
    values, encoded = _number(details, 1), _number(details, encoding)
    return _Page(kind, _number(header, 2), values, encoded, place)


def _number(header: dict[int, Any], field: int) -> int:
    value = header.get(field)
    if not isinstance(value, int) or value < 0:
        raise pa.ArrowInvalid("a page header is damaged")
    return value


def _header_at(file: Any, place: int) -> tuple[dict[int, Any], int]:
    """A page header by the numbers of its fields, and how many bytes it has."""
    size = _FIRST_HEADER_BYTES
    while True:
        file.seek(place)
        header = _Thrift(file.read(size))
        try:
            return header.struct(), header.place
        except IndexError:
            if len(header.content) < size or size >= _MOST_HEADER_BYTES:
                raise pa.ArrowInvalid(f"the page header at byte {place:,} is damaged") from None
            size *= 8


class _Thrift:
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
