"""Bound what one step of reading takes: how a row group is decoded, which rows become values.

A few bytes of Parquet can stand for any number of them, by compression and by dictionaries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobrunner.data.input.formats.lines import LINE_BYTES
from jobrunner.data.input.formats.pages import (
    ChunkSize,
    chunk_size,
    delta_bytes,
    longest_in_dictionary,
)
from jobrunner.errors import ConfigError

# what Arrow reads ahead of a column chunk: without, it holds the whole chunk in memory
READ_BUFFER_BYTES = 256 * 1024
# Arrow holds a page whole: 1 MiB mostly, a few writers make them of 100 MB and more
PAGE_BYTES = 512 * 2**20
# of so many values of a page Arrow makes room at once, however few are asked for
_ROOM_VALUES = 1024
# a page or lists of a row group that take more, and so many times their bytes in the file, are no
# data: texts unpack to 3 to 30 times as much
LISTS_BYTES = 2**30
MOST_TIMES = 100
# rows that are decoded together take no more, except for a single one
STEP_BYTES = 128 * 2**20
# rows that become Python's values together
_RECORDS_BYTES = 4 * 2**20
# of a value's place in a dictionary or a list, of its two levels, and of a number
_PLACE_BYTES = 4
_LEVELS_BYTES = 4
_NUMBER_BYTES = 8
# of a decimal number, which a file may have in fewer
_DECIMAL_BYTES = 32
# the least that a value counts which becomes one of Python's, and what an empty list or record of
# Python's takes
_VALUE_BYTES = 16
_OBJECT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Decoding:
    """How to decode row groups: so many rows at a time, these leaves with each value once.

    All lists together take no more than `lists_bytes`.
    """

    rows: int
    as_dictionary: frozenset[str] = frozenset()
    lists_bytes: int = 0

    def joined(self, other: Decoding) -> Decoding:
        """How to decode what follows in the same way."""
        return Decoding(
            min(self.rows, other.rows),
            self.as_dictionary | other.as_dictionary,
            self.lists_bytes + other.lists_bytes,
        )


@dataclass(frozen=True, slots=True)
class Leaf:
    """A column of values below one that is asked for: its place among all, and how it lies.

    It is in so many `lists`, each in the next. `length` is what Arrow holds for any value in
    bytes, of texts without their letters.
    """

    path: str
    place: int
    lists: int
    of_texts: bool
    length: int


def leaves_of(footer: Any, columns: Sequence[str]) -> list[Leaf]:
    """The leaves of some columns of a file."""
    leaves = []
    for place in range(footer.num_columns):
        leaf = footer.schema.column(place)
        if any(leaf.path == name or leaf.path.startswith(f"{name}.") for name in columns):
            of_texts = leaf.physical_type == "BYTE_ARRAY"
            length = _PLACE_BYTES if of_texts else max(_NUMBER_BYTES, leaf.length)
            if leaf.logical_type.type == "DECIMAL":
                length = max(length, _DECIMAL_BYTES)
            leaves.append(Leaf(leaf.path, place, leaf.max_repetition_level, of_texts, length))
    return leaves


def decoding_of(
    name: object, file: Any, footer: Any, group: int, leaves: Sequence[Leaf], batch_rows: int
) -> Decoding:
    """Choose how to decode some leaves of a row group, from the page headers in `file`.

    Raises ConfigError where no way is within bounds.
    """
    where = f"of row group {group:,} of `{name}`"
    total, row_bytes, as_dictionary = _Held(), 1, []
    for leaf in leaves:
        chunk = footer.row_group(group).column(leaf.place)
        size = chunk_size(file, chunk)
        # values of fixed length have it where they are null, too
        largest = max(size.largest, leaf.length * min(size.in_page, _ROOM_VALUES))
        _check_page(f"column `{leaf.path}` {where}", largest, size.largest_compressed)
        total.pages += largest + min(size.compressed, READ_BUFFER_BYTES)
        total.pages_compressed += size.largest_compressed
        shared = delta_bytes(file, footer, group, leaf.place) if size.deltas else 0
        if leaf.lists:
            in_lists = leaf.length + _LEVELS_BYTES + leaf.lists * _PLACE_BYTES
            total.lists += size.plain + size.values * in_lists + shared
            total.lists_compressed += size.compressed
            repeated = _repeated_bytes(file, chunk, size) if leaf.of_texts else 0
            if total.repeated + repeated > LISTS_BYTES:
                as_dictionary.append(leaf.path)
                repeated = size.dictionary
            total.repeated += repeated
        elif leaf.of_texts or leaf.length > _NUMBER_BYTES:
            # no text is longer than the page that it is in
            row_bytes += max(size.longest, leaf.length)
    # leaves may share the same bytes
    file_bytes = file.seek(0, os.SEEK_END)
    _check_pages(where, total.pages, min(total.pages_compressed, file_bytes))
    _check_lists(where, total.lists, min(total.lists_compressed, file_bytes))
    rows = max(1, min(batch_rows, STEP_BYTES // row_bytes))
    return Decoding(rows, frozenset(as_dictionary), total.lists + total.repeated)


@dataclass(slots=True)
class _Held:
    """What some leaves of a row group take together, in bytes, and what that has in the file.

    `pages` are the largest of each leaf and what is read ahead. `repeated` is what places in
    dictionaries stand for.
    """

    pages: int = 0
    pages_compressed: int = 0
    lists: int = 0
    lists_compressed: int = 0
    repeated: int = 0


def first_rows(rows: Any, columns: Sequence[str]) -> Any:
    """As many of some rows, at least one, as may become Python's values together."""
    while rows.num_rows > 1 and _size(rows, columns) > _RECORDS_BYTES:
        rows = rows.slice(0, rows.num_rows // 2)
    return rows


def too_large(rows: Any, columns: Sequence[str]) -> str:
    """Say which value of a single row is too large to be one; empty if none is."""
    for name in columns:
        size = _array_size(rows.column(name))
        if size > LINE_BYTES:
            return f"column `{name}` has {size:,} bytes, the limit is {LINE_BYTES:,}"
    return ""


def in_types(name: object, rows: Any, schema: pa.Schema) -> Iterator[Any]:
    """Some rows in the types of `schema`, a few at a time. Raises ConfigError."""
    while rows.num_rows:
        some = first_rows(rows, schema.names)
        if some.num_rows == 1 and (why := too_large(some, schema.names)):
            raise ConfigError(
                f"a row of `{name}` cannot be kept: {why}",
                hint="do not keep that column, or take the row out of the file",
            )
        rows = rows.slice(some.num_rows)
        yield some.cast(schema)


def _check_page(where: str, largest: int, compressed: int) -> None:
    if largest > max(PAGE_BYTES, MOST_TIMES * compressed):
        raise ConfigError(
            f"{where} has a page of {compressed:,} bytes that unpacks to"
            f" {largest:,}, the limit is {MOST_TIMES} times as many or {PAGE_BYTES:,}",
            hint="write the file again with smaller pages, or take it out of the input",
        )


def _check_pages(where: str, pages: int, compressed: int) -> None:
    """A page of each leaf is held at the same time."""
    if pages > max(2 * PAGE_BYTES, MOST_TIMES * compressed):
        raise ConfigError(
            f"the largest pages of all columns {where} have {compressed:,} bytes that unpack to"
            f" {pages:,}, the limit is {MOST_TIMES} times as many or {2 * PAGE_BYTES:,}",
            hint="write the file again with smaller pages, or take it out of the input",
        )


def _repeated_bytes(file: Any, chunk: Any, size: ChunkSize) -> int:
    """What the texts of a dictionary may take: each may be in a list any number of times."""
    at_most = size.in_dictionary * size.dictionary
    if at_most <= STEP_BYTES:
        return at_most
    return size.in_dictionary * longest_in_dictionary(file, chunk, size)


def _check_lists(where: str, lists: int, compressed: int) -> None:
    """All values may belong to one row."""
    if lists > max(LISTS_BYTES, MOST_TIMES * compressed):
        raise ConfigError(
            f"the lists {where} have {compressed:,} bytes that unpack to {lists:,}, the limit"
            f" is {MOST_TIMES} times as many or {LISTS_BYTES:,}",
            hint="write the file again with smaller row groups, or take it out of the input",
        )


def _size(rows: Any, columns: Sequence[str]) -> int:
    return sum(_array_size(rows.column(name)) for name in columns)


def _array_size(array: Any) -> int:
    """The bytes of an array's values, each as often as it is there.

    Small ones count more than they have: it is Python's that they become.
    """
    if isinstance(array, pa.ChunkedArray):
        return sum(map(_array_size, array.chunks))
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return _array_size(array.storage)
    if pa.types.is_struct(type_):
        return (_VALUE_BYTES + _OBJECT_BYTES) * len(array) + sum(map(_array_size, array.flatten()))
    if pa.types.is_nested(type_):
        inner = array.flatten() if not pa.types.is_map(type_) else _entries(array)
        return (_VALUE_BYTES + _OBJECT_BYTES) * len(array) + _array_size(inner)
    if pa.types.is_dictionary(type_):
        size = _dictionary_size(array)
    elif pa.types.is_string_view(type_) or pa.types.is_binary_view(type_):
        size = int(array.cast(pa.large_binary()).nbytes)
    else:
        size = int(array.nbytes)
    return max(size, _VALUE_BYTES * len(array))


def _dictionary_size(array: Any) -> int:
    places = _PLACE_BYTES * len(array)
    values = array.dictionary
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        lengths = pc.binary_length(values)
        return places + (pc.sum(lengths.cast(pa.int64()).take(array.indices)).as_py() or 0)
    return places + len(array) * (int(values.nbytes) // max(1, len(values)))


def _entries(array: Any) -> Any:
    start, stop = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
    return pa.StructArray.from_arrays(
        [array.keys.slice(start, stop - start), array.items.slice(start, stop - start)],
        names=["key", "value"],
    )
