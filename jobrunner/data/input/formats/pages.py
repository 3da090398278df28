"""Tell from the page headers of a Parquet file what its column chunks may decode to.

The footer is no help: it says nothing of single pages, and nothing makes it tell the truth, while
Arrow allocates what a page header asks for. It decodes no value beside those of dictionaries, and
lengths.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobrunner.data.input.formats.codecs import decompressed
from jobrunner.data.input.formats.deltas import check_lengths, shared_bytes
from jobrunner.data.input.formats.thrift import Thrift, damaged

# what Arrow accepts
_MOST_HEADER_BYTES = 16 * 2**20
_FIRST_HEADER_BYTES = 512
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3
_DATA_PAGES = (_DATA_PAGE, _DATA_PAGE_V2)
_PLAIN_DICTIONARY, _DELTA_PACKED, _DELTA_LENGTHS, _DELTA_TEXT, _RLE_DICTIONARY = 2, 5, 6, 7, 8
_DICTIONARY = (_PLAIN_DICTIONARY, _RLE_DICTIONARY)
_DELTA_TEXTS = (_DELTA_LENGTHS, _DELTA_TEXT)
# of a number, and of the place of a value in a dictionary or a list
_NUMBER_BYTES = 8
# of the place and the length of a text that Arrow holds for each of a dictionary, or of a page
# of differences
_ENTRY_BYTES = 16
# of the length before a text
_LENGTH_BYTES = 4
# in a larger dictionary nobody looks for the longest value
_MOST_DICTIONARY_BYTES = 16 * 2**20
_RLE_LEVELS, _PACKED_LEVELS = 3, 4
# of its pages Arrow decompresses those, too, that say they are not compressed
_WRITER_OF_OLD = "parquet-cpp"


@dataclass(frozen=True, slots=True)
class ChunkSize:
    """What the pages of one column chunk hold, in bytes where not said otherwise.

    `compressed` is what all pages have in the file. `longest` is the largest page: no value is
    longer. `largest` is what Arrow holds for a page at the most, `largest_compressed` what that
    page has in the file. `dictionary` is the dictionary page, if any; its content is in the file
    from the first to the second number of `dictionary_place`. `in_dictionary` are the values that
    are places in it, `values` all values, `in_page` the most of a page; `plain` is what all other
    values take together. Where `deltas`, `delta_bytes` tells more.
    """

    compressed: int
    longest: int
    largest: int
    largest_compressed: int
    dictionary: int
    dictionary_place: tuple[int, int]
    in_dictionary: int
    values: int
    in_page: int
    plain: int
    deltas: bool


def chunk_size(file: Any, chunk: Any) -> ChunkSize:
    """Walk through the page headers of a column chunk, as its metadata places it in `file`.

    Raises ArrowInvalid where they cannot be read.
    """
    compressed = longest = largest = largest_compressed = 0
    dictionary = in_dictionary = values = in_page = plain = 0
    place, deltas = (0, 0), False
    for page in _pages(file, chunk):
        held, in_file = _held(page), page.place[1] - page.place[0]
        compressed += in_file
        longest = max(longest, page.size)
        if held > largest:
            largest, largest_compressed = held, in_file
        if page.kind == _DICTIONARY_PAGE:
            dictionary, place = page.size, page.place
            continue
        values += page.values
        in_page = max(in_page, page.values)
        if page.encoding in _DICTIONARY:
            in_dictionary += page.values
        else:
            plain += held
        deltas = deltas or page.encoding in _DELTA_TEXTS
    return ChunkSize(
        compressed,
        longest,
        largest,
        largest_compressed,
        dictionary,
        place,
        in_dictionary,
        values,
        in_page,
        plain,
        deltas,
    )


def _held(page: _Page) -> int:
    """What Arrow holds for a page while it decodes it."""
    if page.kind == _DICTIONARY_PAGE:
        return page.size + page.values * _ENTRY_BYTES
    if page.encoding in _DELTA_TEXTS:
        # all texts are decoded at once, beside the page
        return 2 * page.size + page.values * _ENTRY_BYTES
    if page.encoding == _DELTA_PACKED:
        # runs of them take no space in the page
        return max(page.size, page.values * _NUMBER_BYTES)
    return page.size


def delta_bytes(file: Any, footer: Any, group: int, place: int) -> int:
    """What the texts of a column chunk share, in its pages, with those before them, in bytes.

    The chunk is that of a row group and of the leaf at `place` in the schema of the file. Each
    page is decompressed, so its size has to be within bounds. Raises ArrowInvalid where one cannot
    be, or its lengths are damaged.
    """
    chunk = footer.row_group(group).column(place)
    shared = 0
    for page in _pages(file, chunk):
        if page.encoding not in _DELTA_TEXTS:
            continue
        if _unclear(footer, chunk, page):
            raise damaged("it is not told whether the page is compressed")
        content = _values_in(file, chunk, footer.schema.column(place), page)
        # without any where all values are null
        if content and page.encoding == _DELTA_TEXT:
            shared += shared_bytes(content, page.values)
        elif content:
            check_lengths(content, page.values)
    return shared


def longest_in_dictionary(file: Any, chunk: Any, size: ChunkSize) -> int:
    """The bytes of the longest text in a dictionary page; of the page where that is not told."""
    start, stop = size.dictionary_place
    if size.dictionary > _MOST_DICTIONARY_BYTES:
        return size.dictionary
    if chunk.compression != "UNCOMPRESSED" and stop - start >= size.dictionary:
        # compression made it no smaller
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
    """A page; `size` is the larger of its two sizes, `header` that of its kind."""

    kind: int
    size: int
    unpacked: int
    values: int
    encoding: int
    place: tuple[int, int]
    header: dict[int, Any]


def _pages(file: Any, chunk: Any) -> Iterator[_Page]:
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < place:
        place = chunk.dictionary_page_offset
    end = place + chunk.total_compressed_size
    file_end = file.seek(0, os.SEEK_END)
    left, begun = chunk.num_values, False
    # as Arrow goes: to the last value
    while left > 0:
        if not 0 <= place < min(end, file_end):
            raise damaged(f"{left:,} values have no page")
        header, header_bytes = _header_at(file, place)
        start = place + header_bytes
        place = start + _number(header, 3)
        if place > file_end:
            raise damaged(f"the page would end at byte {place:,} of {file_end:,}")
        page = _page_of(header, (start, place))
        if page.kind == _DICTIONARY_PAGE and begun:
            raise damaged("a dictionary comes after other pages")
        begun = begun or page.kind in (_DICTIONARY_PAGE, *_DATA_PAGES)
        left -= page.values if page.kind in _DATA_PAGES else 0
        yield page


def _page_of(header: dict[int, Any], place: tuple[int, int]) -> _Page:
    kind = _number(header, 1)
    # the place of the page's own header, and that of the encoding in it
    own, encoding = {_DATA_PAGE: (5, 2), _DICTIONARY_PAGE: (7, 2), _DATA_PAGE_V2: (8, 4)}.get(
        kind, (0, 0)
    )
    # without compression Arrow goes by what lies in the file
    unpacked = _number(header, 2)
    size = max(unpacked, place[1] - place[0])
    if not own:
        return _Page(kind, size, unpacked, 0, 0, place, {})
    details = header.get(own)
    if not isinstance(details, dict):
        raise damaged()
    values, encoded = _number(details, 1), _number(details, encoding)
    return _Page(kind, size, unpacked, values, encoded, place, details)


def _unclear(footer: Any, chunk: Any, page: _Page) -> bool:
    """Whether the file's writer decides whether a page is compressed, not what the page says."""
    if page.kind != _DATA_PAGE_V2 or page.header.get(7) is not False:
        return False
    if chunk.compression == "UNCOMPRESSED":
        return False
    try:
        writer: str = footer.created_by.lower()
    except UnicodeDecodeError:
        return True
    return writer.partition(" version ")[0].strip() == _WRITER_OF_OLD


