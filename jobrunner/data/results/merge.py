"""Merge the parts of a shard: a few into one, or all into the result file, in row order.

Where rows of a finished shard ran again, the others come from its old result file. Memory is
bounded by a window of rows, however large the shard is; a window is also a result file's row group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, is_gone, outcome_schema, remove
from jobrunner.data.results.outcomes import WINDOW_ROWS, window_rows
from jobrunner.data.results.parts import (
    RELIST_LIMIT_S,
    RELIST_S,
    Tally,
    discard_leftovers,
    list_parts,
    live_parts,
    read_part_footer,
    reading_own,
    write_part,
)
from jobrunner.data.results.pending import drop_pending, is_merged, read_pending
from jobrunner.data.results.result_files import (
    RowWriter,
    read_outcomes,
    read_result_tally,
    writing_result,
)
from jobrunner.errors import InfrastructureError

# a shard with more parts than this gets its smallest ones merged into one
MOST_PARTS = 64


def compact(run: RunDirectory, shard: str) -> None:
    """Keep the number of a shard's parts bounded: merge the smallest half into one.

    The merged part names the parts it replaces, so that after a kill anyone may remove them;
    a row found twice meanwhile counts once.
    """
    parts = list_parts(run, shard)
    if len(parts) <= MOST_PARTS:
        return
    try:
        smallest = sorted(sorted(parts, key=lambda p: p.stat().st_size)[: len(parts) // 2])
        window = window_rows(pq.read_schema(smallest[0]).names)
        tables = merge_windows(part_cursors(smallest), window)
        write_part(run, shard, tables, tuple(p.name for p in smallest))
    except OSError as error:
        if is_gone(error):
            # another worker merges the same parts: one of us is enough
            return
        raise
    remove(smallest)


def merge_shard(
    run: RunDirectory,
    shard: str,
    rows: int,
    kept: Callable[[], Iterator[pa.RecordBatch]],
    kept_schema: pa.Schema,
    *,
    extras: Collection[str] = (),
    compression: str = "zstd",
    provenance: Mapping[str, object] | None = None,
    writing: Callable[[], AbstractContextManager[RowWriter]] | None = None,
) -> Tally:
    """Merge a shard's parts with its kept input columns into the result file; drop the parts.

    `kept` streams the input's columns in row order, `rows` is their number. `extras` are the
    job's further outcome columns, `provenance` is said in the result file. `writing`, if given,
    writes it in a format of its own. Two workers may do this at once: both write the same rows.
    Raises InfrastructureError where a row is in no part.
    """
    schema = outcome_schema(extras)
    whole = pa.schema([*kept_schema, *schema])
    if writing is None:
        writing = partial(writing_result, run, shard, whole, compression, provenance or {})
    deadline_s = time.monotonic() + RELIST_LIMIT_S
    while True:
        try:
            columns = _with_kept(shard, rows, _outcomes(run, shard, schema), kept, kept_schema)
            with writing() as writer:
                for table in columns:
                    writer.write(table)
        except (OSError, InfrastructureError) as error:
            if is_merged(run, shard):
                # the parts went while they were read: the other worker was faster
                return read_result_tally(run, shard)
            gone = isinstance(error, OSError) and is_gone(error)
            if not gone or time.monotonic() > deadline_s:
                raise
            # another worker made one part of several: look for it
            time.sleep(RELIST_S)
        else:
            drop_pending(run, shard)
            discard_leftovers(run, shard)
            return writer.tally


def _outcomes(run: RunDirectory, shard: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Stream every outcome of a shard that is committed, in row order, each row once."""
    parts = live_parts(run, shard)
    cursors = [_part_cursor(path, footer.rows) for path, footer in parts.items()]
    pending = read_pending(run, shard)
    if pending is not None:
        others = _other_rows(read_outcomes(run, shard, schema), pending.rows)
        # where it stands is known once it is read; it comes first, as it was committed first
        cursors.insert(0, Cursor(0, others))
    return merge_windows(cursors, window_rows(schema.names))


def _other_rows(tables: Iterable[pa.Table], rows: Intervals) -> Generator[pa.Table]:
    """The rows of a stream without those that run again."""
    for table in tables:
        others = [index not in rows for index in table["row"].to_pylist()]
        if any(others):
            yield table.filter(pa.array(others))


