"""Remember which rows of a finished shard run again, until its new result file is there.

While the record is there the shard is unfinished, and its old result file stays readable.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, is_gone, prune, remove, sync
from jobrunner.data.results.parts import Tally, reading_own


@dataclass(frozen=True, slots=True)
class Pending:
    """The rows of a finished shard that run again, and the sums over all its other rows."""

    rows: Intervals
    kept: Tally


def is_merged(run: RunDirectory, shard: str) -> bool:
    """Tell whether a shard has its result file, and none of its rows runs again."""
    return run.result(shard).exists() and not run.retries(shard).exists()


def read_pending(run: RunDirectory, shard: str) -> Pending | None:
    """Read which rows of a finished shard run again; None where none do, or it isn't finished."""
    path = run.retries(shard)
    try:
        with reading_own(path):
            said = json.loads(path.read_text())
            rows = Intervals((start, stop) for start, stop in said["rows"])
            pending = Pending(rows, Tally(**said["kept"]))
    except OSError as error:
        if is_gone(error):
            return None
        raise
    return pending if run.result(shard).exists() else None


def write_pending(run: RunDirectory, shard: str, pending: Pending) -> None:
    """Make the rows of a finished shard run again."""
    said = {"rows": list(pending.rows), "kept": asdict(pending.kept)}
    with run.writing(run.retries(shard)) as temporary:
        temporary.write_text(json.dumps(said))


def drop_pending(run: RunDirectory, shard: str) -> None:
    """Say that a shard's result file holds every row as it is now.

    This is on the disk before the parts are removed: a loss of power could leave neither.
    """
    path = run.retries(shard)
    if not path.exists():
        return
    remove([path])
    try:
        sync(path.parent)
    except FileNotFoundError:
        # another worker did the same and pruned the folder
        return
    prune(path.parent, run.state / "retries")
