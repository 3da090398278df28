"""Stream rows and columns of shards. Knows nothing of formats, prompts or tokens."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

import pyarrow as pa

from jobrunner.data.input.files import reading
from jobrunner.data.input.formats.content import Place, Record
from jobrunner.data.input.shards import Shard
from jobrunner.data.input.utf8 import with_valid_text
from jobrunner.errors import InfrastructureError
from jobrunner.records import Row, RowError, RowId, Span

_BATCH_ROWS = 64


def read_columns(shard: Shard, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Stream some columns of a shard in row order, in the types that `check_columns` gave.

    Text that is not UTF-8 has U+FFFD where it is not. Raises InfrastructureError where the file
    cannot be read or lost rows.
    """
    left = shard.rows
    in_file = pa.schema([field for field in schema if field.name not in shard.partition])
    with reading(shard.file):
        for batch in shard.content.batches(in_file):
            if left <= 0:
                return
            batch = with_valid_text(batch.slice(0, left))
            left -= batch.num_rows
            yield _complete(batch, shard.partition, schema) if len(schema) else batch
    if left > 0:
        raise InfrastructureError(f"`{shard.file}` ended {left:,} rows early")


class Reader:
    """Streams the rows of spans, a small batch at a time: the column of prompts and others.

    It keeps its place in the file: a span that follows the last one, even in the middle of a
    huge row group, continues there, and nothing is decoded twice. Not for several threads.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        column: str | None,
        others: Sequence[str] = (),
        batch_rows: int = _BATCH_ROWS,
    ) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._column = column
        self._others = tuple(others)
        self._columns = tuple(dict.fromkeys([*([column] if column else ()), *others]))
        self._batch_rows = batch_rows
        self._shard = ""
        self._place: Place | None = None

    def read(self, span: Span, skip: Container[int] = ()) -> Iterator[list[Row]]:
        """Stream the rows of a span, without those whose index is in `skip`.

        Batches are never empty and hold at most `batch_rows` rows. A record that cannot be read
        is a row with an error, a text that is not UTF-8 comes as the offending `bytes`, a value
        that Python cannot hold as its Arrow scalar. Raises InfrastructureError where the file
        cannot be read or changed its row count.
        """
        shard = self._shards[span.shard]
        with reading(shard.file):
            place = self._place_for(shard, span.start)
            while place.row < span.stop:
                first = place.row
                records = place.next_records(span.stop)
                rows = [
                    self._row(RowId(span.shard, first + offset), record, shard.partition)
                    for offset, record in enumerate(records)
                    if first + offset not in skip
                ]
                if rows:
                    yield rows

    def close(self) -> None:
        """Close the open file, if any."""
        if self._place is not None:
            self._place.close()
            self._place = None

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _place_for(self, shard: Shard, row: int) -> Place:
        place = self._place
        if place is None or shard.name != self._shard or not place.leads_to(row):
            self.close()
            in_file = [name for name in self._columns if name not in shard.partition]
            place = self._place = shard.content.open(in_file, row, self._batch_rows)
            self._shard = shard.name
        place.forward_to(row)
        return place

    def _row(self, row: RowId, record: Record, partition: Mapping[str, str | int | None]) -> Row:
        if isinstance(record, RowError):
            return Row(row, None, error=RowError(record.kind, f"{row}: {record.message}"))
        columns = {**record, **partition}
        value = None if self._column is None else columns[self._column]
        return Row(row, value, {name: columns[name] for name in self._others})


def _complete(
    batch: pa.RecordBatch, partition: Mapping[str, str | int | None], schema: pa.Schema
) -> pa.RecordBatch:
    """Add the columns that the names of folders give."""
    arrays = [
        pa.array([partition[field.name]] * batch.num_rows, field.type)
        if field.name in partition
        else batch.column(field.name)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
