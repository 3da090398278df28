"""Commit finished rows as parts, and merge the parts of a shard into its result file.

A part is a Parquet file of outcomes sorted by row; its footer says which rows it holds, so that
progress is read from footers alone. The presence of the file is the commit. Nothing here knows
which rows there should be, nor how they came to be finished.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, prune, remove
from jobrunner.errors import InfrastructureError
from jobrunner.records import Completion

OUTCOME_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("error_kind", pa.string()),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
    ]
)
FOOTER_KEY = b"cbjob"

# rows merged at a time; also the row group of a result file
WINDOW_ROWS = 2048
# a shard with more parts than this gets its smallest ones merged into one
MOST_PARTS = 64


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over finished rows."""

    rows: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    finish_reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def error_rows(self) -> int:
        return sum(self.errors.values())

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            rows=self.rows + other.rows,
            errors=_add_counts(self.errors, other.errors),
            finish_reasons=_add_counts(self.finish_reasons, other.finish_reasons),
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class PartFooter:
    """What a part says of itself: its rows, their sums, and the parts it was merged from."""

    rows: Intervals
    tally: Tally
    replaces: tuple[str, ...] = ()


class Results:
    """Finished rows of one worker on their way to the disk."""

    def __init__(self, run: RunDirectory, part_rows: int) -> None:
        self._run = run
        self._part_rows = part_rows
        self._finished: dict[str, list[tuple[Completion, str | None]]] = defaultdict(list)

    def add(self, completion: Completion, text: str | None) -> None:
        """Take a finished row; `text` is None for an error row."""
        self._finished[completion.id.shard].append((completion, text))

    @property
    def full(self) -> bool:
        """Enough rows wait for a part."""
        return any(len(rows) >= self._part_rows for rows in self._finished.values())

    def commit(self) -> dict[str, Intervals]:
        """Write every waiting row to a part and return the rows by shard: they are final now."""
        committed = {}
        for shard in list(self._finished):
            rows = sorted(self._finished[shard], key=lambda finished: finished[0].id.index)
            table = outcome_table(rows)
            write_part(self._run, shard, [table])
            committed[shard] = Intervals.of(completion.id.index for completion, _ in rows)
            del self._finished[shard]
            compact(self._run, shard)
        return committed


def outcome_table(rows: Iterable[tuple[Completion, str | None]]) -> pa.Table:
    """Make the table of outcomes, one row each, in the given order."""
    return pa.Table.from_pylist(
        [_outcome(completion, text) for completion, text in rows], schema=OUTCOME_SCHEMA
    )


def _outcome(completion: Completion, text: str | None) -> dict[str, object]:
    error = completion.error
    return {
        "row": completion.id.index,
        "status": "error" if error else "ok",
        "text": text,
        "finish_reason": completion.finish_reason,
        "error_kind": error.kind if error else None,
        "error": error.message if error else None,
        "prompt_tokens": completion.prompt_tokens,
        "output_tokens": len(completion.tokens),
    }


def write_part(
    run: RunDirectory, shard: str, tables: Iterable[pa.Table], replaces: tuple[str, ...] = ()
) -> None:
    """Commit tables of outcomes, sorted by row, as one part."""
    rows, tally = Intervals(), Tally()
    name = f"{time.time_ns():020d}-{run.worker}.parquet"
    with (
        run.writing(run.parts(shard) / name) as temporary,
        pq.ParquetWriter(temporary, OUTCOME_SCHEMA, compression="zstd") as writer,
    ):
        for table in tables:
            writer.write_table(table)
            rows.update(_ranges(table["row"].to_numpy()))
            tally += tally_of(table)
        said = {"rows": list(rows), "tally": asdict(tally), "replaces": replaces}
        writer.add_key_value_metadata({FOOTER_KEY: json.dumps(said)})


def list_parts(run: RunDirectory, shard: str) -> list[Path]:
    """The parts of a shard by name, which is the order in which they were committed."""
    try:
        return sorted(
            p for p in run.parts(shard).iterdir() if p.suffix == ".parquet" and p.is_file()
        )
    except FileNotFoundError:
        return []


def read_parts(run: RunDirectory, shard: str) -> dict[Path, PartFooter]:
    """Read the footers of a shard's parts, in order of commit.

    Parts may be merged by another worker at this moment; a name that vanishes means that
    the list is old, and it is read again.
    """
    while True:
        try:
            return {path: read_part_footer(path) for path in list_parts(run, shard)}
        except FileNotFoundError:
            continue