def _with_kept(
    shard: str,
    rows: int,
    outcomes: Iterable[pa.Table],
    kept: Callable[[], Iterator[pa.RecordBatch]],
    kept_schema: pa.Schema,
) -> Iterator[pa.Table]:
    """Put the kept columns before the outcomes of all rows; raise where a row has no outcome."""
    columns = Reblock(kept()) if len(kept_schema) else None
    done = 0
    for table in outcomes:
        _expect_rows(table, done, shard)
        done += len(table)
        if columns is None:
            yield table
            continue
        arrays = [*columns.take(len(table)).columns, *table.columns]
        yield pa.Table.from_arrays(arrays, schema=pa.schema([*kept_schema, *table.schema]))
    if done != rows:
        raise InfrastructureError(f"shard `{shard}` has {done:,} of {rows:,} rows in parts")


def part_cursors(parts: Iterable[Path]) -> list[Cursor]:
    """Put a cursor at the first row of each part."""
    return [_part_cursor(path, read_part_footer(path).rows) for path in parts]


def merge_windows(cursors: list[Cursor], window: int = WINDOW_ROWS) -> Iterator[pa.Table]:
    """Stream the rows of several cursors in order, each row once, a window of rows at a time.

    A row that two of them hold comes from the first; either is right. A part is open only from
    the window of its first row to that of its last.
    """
    with ExitStack() as stack:
        for cursor in cursors:
            stack.callback(cursor.close)
        start = min((cursor.next_row for cursor in cursors), default=0)
        while cursors:
            stop = start + window
            tables = [table for cursor in cursors if (table := cursor.take_below(stop)) is not None]
            if tables:
                yield _each_row_once(pa.concat_tables(tables))
            cursors = [cursor for cursor in cursors if not cursor.exhausted]
            start = max(stop, min((cursor.next_row for cursor in cursors), default=stop))


class Cursor:
    """A place in a stream of outcomes sorted by row, read on demand, closed when exhausted."""

    def __init__(self, first_row: int, tables: Generator[pa.Table]) -> None:
        """No row of `tables` is before `first_row`, and none of them is empty."""
        self.next_row = first_row
        self.exhausted = False
        self._tables = tables
        self._pending: pa.Table | None = None

    def take_below(self, stop: int) -> pa.Table | None:
        """The rows from here up to, not including, row `stop`; None where there are none."""
        taken = []
        while not self.exhausted and self.next_row < stop:
            table = self._pending if self._pending is not None else next(self._tables, None)
            if table is None:
                self.close()
                break
            size = int(np.searchsorted(table["row"].to_numpy(), stop))
            if size:
                taken.append(table.slice(0, size))
            self._advance(table.slice(size))
        return pa.concat_tables(taken) if taken else None

    def close(self) -> None:
        """Close the stream, whatever is left in it."""
        self.exhausted = True
        self._tables.close()

    def _advance(self, rest: pa.Table) -> None:
        self._pending = rest if len(rest) else next(self._tables, None)
        if self._pending is None:
            self.close()
        else:
            self.next_row = self._pending["row"][0].as_py()


def _part_cursor(path: Path, rows: Intervals) -> Cursor:
    return Cursor(next(iter(rows))[0], _part_tables(path))


def _part_tables(path: Path) -> Generator[pa.Table]:
    """Stream a part; it is opened when its first row is asked for."""
    with reading_own(path), pq.ParquetFile(path, pre_buffer=False) as file:
        schema = file.schema_arrow.remove_metadata()
        for batch in file.iter_batches(window_rows(schema.names), use_threads=False):
            yield pa.Table.from_batches([batch.replace_schema_metadata()], schema)


class Reblock:
    """Cuts a stream of record batches into tables of the lengths asked for."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._rest: pa.RecordBatch | None = None

    def take(self, rows: int) -> pa.Table:
        """The next `rows` rows. Raises InfrastructureError where the stream ends before."""
        taken: list[pa.RecordBatch] = []
        while rows:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise InfrastructureError(f"the input ended {rows:,} rows early")
            taken.append(batch.slice(0, rows))
            self._rest = batch.slice(rows) if len(batch) > rows else None
            rows -= len(taken[-1])
        return pa.Table.from_batches(taken)


def _each_row_once(table: pa.Table) -> pa.Table:
    """Sort by row and keep the first of equals."""
    indices = table["row"].to_numpy()
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    return table.take(pa.array(order[first])).combine_chunks()


def _expect_rows(outcomes: pa.Table, start: int, shard: str) -> None:
    indices = outcomes["row"].to_numpy()
    if not np.array_equal(indices, np.arange(start, start + len(indices))):
        raise InfrastructureError(
            f"shard `{shard}`: a row between {start:,} and {int(indices[-1]):,} is in no part"
        )
