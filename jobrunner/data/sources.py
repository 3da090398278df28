"""Stream rows and columns of Parquet shards. Knows nothing of prompts or tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.shards import Shard, carried_schema, reading
from jobrunner.errors import InfrastructureError
from jobrunner.records import Row, RowId, Span

_BATCH_ROWS = 64
_CARRIED_BATCH_ROWS = 256
# without a read buffer Arrow holds the whole column chunk of a row group in memory
_READ_BUFFER_BYTES = 256 * 1024


def read_columns(shard: Shard, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Stream some columns of a shard in row order, types unchanged, as `check_columns` says.

    Raises InfrastructureError where the file cannot be read or lost rows.
    """
    left = shard.rows
    with reading(shard.path), _open(shard) as file:
        schema = carried_schema(file.schema_arrow, columns)
        batches = file.iter_batches(
            batch_size=_CARRIED_BATCH_ROWS, columns=list(columns), use_threads=False
        )
        for batch in batches:
            if left <= 0:
                return
            batch = batch.slice(0, left)
            left -= batch.num_rows
            if columns:
                arrays = [batch.column(name) for name in columns]
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            yield batch


class Reader:
    """Streams the rows of spans, one column, a small batch at a time.

    It keeps its place in the file: a span that follows the last one, even in the middle of a
    huge row group, continues there, and nothing is decoded twice. Not for several threads.
    """

    def __init__(self, shards: Sequence[Shard], column: str, batch_rows: int = _BATCH_ROWS) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._column = column
        self._batch_rows = batch_rows
        self._place: _Place | None = None

    def read(self, span: Span, skip: Container[int] = ()) -> Iterator[list[Row]]:
        """Stream the rows of a span, without those whose index is in `skip`.

        Batches are never empty and hold at most `batch_rows` rows. A text that is not UTF-8
        comes as the offending `bytes`, a value that Python cannot hold as its Arrow scalar.
        Raises InfrastructureError where the file cannot be read or changed its row count.
        """
        shard = self._shards[span.shard]
        with reading(shard.path):
            place = self._place_for(shard, span.start)
            while place.row < span.stop:
                first, column = place.next_rows(span.stop)
                rows = _rows(span, first, column, skip)
                if rows:
                    yield rows

    def close(self) -> None:
        """Close the open file, if any."""
        if self._place is not None:
            self._place.file.close()
            self._place = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _place_for(self, shard: Shard, row: int) -> _Place:
        place = self._place
        if place is None or not place.leads_to(shard, row):
            self.close()
            place = self._place = _Place(shard, self._column, row, self._batch_rows)
        place.forward_to(row)
        return place


class _Place:
    """Where a reader stands in one file: the next row and the decoded rows that it is in."""

    def __init__(self, shard: Shard, column: str, row: int, batch_rows: int) -> None:
        self.shard = shard
        self.file = _open(shard)
        metadata = self.file.metadata
        starts = [0]
        for group in range(metadata.num_row_groups):
            starts.append(starts[-1] + metadata.row_group(group).num_rows)
        self._starts = starts
        self._column = column
        group = self._group_of(row)
        self.row = starts[group]
        self._decoded: Any = None
        self._decoded_start = self.row
        self._batches = self.file.iter_batches(
            batch_size=batch_rows,
            row_groups=list(range(group, metadata.num_row_groups)),
            columns=[column],
            use_threads=False,
        )

    def leads_to(self, shard: Shard, row: int) -> bool:
        """Whether going on from here is no more work than opening the file at `row`."""
        if shard != self.shard or row < self.row:
            return False
        return row == self.row or self._group_of(row) == self._group_of(self.row)

    def forward_to(self, row: int) -> None:
        while self.row < row:
            self.next_rows(row)

    def next_rows(self, stop: int) -> tuple[int, Any]:
        """Decode on; return the index of the first row and the column, at most to `stop`."""
        if self._decoded is None or self.row >= self._decoded_start + len(self._decoded):
            batch = next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"it ends after row {self.row:,}")
            self._decoded_start = self.row
            self._decoded = batch.column(self._column)
        first = self.row
        column = self._decoded.slice(first - self._decoded_start, stop - first)
        self.row += len(column)
        return first, column

    def _group_of(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


def _rows(span: Span, first: int, column: Any, skip: Container[int]) -> list[Row]:
    wanted = [offset for offset in range(len(column)) if first + offset not in skip]
    if not wanted:
        return []
    values = _values(column)
    return [Row(RowId(span.shard, first + offset), values[offset]) for offset in wanted]


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


def _open(shard: Shard) -> Any:
    with reading(shard.path):
        file = pq.ParquetFile(shard.path, pre_buffer=False, buffer_size=_READ_BUFFER_BYTES)
        rows = file.metadata.num_rows
        if rows != shard.file_rows:
            file.close()
            raise InfrastructureError(
                f"`{shard.path}` has {rows:,} rows now, {shard.file_rows:,} when the job began",
                hint="an input must not change while a job runs: restore it, then run again",
            )
    return file
