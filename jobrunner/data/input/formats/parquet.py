"""Read Parquet files: columns as they are typed, little of a row group in memory at a time."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.input.files import File
from jobrunner.data.input.formats.bounds import (
    READ_BUFFER_BYTES,
    STEP_BYTES,
    Decoding,
    decoding_of,
    first_rows,
    in_types,
    leaves_of,
    too_large,
)
from jobrunner.data.input.formats.content import CARRIED_BATCH_ROWS, Place, Record
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import RowError

# after the footer come its length and a mark, plain or of an encrypted one
_MARK_BYTES = 8
_MARKS = (b"PAR1", b"PARE")
# row groups of fewer rows are decoded together
_TOGETHER_ROWS = 512
_MOST_ROWS = 2**32


def look_at_parquet(file: File) -> ParquetContent:
    """Read the footer of a file. Raises ConfigError where it is none of Parquet's."""
    end = _end_of(file)
    try:
        footer = pq.read_metadata(pa.BufferReader(end.as_file()))
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`{file}` is not a Parquet file: {error}",
            hint="take it out of the input, copy it again if it is cut short, or name its "
            "`input.format`",
        ) from error
    try:
        schema = footer.schema.to_arrow_schema()
    except (UnicodeDecodeError, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"the columns of `{file}` cannot be read: {error}", hint="copy or write the file again"
        ) from error
    groups = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    _check_rows(file, footer.num_rows, groups)
    return ParquetContent(file, end.identity(), footer.num_rows, groups, schema)


def _check_rows(file: File, rows: int, groups: Sequence[int]) -> None:
    """Nobody goes through rows without end that a few bytes claim."""
    if rows > _MOST_ROWS:
        raise ConfigError(
            f"`{file}` says that it has {rows:,} rows, the limit is {_MOST_ROWS:,}",
            hint="write it again as several files, or take it out of the input",
        )
    if rows != sum(groups) or min(groups, default=0) < 0:
        raise ConfigError(
            f"`{file}` says that it has {rows:,} rows, its row groups have {sum(groups):,}",
            hint="copy or write the file again",
        )


@dataclass(frozen=True, slots=True)
class ParquetContent:
    """A Parquet file; its groups are its row groups."""

    file: File
    looked_at: dict[str, int | str]
    rows: int
    groups: Sequence[int]
    schema: pa.Schema
    format: str = "parquet"

    def identity(self) -> dict[str, int | str]:
        """Size and hash of the raw footer, which says where every column chunk lies."""
        return _end_of(self.file).identity()

    def open(self, columns: Sequence[str], row: int, batch_rows: int) -> Place:
        return _ParquetPlace(self, columns, row, batch_rows)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with closing(_Groups(self, schema.names, CARRIED_BATCH_ROWS)) as groups:
            for batch in groups.batches(0):
                if batch.schema.types == schema.types:
                    yield batch
                else:
                    yield from in_types(self.file, batch, schema)


class _End(NamedTuple):
    """The size of a file, its footer, and the length and the mark behind that."""

    size: int
    footer: bytes
    mark: bytes

    def identity(self) -> dict[str, int | str]:
        return {
            "size": self.size,
            "footer": hashlib.blake2b(self.footer, digest_size=16).hexdigest(),
        }

    def as_file(self) -> bytes:
        """A file of nothing but this end: what is looked at is what is identified."""
        return self.mark[-4:] + self.footer + self.mark


def _end_of(file: File) -> _End:
    with file.open() as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _MARK_BYTES))
        mark = opened.read(_MARK_BYTES)
        start = size - _MARK_BYTES - int.from_bytes(mark[:4], "little")
        if start < 0 or mark[4:] not in _MARKS:
            # no Parquet file
            return _End(size, b"", mark)
        opened.seek(start)
        return _End(size, opened.read(size - _MARK_BYTES - start), mark)


