"""Make the error rows of a run directory run again. Knows nothing of who runs them.

An unfinished shard gets a part of its good rows in place of each part with errors; of a finished
one it is put on record which rows run again. A kill in between leaves some shards done and others
not: the job goes on with those, and asking again does the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from jobrunner.data.claims import Claims
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import OUTCOME_SCHEMA, RunDirectory, remove
from jobrunner.data.results.merge import merge_windows, part_cursors
from jobrunner.data.results.parts import Tally, live_parts, tally_of, write_part
from jobrunner.data.results.pending import Pending, is_merged, write_pending
from jobrunner.data.results.result_files import read_outcomes, read_result_tally
from jobrunner.errors import DeviceBusyError


def mark_retries(run: RunDirectory, shards: Iterable[str], claims: Claims) -> int:
    """Make every row that is an error run again; return their number.

    Call it after `clean_up`, before progress is read. Rows that run again already go on doing so,
    and are counted only where they failed again. Raises DeviceBusyError where another worker is
    at work: it would not know.
    """
    _refuse_company(claims)
    return sum(
        _mark_finished(run, shard) if is_merged(run, shard) else _mark_unfinished(run, shard)
        for shard in shards
    )


def _refuse_company(claims: Claims) -> None:
    others = claims.others()
    if others:
        raise DeviceBusyError(
            f"another worker of this job (process {others[0].pid} of {others[0].host}) is at work:"
            " error rows cannot be run again now",
            hint="let it finish, or stop it, then run the same command again",
        )


def _mark_finished(run: RunDirectory, shard: str) -> int:
    """Put the error rows of a finished shard on record."""
    if not read_result_tally(run, shard).error_rows:
        return 0
    rows, kept = Intervals(), Tally()
    for table in read_outcomes(run, shard, OUTCOME_SCHEMA):
        is_error = pc.equal(table["status"], "error")
        rows.update(Intervals.of(table.filter(is_error)["row"].to_pylist()))
        kept += tally_of(table.filter(pc.invert(is_error)))
    write_pending(run, shard, Pending(rows, kept))
    return len(rows)


def _mark_unfinished(run: RunDirectory, shard: str) -> int:
    """Replace the parts that have errors by one of their good rows, if there are any."""
    parts = live_parts(run, shard)
    wrong = [path for path, footer in parts.items() if footer.tally.error_rows]
    good = _good_rows(merge_windows(part_cursors(wrong)))
    first = next(good, None)
    if first is not None:
        write_part(run, shard, chain([first], good), tuple(path.name for path in wrong))
    remove(wrong)
    return sum(parts[path].tally.error_rows for path in wrong)


def _good_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    for table in tables:
        good = table.filter(pc.equal(table["status"], "ok"))
        if len(good):
            yield good
