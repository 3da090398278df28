"""Where files lie in a run directory, and how one comes to be there whole or not at all.

    results/<shard>.parquet      finished shards, for readers; .jsonl, .jsonl.gz, .jsonl.zst
    log.txt metrics.jsonl        for people and dashboards
    .cbjob/job.json              what the run was begun with
    .cbjob/finished.json         the settings that it was finished with
    .cbjob/parts/<shard>/        finished rows of unfinished shards
    .cbjob/partials/<shard>/     tokens of rows in flight
    .cbjob/retries/<shard>/      which rows of a finished shard run again
    .cbjob/tallies/<shard>/      what a result file says of itself that has no footer to say it in
    .cbjob/claims/               who works on what
    .cbjob/cuts/<shard>/         where spans were cut to share them
    .cbjob/idle/                 which workers have nothing to do
    .cbjob/flights/              which rows are in the engine of each worker
    .cbjob/deaths/               which rows were in the engine of each worker that died
    .cbjob/status/               what each worker last said of itself
    .cbjob/input/                rows of a streamed dataset
    .cbjob/tmp/                  files being written

Knows nothing of what the files mean.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from jobrunner.records import Span

# How a row ended: the columns of a part, and of a result file after those kept from the input.
# Of a row with several samples `output_tokens` is their sum; `text`, `finish_reason`, `token_ids`,
# `logprobs` and `chunks` are those of the first sample. A row is an error if one of its samples is:
# its answer, `token_ids`, `logprobs` and `samples` are null then.
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

# a log-probability of minus infinity is null, as JSON has no word for it
LOGPROBS_TYPE = pa.list_(
    pa.struct(
        {
            "token_id": pa.int64(),
            "logprob": pa.float64(),
            "top": pa.list_(pa.struct({"token_id": pa.int64(), "logprob": pa.float64()})),
        }
    )
)
# columns that only some jobs have, in this order after those of OUTCOME_SCHEMA
EXTRA_FIELDS = {
    "truncated_tokens": pa.field("truncated_tokens", pa.int64(), nullable=False),
    "prompt_text": pa.field("prompt_text", pa.string()),
    "token_ids": pa.field("token_ids", pa.list_(pa.int64())),
    "logprobs": pa.field("logprobs", LOGPROBS_TYPE),
    "chunks": pa.field("chunks", pa.int64(), nullable=False),
    "samples": pa.field(
        "samples",
        pa.list_(
            pa.struct(
                {
                    "text": pa.string(),
                    "finish_reason": pa.string(),
                    "output_tokens": pa.int64(),
                    "token_ids": pa.list_(pa.int64()),
                    "logprobs": LOGPROBS_TYPE,
                }
            )
        ),
    ),
}
# what a shard's name may end in that its result file's does not
_INPUT_SUFFIX = re.compile(
    r"(?<=[^/])\.(parquet|pq|jsonl|ndjson|json|csv|tsv|arrow)(\.(gz|zst|bz2|xz))?$"
)
# as often in a row nobody prunes a folder that somebody else is making
MOST_TRIES = 1000
# no column carried over from the input may have one of these names
TAKEN_NAMES = (*OUTCOME_SCHEMA.names, *EXTRA_FIELDS)


def outcome_schema(extras: Collection[str] = ()) -> pa.Schema:
    """The columns of a job's outcomes; `extras` are names of `EXTRA_FIELDS`."""
    return pa.schema(
        [*OUTCOME_SCHEMA, *(field for name, field in EXTRA_FIELDS.items() if name in extras)]
    )


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run directory, for one worker: `worker` names its temporary files.

    `suffix` is what the names of result files end in.
    """

    root: Path
    worker: str
    suffix: str = ".parquet"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def state(self) -> Path:
        return self.root / ".cbjob"

    @property
    def job_file(self) -> Path:
        return self.state / "job.json"

    @property
    def finished_file(self) -> Path:
        return self.state / "finished.json"

    @property
    def claims(self) -> Path:
        return self.state / "claims"

    @property
    def status(self) -> Path:
        return self.state / "status"

    @property
    def temporary(self) -> Path:
        return self.state / "tmp"

    def result(self, shard: str) -> Path:
        return self.results / result_name(shard, self.suffix)

    def tally(self, shard: str) -> Path:
        return self.state / "tallies" / shard / "tally.json"

    def retries(self, shard: str) -> Path:
        return self.state / "retries" / shard / "rows.json"

    def parts(self, shard: str) -> Path:
        return self.state / "parts" / shard

    def cuts(self, shard: str) -> Path:
        return self.state / "cuts" / shard

    @property
    def flights(self) -> Path:
        return self.state / "flights"

    @property
    def deaths(self) -> Path:
        return self.state / "deaths"

    @property
    def idle(self) -> Path:
        return self.state / "idle"

    def partials(self, shard: str) -> Path:
        return self.state / "partials" / shard

    def partial(self, span: Span) -> Path:
        return self.partials(span.shard) / f"{span.start:012d}-{self.worker}.parquet"

    def create(self) -> None:
        """Make the folders that everything else needs."""
        for folder in (self.results, self.claims, self.temporary):
            make_folder(folder)
            sync_up(folder, self.root)

    @contextmanager
    def writing(self, target: Path, *, folders: bool = True) -> Iterator[Path]:
        """Give a temporary path that becomes `target` when the block ends well.

        The content is on the disk before the name is, and the name before the block returns, with
        `folders` also those of the folders above it; what need not outlive every loss of power is
        written faster without. After a failure or a kill there is no `target`, or the old one.
        """
        temporary = self.temporary / f"{self.worker}.{secrets.token_hex(4)}"
        try:
            yield temporary
            sync(temporary)
            _move(temporary, target, self.root if folders else target.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _move(temporary: Path, target: Path, top: Path) -> None:
    """Give a file its name, for good; another worker may prune the folder it goes to."""
    while True:
        make_folder(target.parent)
        try:
            os.replace(temporary, target)
        except FileNotFoundError:
            if not temporary.exists():
                raise
            continue
        try:
            sync_up(target.parent, top)
        except FileNotFoundError:
            # the shard is merged: what was just written is not needed any more
            pass
        return


def result_name(shard: str, suffix: str = ".parquet") -> str:
    """Name the result file of a shard, relative to the folder of results."""
    return _INPUT_SUFFIX.sub("", shard) + suffix


def make_folder(folder: Path) -> None:
    """Create a folder and its parents so that they survive a loss of power."""
    tries = 0
    while not folder.is_dir():
        make_folder(folder.parent)
        tries += 1
        try:
            folder.mkdir(exist_ok=True)
            sync(folder.parent)
        except FileNotFoundError:
            # another thread or worker pruned the empty parent: make it again;
            # there are also places where nobody can make one, as in /proc
            if tries == MOST_TRIES:
                raise


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # which file it is the error itself does not say
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sync_up(folder: Path, top: Path) -> None:
    """Wait until the names in `folder`, and its own up to `top`, are on the disk.

    That a folder is there does not say so: who made it may have died, or not come to it yet.
    """
    sync(folder)
    while folder != top:
        folder = folder.parent
        sync(folder)


def files_in(folder: Path) -> list[Path]:
    """The files of a folder by name; none where another worker has just removed the folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_file())
    except FileNotFoundError:
        return []


def is_gone(error: OSError) -> bool:
    """Tell whether a file was removed by another worker, on this host or, on NFS, on another."""
    return error.errno in (errno.ENOENT, errno.ESTALE)


def remove(paths: list[Path]) -> None:
    """Remove files; one that another worker removed first is as good as removed."""
    for path in paths:
        path.unlink(missing_ok=True)


def prune(folder: Path, top: Path) -> None:
    """Remove `folder` and its parents below `top` as far as they are empty."""
    while folder != top:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            # not empty: a part came in meanwhile
            return
        folder = folder.parent