class _Groups:
    """The open file, and the way to decode each of its row groups within bounds."""

    def __init__(self, content: ParquetContent, columns: Sequence[str], batch_rows: int) -> None:
        self._name = content.file
        self._columns = list(columns)
        self._batch_rows = batch_rows
        self._source = content.file.parquet_source()
        # what an object store's file has cached serves both
        on_disk = isinstance(self._source, os.PathLike)
        self._headers = content.file.open() if on_disk else self._source
        self._file = self._open()
        self._rows = content.groups
        self._leaves = leaves_of(self._file.metadata, columns)
        rows = self._file.metadata.num_rows
        if rows != content.rows:
            self.close()
            raise InfrastructureError(
                f"`{content.file}` has {rows:,} rows now, {content.rows:,} when the job began",
                hint="an input must not change while a job runs: restore it, then run again",
            )

    def batches(self, group: int) -> Iterator[pa.RecordBatch]:
        """Decode from the first row of a group to the end of the file."""
        while group < self._file.metadata.num_row_groups:
            groups, way = self._together(group)
            group = groups[-1] + 1
            file = self._open(way.as_dictionary) if way.as_dictionary else self._file
            yield from file.iter_batches(
                batch_size=way.rows, row_groups=groups, columns=self._columns, use_threads=False
            )

    def _together(self, group: int) -> tuple[Sequence[int], Decoding]:
        """Small groups from here that are decoded in one way."""
        footer, rows = self._file.metadata, 0
        groups: list[int] = []
        way = Decoding(self._batch_rows)
        while group < footer.num_row_groups and rows < _TOGETHER_ROWS:
            self._check_chunks(group)
            its = decoding_of(
                self._name, self._headers, footer, group, self._leaves, self._batch_rows
            )
            joined = way.joined(its)
            if groups and joined.lists_bytes > STEP_BYTES:
                break
            way = joined
            groups.append(group)
            rows += self._rows[group]
            group += 1
        return groups, way

    def _check_chunks(self, group: int) -> None:
        """Let Arrow say what is wrong with the metadata of column chunks, of which no row is read.

        Where it is damaged, looking at it through pyarrow's metadata ends the process.
        """
        leaves = [leaf.place for leaf in self._leaves]
        if not leaves:
            # then Arrow divides by the number of rows asked for, which ends the process, too
            return
        for _ in self._file.reader.iter_batches(0, [group], leaves, use_threads=False):
            raise pa.ArrowInvalid("rows came of which none was asked for")

    def close(self) -> None:
        self._file.close()
        self._headers.close()

    def _open(self, as_dictionary: Collection[str] = ()) -> Any:
        return pq.ParquetFile(
            self._source,
            pre_buffer=False,
            buffer_size=READ_BUFFER_BYTES,
            read_dictionary=list(as_dictionary),
        )


class _ParquetPlace:
    """The next row of a Parquet file and the decoded rows that it is in."""

    def __init__(
        self, content: ParquetContent, columns: Sequence[str], row: int, batch_rows: int
    ) -> None:
        starts = [0]
        for rows in content.groups:
            starts.append(starts[-1] + rows)
        self._starts = starts
        self._columns = list(columns)
        self._groups = _Groups(content, columns, batch_rows)
        group = self._group_of(row)
        self.row = starts[group]
        self._decoded: Any = None
        self._decoded_start = self.row
        self._batches = self._groups.batches(group)

    def leads_to(self, row: int) -> bool:
        if row < self.row:
            return False
        return row == self.row or self._group_of(row) == self._group_of(self.row)

    def forward_to(self, row: int) -> None:
        while self.row < row:
            self.row += self._rows_to(row).num_rows

    def next_records(self, stop: int) -> Sequence[Record]:
        records = first_records(self._rows_to(stop), self._columns)
        self.row += len(records)
        return records

    def close(self) -> None:
        self._groups.close()

    def _rows_to(self, stop: int) -> Any:
        """The decoded rows from here, at least one, at most to `stop`."""
        if self._decoded is None or self.row >= self._decoded_start + self._decoded.num_rows:
            self._decoded_start = self.row
            # two batches are not in memory at once
            self._decoded = None
            self._decoded = next(self._batches, None)
            if self._decoded is None:
                raise pa.ArrowInvalid(f"it ends after row {self.row:,}")
        return self._decoded.slice(self.row - self._decoded_start, stop - self.row)

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


def first_records(rows: Any, columns: Sequence[str]) -> Sequence[Record]:
    """Turn the first of some rows into records: at least one, and not too many at once.

    One with a value that is too large is an error.
    """
    rows = first_rows(rows, columns)
    if rows.num_rows == 1 and (why := too_large(rows, columns)):
        return [RowError("bad_text", why)]
    return records_of(rows, columns)


def records_of(rows: Any, columns: Sequence[str]) -> list[Record]:
    """Turn a batch or table of Arrow's into records of Python values.

    A text that is not UTF-8 comes as the offending `bytes`, a value that Python cannot hold as
    its Arrow scalar.
    """
    values = [_values(rows.column(name)) for name in columns]
    return [dict(zip(columns, of_row, strict=True)) for of_row in zip(*values, strict=True)] or [
        {} for _ in range(rows.num_rows)
    ]


def _values(column: Any) -> list[object]:
    try:
        values: list[object] = column.to_pylist()
    except (ValueError, OverflowError):
        return [_value(scalar) for scalar in column]
    return values


def _value(scalar: Any) -> object:
    try:
        value: object = scalar.as_py()
    except UnicodeDecodeError as error:
        return error.object
    except (ValueError, OverflowError):
        return scalar
    return value
