"""Merge the parts of a shard: a few into one, or all into the result file, in row order.

Memory is bounded by a window of rows, however large the shard is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.layout import OUTCOME_SCHEMA, RunDirectory, is_gone, remove
from jobrunner.data.results import (
    FOOTER_KEY,
    RELIST_LIMIT_S,
    RELIST_S,
    Tally,
    discard_leftovers,
    list_parts,
    read_part_footer,
    read_result_tally,
    reading_own,
    tally_of,
    write_part,
)
from jobrunner.errors import InfrastructureError

# rows merged at a time; also the row group of a result file
WINDOW_ROWS = 2048
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
        write_part(run, shard, merge_windows(smallest), tuple(p.name for p in smallest))
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
) -> Tally:
    """Merge a shard's parts with its kept input columns into the result file; drop the parts.

    `kept` streams the input's columns in row order, `rows` is their number. Two workers may do
    this at once: both write the same rows. Raises InfrastructureError where a row is in no part.
    """
    deadline_s = time.monotonic() + RELIST_LIMIT_S
    while True:
        try:
            tally = _write_result(run, shard, rows, kept, kept_schema)
        except (OSError, InfrastructureError) as error:
            if run.result(shard).exists():
                # the parts went while they were read: the other worker was faster
                return read_result_tally(run.result(shard))
            gone = isinstance(error, OSError) and is_gone(error)
            if not gone or time.monotonic() > deadline_s:
                raise
            # another worker made one part of several: look for it
            time.sleep(RELIST_S)
        else:
            discard_leftovers(run, shard)
            return tally


def _write_result(
    run: RunDirectory,
    shard: str,
    rows: int,
    kept: Callable[[], Iterator[pa.RecordBatch]],
    kept_schema: pa.Schema,
) -> Tally:
    schema = pa.schema([*kept_schema, *OUTCOME_SCHEMA])
    tally = Tally()
    columns = Reblock(kept()) if len(kept_schema) else None
    with (
        run.writing(run.result(shard)) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        done = 0
        for outcomes in merge_windows(list_parts(run, shard)):
            _expect_rows(outcomes, done, shard)
            arrays = list(outcomes.columns)
            if columns is not None:
                arrays = [*columns.take(len(outcomes)).columns, *arrays]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            tally += tally_of(outcomes)
            done += len(outcomes)
        if done != rows:
            raise InfrastructureError(f"shard `{shard}` has {done:,} of {rows:,} rows in parts")
        writer.add_key_value_metadata({FOOTER_KEY: json.dumps({"tally": asdict(tally)})})
    return tally


def merge_windows(parts: list[Path]) -> Iterator[pa.Table]:
    """Stream the rows of several parts in order, each row once, a window at a time.

    A row that two parts hold comes from the first of them by name; either is right. A part is
    open only from the window of its first row to that of its last.
    """
    cursors = [Cursor(path) for path in parts]
    with ExitStack() as stack:
        for cursor in cursors:
            stack.callback(cursor.close)
        start = min((cursor.next_row for cursor in cursors), default=0)
        while cursors:
            stop = start + WINDOW_ROWS
            tables = [table for cursor in cursors if (table := cursor.take_below(stop)) is not None]
            if tables:
                yield _each_row_once(pa.concat_tables(tables))
            cursors = [cursor for cursor in cursors if not cursor.exhausted]
            start = max(stop, min((cursor.next_row for cursor in cursors), default=stop))


class Cursor:
    """A place in a part, sorted by row. Opened when first read, closed when exhausted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: pq.ParquetFile | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.Table | None = None
        self.next_row = next(iter(read_part_footer(path).rows))[0]
        self.exhausted = False

    def take_below(self, stop: int) -> pa.Table | None:
        """The rows from here up to, not including, row `stop`; None where there are none."""
        taken = []
        while not self.exhausted and self.next_row < stop:
            table = self._pending if self._pending is not None else self._read()
            size = int(np.searchsorted(table["row"].to_numpy(), stop))
            taken.append(table.slice(0, size))
            self._advance(table.slice(size))
        return pa.concat_tables(taken) if taken else None

    def close(self) -> None:
        """Close the file, whatever is left in it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> pa.Table:
        if self._file is None:
            self._file = pq.ParquetFile(self._path, pre_buffer=False)
            self._batches = self._file.iter_batches(WINDOW_ROWS, use_threads=False)
        with reading_own(self._path):
            return pa.Table.from_batches([next(self._batches)], OUTCOME_SCHEMA)

    def _advance(self, rest: pa.Table) -> None:
        if len(rest):
            self._pending = rest
            self.next_row = rest["row"][0].as_py()
            return
        self._pending = None
        with reading_own(self._path):
            batch = next(self._batches, None)
        if batch is None:
            self.exhausted = True
            self.close()
            return
        self._pending = pa.Table.from_batches([batch], OUTCOME_SCHEMA)
        self.next_row = self._pending["row"][0].as_py()


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
