"""Commit finished rows as parts, and read what parts say of themselves.

A part is a Parquet file of outcomes sorted by row; its footer says which rows it holds, so that
progress is read from footers alone. The presence of the file is the commit. Nothing here knows
which rows there should be, nor how they came to be finished.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, files_in, is_gone, prune, remove
from jobrunner.data.results.outcomes import outcome_table
from jobrunner.data.results.samples import FinishedRow
from jobrunner.errors import InfrastructureError

FOOTER_KEY = b"cbjob"

# how often, and for how many seconds, a list of parts that others change is read again
RELIST_S = 0.05
RELIST_LIMIT_S = 60.0

# log-probabilities waiting for a part, each with its likeliest tokens: some 200 MB
MOST_LOGPROBS = 1_000_000


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

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.errors.items())
        errors = f"{self.error_rows:,} errors" + (f" ({kinds})" if kinds else "")
        return f"{self.rows:,} rows, {self.rows - self.error_rows:,} ok, {errors}"

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

    def __init__(self, run: RunDirectory, part_rows: int, extras: Collection[str] = ()) -> None:
        self._run = run
        self._part_rows = part_rows
        self._extras = tuple(extras)
        self._finished: dict[str, list[FinishedRow]] = defaultdict(list)
        self._logprobs = 0

    def add(self, row: FinishedRow) -> None:
        """Take a finished row."""
        self._finished[row.id.shard].append(row)
        self._logprobs += sum(
            len(token.top) + 1 for answer in row.answers for token in answer.completion.logprobs
        )

    @property
    def full(self) -> bool:
        """Enough rows wait for a part."""
        if self._logprobs >= MOST_LOGPROBS:
            return True
        return any(len(rows) >= self._part_rows for rows in self._finished.values())

    @property
    def shards(self) -> list[str]:
        """The shards of which rows wait for a part."""
        return list(self._finished)

    def commit(self, after_each: Callable[[], None] = lambda: None) -> dict[str, Intervals]:
        """Write every waiting row to a part and return the rows by shard: they are final now."""
        committed = {}
        for shard in list(self._finished):
            rows = sorted(self._finished[shard], key=lambda row: row.id.index)
            write_part(self._run, shard, [outcome_table(rows, self._extras)])
            committed[shard] = Intervals.of(row.id.index for row in rows)
            del self._finished[shard]
            after_each()
        self._logprobs = 0
        return committed


def write_part(
    run: RunDirectory, shard: str, tables: Iterable[pa.Table], replaces: tuple[str, ...] = ()
) -> None:
    """Commit tables of outcomes, sorted by row, as one part. There must be at least one."""
    rows, tally = Intervals(), Tally()
    # a clock may say the same twice: no part takes the place of another
    name = f"{time.time_ns():020d}-{run.worker}-{secrets.token_hex(4)}.parquet"
    tables = iter(tables)
    first = next(tables)
    with (
        run.writing(run.parts(shard) / name) as temporary,
        pq.ParquetWriter(temporary, first.schema, compression="zstd") as writer,
    ):
        for table in chain([first], tables):
            writer.write_table(table)
            rows.update(_ranges(table["row"].to_numpy()))
            tally += tally_of(table)
        said = {"rows": list(rows), "tally": asdict(tally), "replaces": replaces}
        writer.add_key_value_metadata({FOOTER_KEY: json.dumps(said)})


def list_parts(run: RunDirectory, shard: str) -> list[Path]:
    """The parts of a shard by name, the earlier ones of a worker first."""
    return [path for path in files_in(run.parts(shard)) if path.suffix == ".parquet"]


def read_parts(run: RunDirectory, shard: str) -> dict[Path, PartFooter]:
    """Read the footers of a shard's parts by name.

    Parts may be merged by another worker at this moment; a name that vanishes means that
    the list is old, and it is read again.
    """
    deadline_s = time.monotonic() + RELIST_LIMIT_S
    while True:
        try:
            return {path: read_part_footer(path) for path in list_parts(run, shard)}
        except OSError as error:
            if not is_gone(error) or time.monotonic() > deadline_s:
                raise
            time.sleep(RELIST_S)


def read_part_footer(path: Path) -> PartFooter:
    """Read what a part says of itself."""
    said = read_said(path)
    with reading_own(path):
        rows = Intervals((start, stop) for start, stop in said["rows"])
        if not len(rows):
            raise ValueError("it holds no rows")
        return PartFooter(rows, Tally(**said["tally"]), tuple(said["replaces"]))


def read_said(path: Path) -> Any:
    """Read what a Parquet file of the run says of itself in its footer."""
    with reading_own(path):
        metadata = pq.read_metadata(path).metadata or {}
        return json.loads(metadata[FOOTER_KEY])


@contextmanager
def reading_own(path: Path) -> Iterator[None]:
    """Say of a file of the run directory that cannot be read which it is, and what to do."""
    try:
        yield
    except (pa.ArrowNotImplementedError, KeyError, ValueError, TypeError, OSError) as error:
        # Arrow reports a broken page as an OSError without a number
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InfrastructureError(
            f"`{path}` is damaged: {error}",
            hint="remove this file and run again: only its rows are run again",
        ) from error


def live_parts(run: RunDirectory, shard: str) -> dict[Path, PartFooter]:
    """Read the footers of a shard's parts by name, without parts that another one replaces."""
    parts = read_parts(run, shard)
    replaced = {name for footer in parts.values() for name in footer.replaces}
    return {path: footer for path, footer in parts.items() if path.name not in replaced}


def remove_replaced(run: RunDirectory, shard: str) -> None:
    """Remove parts that another part replaces: a kill came between its commit and this."""
    parts = read_parts(run, shard)
    remove([run.parts(shard) / name for footer in parts.values() for name in footer.replaces])


def discard_leftovers(run: RunDirectory, shard: str) -> None:
    """Remove what was kept of a shard until its result file existed."""
    for folder, top in (
        (run.parts(shard), run.state / "parts"),
        (run.partials(shard), run.state / "partials"),
        (run.cuts(shard), run.state / "cuts"),
    ):
        remove(files_in(folder))
        prune(folder, top)


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
