"""Bound what one step of reading takes: how a row group is decoded, which rows become values.

A few bytes of Parquet can stand for any number of them, by compression and by dictionaries.
"""

from __future__ import annotations

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

# Arrow holds a page whole: 1 MiB mostly, a few writers make them of 100 MB and more
PAGE_BYTES = 512 * 2**20
# a page or lists of a row group that take more, and so many times their bytes in the file, are no
# data: texts unpack to 3 to 30 times as much
LISTS_BYTES = 2**30
MOST_TIMES = 100
# rows that are decoded together take no more, except for a single one
STEP_BYTES = 128 * 2**20
# rows that become Python's values together
_RECORDS_BYTES = 4 * 2**20
# of a value's place in a dictionary, and of a number
_PLACE_BYTES = 4
_NUMBER_BYTES = 8


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

    `length` is that of a value of fixed length in bytes.
    """

    path: str
    place: int
    in_lists: bool
    length: int


def leaves_of(footer: Any, columns: Sequence[str]) -> list[Leaf]:
    """The leaves of some columns of a file."""
    leaves = []
    for place in range(footer.num_columns):
        leaf = footer.schema.column(place)
        if any(leaf.path == name or leaf.path.startswith(f"{name}.") for name in columns):
            in_lists = leaf.max_repetition_level > 0
            leaves.append(Leaf(leaf.path, place, in_lists, max(_NUMBER_BYTES, leaf.length)))
    return leaves


def decoding_of(
    name: object, file: Any, footer: Any, group: int, leaves: Sequence[Leaf], batch_rows: int
) -> Decoding:
    """Choose how to decode some leaves of a row group, from the page headers in `file`.

    Raises ConfigError where no way is within bounds.
    """
    found = footer.row_group(group)
    largest, lists_bytes, as_dictionary = 1, 0, []
    for leaf in leaves:
        chunk = found.column(leaf.place)
        size = chunk_size(file, chunk)
        where = f"column `{leaf.path}` of row group {group:,} of `{name}`"
        _check_page(where, size)
        of_texts = chunk.physical_type == "BYTE_ARRAY"
        shared = delta_bytes(file, chunk, footer.schema.column(leaf.place)) if size.deltas else 0
        if leaf.in_lists:
            repeated = _repeated_bytes(file, chunk, size) if of_texts else 0
            if repeated > LISTS_BYTES:
                as_dictionary.append(leaf.path)
                repeated = size.dictionary
            decoded = size.plain + size.values * (_PLACE_BYTES if of_texts else leaf.length)
            decoded += shared
            _check_lists(where, size, decoded)
            lists_bytes += decoded + repeated
        elif of_texts or leaf.length > _NUMBER_BYTES:
            # no value is longer than the page that it is in
            largest += size.largest
    rows = max(1, min(batch_rows, STEP_BYTES // largest))
    return Decoding(rows, frozenset(as_dictionary), lists_bytes)


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


def _check_page(where: str, size: ChunkSize) -> None:
    if size.largest > max(PAGE_BYTES, MOST_TIMES * size.largest_compressed):
        raise ConfigError(
            f"{where} has a page of {size.largest_compressed:,} bytes that unpacks to"
            f" {size.largest:,}, the limit is {MOST_TIMES} times as many or {PAGE_BYTES:,}",
            hint="write the file again with smaller pages, or take it out of the input",
        )


def _repeated_bytes(file: Any, chunk: Any, size: ChunkSize) -> int:
    """What the texts of a dictionary may take: each may be in a list any number of times."""
    at_most = size.in_dictionary * size.dictionary
    if at_most <= STEP_BYTES:
        return at_most
    return size.in_dictionary * longest_in_dictionary(file, chunk, size)


def _check_lists(where: str, size: ChunkSize, decoded: int) -> None:
    """All values may belong to one row."""
    if decoded > max(LISTS_BYTES, MOST_TIMES * size.compressed):
        raise ConfigError(
            f"{where} has {size.compressed:,} bytes that unpack to {decoded:,}, the limit is"
            f" {MOST_TIMES} times as many or {LISTS_BYTES:,}",
            hint="write the file again with smaller row groups, or take it out of the input",
        )


def _size(rows: Any, columns: Sequence[str]) -> int:
    return sum(_array_size(rows.column(name)) for name in columns)


def _array_size(array: Any) -> int:
    """The bytes of an array's values, each as often as it is there."""
    if isinstance(array, pa.ChunkedArray):
        return sum(map(_array_size, array.chunks))
    type_ = array.type
    if pa.types.is_dictionary(type_):
        return _dictionary_size(array)
    if pa.types.is_struct(type_):
        return sum(map(_array_size, array.flatten()))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_map(type_):
        inner = array.flatten() if not pa.types.is_map(type_) else _entries(array)
        return _PLACE_BYTES * len(array) + _array_size(inner)
    if pa.types.is_string_view(type_) or pa.types.is_binary_view(type_):
        return _array_size(array.cast(pa.large_binary()))
    return int(array.nbytes)


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
