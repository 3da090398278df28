"""Read Parquet files: columns as they are typed, little of a row group in memory at a time."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.input.files import File
from jobrunner.data.input.formats.content import CARRIED_BATCH_ROWS, Place, Record
from jobrunner.errors import ConfigError, InfrastructureError

# without a read buffer Arrow holds the whole column chunk of a row group in memory
_READ_BUFFER_BYTES = 256 * 1024


def look_at_parquet(file: File) -> ParquetContent:
    """Read the footer of a file. Raises ConfigError where it is none of Parquet's."""
    try:
        with _source_of(file) as source:
            footer = pq.read_metadata(source)
    except pa.ArrowInvalid as error:
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
    return ParquetContent(file, footer.num_rows, groups, schema)


@dataclass(frozen=True, slots=True)
class ParquetContent:
    """A Parquet file; its groups are its row groups."""

    file: File
    rows: int
    groups: Sequence[int]
    schema: pa.Schema
    format: str = "parquet"

    def identity(self) -> dict[str, int | str]:
        """Size and hash of the raw footer, which says where every column chunk lies."""
        with self.file.open() as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - 8)
            footer_bytes = int.from_bytes(file.read(4), "little")
            file.seek(size - 8 - footer_bytes)
            footer = file.read(footer_bytes)
        return {"size": size, "footer": hashlib.blake2b(footer, digest_size=16).hexdigest()}

    def open(self, columns: Sequence[str], row: int, batch_rows: int) -> Place:
        return _ParquetPlace(self, columns, row, batch_rows)

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with _source_of(self.file) as source, self.open_file(source) as file:
            batches = file.iter_batches(
                batch_size=CARRIED_BATCH_ROWS, columns=schema.names, use_threads=False
            )
            yield from batches

    def open_file(self, source: Any) -> Any:
        file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES)
        rows = file.metadata.num_rows
        if rows != self.rows:
            file.close()
            raise InfrastructureError(
                f"`{self.file}` has {rows:,} rows now, {self.rows:,} when the job began",
                hint="an input must not change while a job runs: restore it, then run again",
            )
        return file


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
        self._source = content.file.parquet_source()
        self._file = content.open_file(self._source)
        group = self._group_of(row)
        self.row = starts[group]
        self._decoded: Any = None
        self._decoded_start = self.row
        self._batches = self._file.iter_batches(
            batch_size=batch_rows,
            row_groups=list(range(group, len(content.groups))),
            columns=self._columns,
            use_threads=False,
        )

    def leads_to(self, row: int) -> bool:
        if row < self.row:
            return False
        return row == self.row or self._group_of(row) == self._group_of(self.row)

    def forward_to(self, row: int) -> None:
        while self.row < row:
            self._next_rows(row)

    def next_records(self, stop: int) -> Sequence[Record]:
        return records_of(self._next_rows(stop), self._columns)

    def close(self) -> None:
        self._file.close()
        _let_go(self._source)

    def _next_rows(self, stop: int) -> Any:
        """Decode on; return the rows from here, at most to `stop`."""
        if self._decoded is None or self.row >= self._decoded_start + self._decoded.num_rows:
            self._decoded_start = self.row
            self._decoded = next(self._batches, None)
            if self._decoded is None:
                raise pa.ArrowInvalid(f"it ends after row {self.row:,}")
        rows = self._decoded.slice(self.row - self._decoded_start, stop - self.row)
        self.row += rows.num_rows
        return rows

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


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


@contextmanager
def _source_of(file: File) -> Iterator[Any]:
    source = file.parquet_source()
    try:
        yield source
    finally:
        _let_go(source)


def _let_go(source: Any) -> None:
    """Close what `parquet_source` opened; pyarrow closes what it opened itself."""
    if not isinstance(source, os.PathLike):
        source.close()
