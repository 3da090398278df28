"""Tell from the page headers of a Parquet file what its column chunks may decode to.

The footer is no help: it says nothing of single pages, and nothing makes it tell the truth, while
Arrow allocates what a page header asks for. It decodes no value beside those of dictionaries, and
lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobrunner.data.input.formats.codecs import decompressed
from jobrunner.data.input.formats.deltas import check_lengths, shared_bytes
from jobrunner.data.input.formats.thrift import Thrift

# what Arrow accepts
_MOST_HEADER_BYTES = 16 * 2**20
_FIRST_HEADER_BYTES = 512
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_PLAIN_DICTIONARY, _DELTA_PACKED, _DELTA_LENGTHS, _DELTA_TEXT, _RLE_DICTIONARY = 2, 5, 6, 7, 8
_DICTIONARY = (_PLAIN_DICTIONARY, _RLE_DICTIONARY)
_DELTA_TEXTS = (_DELTA_LENGTHS, _DELTA_TEXT)
_DELTA = (_DELTA_PACKED, *_DELTA_TEXTS)
# of a number, and of the place of a value in a dictionary or a list
_NUMBER_BYTES = 8
# of the place and the length of a text that Arrow holds for each of a dictionary
_ENTRY_BYTES = 16
# of the length before a text
_LENGTH_BYTES = 4
# in a larger dictionary nobody looks for the longest value
_MOST_DICTIONARY_BYTES = 16 * 2**20
_RLE_LEVELS = 3


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What the pages of one column chunk hold, in bytes where not said otherwise.

    `compressed` lies in the file. `largest` is the largest page, `largest_compressed` what that
    has in the file. `dictionary` is the dictionary page, if any; its content is in the file from
    the first to the second number of `dictionary_place`. `in_dictionary` are the values that are
    places in it, `values` all values; `plain` is what all other values take together. Where
    `deltas`, `delta_bytes` tells more.
    """

    compressed: int
    largest: int
    largest_compressed: int
    dictionary: int
    dictionary_place: tuple[int, int]
    in_dictionary: int
    values: int
    plain: int
    deltas: bool


def chunk_size(file: Any, chunk: Any) -> ChunkSize:
    """Walk through the page headers of a column chunk, as its metadata places it in `file`.

    Raises ArrowInvalid where they cannot be read.
    """
    largest = largest_compressed = dictionary = in_dictionary = values = plain = 0
    place, deltas = (0, 0), False
    for page in _pages(file, chunk):
        held = page.size
        if page.encoding in _DELTA:
            # runs of them take no space in the page
            held = max(held, page.values * _NUMBER_BYTES)
        if page.kind == _DICTIONARY_PAGE:
            held = max(held, page.values * _ENTRY_BYTES)
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
        deltas = deltas or page.encoding in _DELTA_TEXTS
    return ChunkSize(
        chunk.total_compressed_size,
        largest,
        largest_compressed,
        dictionary,
        place,
        in_dictionary,
        values,
        plain,
        deltas,
    )


def delta_bytes(file: Any, chunk: Any, column: Any) -> int:
    """What the texts of a column chunk share, in its pages, with those before them, in bytes.

    `column` is the chunk's in the schema of the file. Each page is decompressed, so its size has to
    be within bounds. Raises ArrowInvalid where one cannot be, or its lengths are damaged.
    """
    shared = 0
    for page in _pages(file, chunk):
        if page.encoding not in _DELTA_TEXTS:
            continue
        content = _values_in(file, chunk, column, page)
        # without any where all values are null
        if content and page.encoding == _DELTA_TEXT:
            shared += shared_bytes(content, page.values)
        elif content:
            check_lengths(content, page.values)
    return shared


def longest_in_dictionary(file: Any, chunk: Any, size: ChunkSize) -> int:
    """The bytes of the longest text in a dictionary page; of the page where that is not told."""
    start, stop = size.dictionary_place
    if size.dictionary > _MOST_DICTIONARY_BYTES or stop - start > _MOST_DICTIONARY_BYTES:
        return size.dictionary
    file.seek(start)
    try:
        content = decompressed(
            memoryview(file.read(stop - start)), chunk.compression, size.dictionary
        )
    except pa.ArrowInvalid:
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
    header: dict[int, Any]


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
        return _Page(kind, _number(header, 2), 0, 0, place, {})
    details = header.get(own)
    if not isinstance(details, dict):
        raise pa.ArrowInvalid("a page header is damaged")
    values, encoded = _number(details, 1), _number(details, encoding)
    return _Page(kind, _number(header, 2), values, encoded, place, details)


def _values_in(file: Any, chunk: Any, column: Any, page: _Page) -> memoryview:
    """The values of a data page, decompressed, without the levels before them."""
    start, stop = page.place
    file.seek(start)
    content = memoryview(file.read(stop - start))
    if page.kind == _DATA_PAGE_V2:
        levels = _number(page.header, 5) + _number(page.header, 6)
        content = content[levels:]
        # it is where nothing is said
        if content and page.header.get(7, True):
            content = decompressed(content, chunk.compression, page.size - levels)
        return content
    content = decompressed(content, chunk.compression, page.size)
    for most, encoding in (
        (column.max_repetition_level, _number(page.header, 4)),
        (column.max_definition_level, _number(page.header, 3)),
    ):
        if most:
            if encoding != _RLE_LEVELS:
                raise pa.ArrowInvalid("the levels of a page are in an encoding of old")
            content = content[_LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little") :]
    return content


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
        header = Thrift(file.read(size))
        try:
            return header.struct(), header.place
        except IndexError:
            if len(header.content) < size or size >= _MOST_HEADER_BYTES:
                raise pa.ArrowInvalid(f"the page header at byte {place:,} is damaged") from None
            size *= 8