def read_part_footer(path: Path) -> PartFooter:
    """Read what a part says of itself."""
    said = _read_footer(path)
    return PartFooter(
        rows=Intervals((start, stop) for start, stop in said["rows"]),
        tally=Tally(**said["tally"]),
        replaces=tuple(said["replaces"]),
    )


def read_result_tally(path: Path) -> Tally:
    """Read the sums of a finished shard from its result file's footer."""
    return Tally(**_read_footer(path)["tally"])


def _read_footer(path: Path) -> Any:
    try:
        metadata = pq.read_metadata(path).metadata or {}
        return json.loads(metadata[FOOTER_KEY])
    except (pa.ArrowInvalid, KeyError, ValueError) as error:
        raise InfrastructureError(
            f"`{path}` is damaged: {error}",
            hint="remove this file and run again: only its rows are run again",
        ) from error


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
    except FileNotFoundError:
        # another worker merges the same parts: one of us is enough
        return
    remove(smallest)


def remove_replaced(run: RunDirectory, shard: str, parts: dict[Path, PartFooter]) -> None:
    """Remove parts that a merged part replaces: a kill came between its commit and this."""
    remove([run.parts(shard) / name for footer in parts.values() for name in footer.replaces])


def merge_shard(
    run: RunDirectory,
    shard: str,
    rows: int,
    kept: Callable[[], Iterator[pa.RecordBatch]],
    kept_schema: pa.Schema,
    compression: str = "zstd",
) -> Tally:
    """Merge a shard's parts with its kept input columns into the result file; drop the parts.

    `kept` streams the input's columns in row order, `rows` is their number. Memory is bounded
    by a window of rows. Two workers may do this at once: both write the same file.
    """
    target = run.result(shard)
    try:
        tally = _write_result(run, shard, rows, kept, kept_schema, compression)
    except (FileNotFoundError, InfrastructureError):
        # the parts went while they were read: the other worker was faster
        if not target.exists():
            raise
        return read_result_tally(target)
    discard_leftovers(run, shard)
    return tally


def _write_result(
    run: RunDirectory,
    shard: str,
    rows: int,
    kept: Callable[[], Iterator[pa.RecordBatch]],
    kept_schema: pa.Schema,
    compression: str,
) -> Tally:
    schema = pa.schema([*kept_schema, *OUTCOME_SCHEMA])
    tally = Tally()
    columns = Reblock(kept()) if len(kept_schema) else None
    with (
        run.writing(run.result(shard)) as temporary,
        pq.ParquetWriter(temporary, schema, compression=compression) as writer,
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


def discard_leftovers(run: RunDirectory, shard: str) -> None:
    """Remove the parts and partials of a shard whose result file exists."""
    for folder, top in (
        (run.parts(shard), run.state / "parts"),
        (run.partials(shard), run.state / "partials"),
    ):
        if folder.is_dir():
            remove([path for path in folder.iterdir() if path.is_file()])
            prune(folder, top)


def merge_windows(parts: list[Path]) -> Iterator[pa.Table]:
    """Stream the rows of several parts in order, each row once, a window at a time.

    A row that two parts hold comes from the first of them by name. A part is open only from
    the window of its first row to that of its last.
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
        return pa.Table.from_batches([next(self._batches)], OUTCOME_SCHEMA)

    def _advance(self, rest: pa.Table) -> None:
        if len(rest):
            self._pending = rest
            self.next_row = rest["row"][0].as_py()
            return
        self._pending = None
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


def tally_of(table: pa.Table) -> Tally:
    """Sum up a table of outcomes."""
    return Tally(
        rows=len(table),
        errors=_count(table["error_kind"]),
        finish_reasons=_count(table["finish_reason"]),
        prompt_tokens=pc.sum(table["prompt_tokens"]).as_py() or 0,
        output_tokens=pc.sum(table["output_tokens"]).as_py() or 0,
    )


def _count(column: pa.ChunkedArray) -> dict[str, int]:
    counted = pc.value_counts(column.drop_null())
    return {entry["values"].as_py(): entry["counts"].as_py() for entry in counted}


def _add_counts(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in sorted({*one, *other})}


def _ranges(indices: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Turn ascending indices into half-open ranges."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(indices, breaks)]


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