def _values_in(file: Any, chunk: Any, column: Any, page: _Page) -> memoryview:
    """The values of a data page, decompressed, without the levels before them."""
    start, stop = page.place
    file.seek(start)
    content = memoryview(file.read(stop - start))
    if page.kind == _DATA_PAGE_V2:
        levels = _number(page.header, 5) + _number(page.header, 6)
        if levels > min(page.unpacked, len(content)):
            raise damaged(f"{levels:,} bytes of levels are more than the page has")
        content = content[levels:]
        # it is where nothing is said
        if content and page.header.get(7, True) is not False:
            content = decompressed(content, chunk.compression, page.unpacked - levels)
        return content
    content = decompressed(content, chunk.compression, page.unpacked)
    for most, encoding in (
        (column.max_repetition_level, _number(page.header, 4)),
        (column.max_definition_level, _number(page.header, 3)),
    ):
        if most:
            content = content[_levels_bytes(content, most, encoding, page.values) :]
    return content


def _levels_bytes(content: memoryview, most: int, encoding: int, values: int) -> int:
    """What the levels at the start of a data page take, of which `most` is the largest."""
    if encoding == _PACKED_LEVELS:
        return -(-values * most.bit_length() // 8)
    if encoding != _RLE_LEVELS:
        raise damaged(f"there is no encoding {encoding} of levels")
    return _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")


def _number(header: dict[int, Any], field: int) -> int:
    value = header.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise damaged()
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
                raise damaged(f"the one at byte {place:,} has no end") from None
            size *= 8
