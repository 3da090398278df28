"""Tell what is done and what is partial. Reads footers, never remembers what a file can say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import LOGPROBS_TYPE, RunDirectory, files_in, is_gone, remove
from jobrunner.data.results.parts import (
    Tally,
    discard_leftovers,
    live_parts,
    reading_own,
    remove_replaced,
)
from jobrunner.data.results.pending import drop_pending, is_merged, read_pending
from jobrunner.data.results.result_files import read_result_tally
from jobrunner.records import Partial, RowId, SampleId, Span, TokenLogprob

PARTIAL_NAME = re.compile(r"\d{12}-.*\.parquet")
PARTIAL_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("tokens", pa.list_(pa.int64()), nullable=False),
        pa.field("logprobs", LOGPROBS_TYPE),
    ]
)


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """What is known of one shard: its finished rows and their sums.

    `merged` says that its result file exists and none of its rows runs again. Two workers may
    have finished one row twice: `tally` of an unmerged shard counts it twice, `done` once.
    """

    rows: int
    done: Intervals
    tally: Tally
    merged: bool

    @property
    def all_done(self) -> bool:
        return len(self.done) == self.rows


class Progress:
    """What is done in one run directory."""

    def __init__(self, run: RunDirectory, shard_rows: Mapping[str, int]) -> None:
        """`shard_rows`: the rows of each shard of the input, in order. Reads every shard."""
        self._run = run
        self._rows = dict(shard_rows)
        self._shards = {shard: self._read(shard) for shard in self._rows}

    def __getitem__(self, shard: str) -> ShardProgress:
        return self._shards[shard]

    def refresh(self, shard: str) -> ShardProgress:
        """Read a shard again: other workers may have finished rows of it."""
        self._shards[shard] = self._read(shard)
        return self._shards[shard]

    def mark_done(self, committed: Mapping[str, Intervals]) -> None:
        """Take note of rows that this worker has just committed."""
        for shard, rows in committed.items():
            self._shards[shard].done.update(rows)

    def is_done(self, span: Span) -> bool:
        """Tell whether every row of a span is finished."""
        done = self._shards[span.shard].done
        return done.count(span.start, span.stop) == span.stop - span.start

    @property
    def shards(self) -> list[str]:
        """The shards of the input, in order."""
        return list(self._rows)

    @property
    def unmerged(self) -> list[str]:
        """The shards that have no result file yet, or one that will be replaced, in order."""
        return [shard for shard, progress in self._shards.items() if not progress.merged]

    @property
    def shards_merged(self) -> int:
        return sum(progress.merged for progress in self._shards.values())

    @property
    def complete(self) -> bool:
        return self.shards_merged == len(self._shards)

    @property
    def rows(self) -> int:
        return sum(self._rows.values())

    @property
    def rows_done(self) -> int:
        return sum(len(progress.done) for progress in self._shards.values())

    @property
    def tally(self) -> Tally:
        return sum((progress.tally for progress in self._shards.values()), Tally())

    def _read(self, shard: str) -> ShardProgress:
        rows = self._rows[shard]
        while True:
            if is_merged(self._run, shard):
                tally = read_result_tally(self._run, shard)
                return ShardProgress(rows, Intervals([(0, rows)]), tally, merged=True)
            pending = read_pending(self._run, shard)
            parts = live_parts(self._run, shard)
            # a shard merged between the two looks has a result and perhaps no parts
            if not is_merged(self._run, shard):
                break
        done = pending.rows.complement(rows) if pending is not None else Intervals()
        tally = pending.kept if pending is not None else Tally()
        for footer in parts.values():
            done.update(footer.rows)
            tally += footer.tally
        return ShardProgress(rows, done, tally, merged=False)


def clean_up(
    run: RunDirectory,
    shards: Iterable[str],
    abandoned: Callable[[list[Path]], list[Path]],
    *,
    keep_status: bool = False,
) -> None:
    """Remove what a kill left behind between a commit and the removal that follows it.

    `abandoned` picks from files that are named after workers those that are nobody's any more.
    What such a worker last said of itself goes too, unless `keep_status`.
    """
    for shard in shards:
        if not run.result(shard).exists():
            drop_pending(run, shard)
        if is_merged(run, shard):
            discard_leftovers(run, shard)
        else:
            remove_replaced(run, shard)
    # what workers that are gone were writing, and their word that they wait for work
    for folder in (run.temporary, run.idle):
        remove(abandoned(files_in(folder)))
    if not keep_status:
        remove(abandoned(files_in(run.status)))


def save_partials(run: RunDirectory, span: Span, partials: list[Partial]) -> None:
    """Save the tokens of a span's rows in flight, in place of what this worker saved before."""
    target = run.partial(span)
    if not partials:
        remove([target])
        return
    table = pa.Table.from_pylist([_saved(partial) for partial in partials], schema=PARTIAL_SCHEMA)
    with run.writing(target, folders=False) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def load_partials(run: RunDirectory, span: Span) -> dict[SampleId, Partial]:
    """Read the tokens of a span's rows in flight, as any worker saved them.

    Where two workers had the same sample, the longer text is kept: both draw the same tokens.
    """
    found: dict[SampleId, Partial] = {}
    for path in _partial_files(run, span):
        try:
            # opened once: its worker may put another in its place at any moment
            with reading_own(path), pq.ParquetFile(path) as file:
                entries = file.read().cast(PARTIAL_SCHEMA).to_pylist()
        except OSError as error:
            if is_gone(error):
                # its worker finished the span, or another one saved it anew
                continue
            raise
        for entry in entries:
            saved = _loaded(span.shard, entry)
            sample = SampleId(saved.id, saved.sample)
            if sample not in found or len(saved.tokens) > len(found[sample].tokens):
                found[sample] = saved
    return found


def _saved(partial: Partial) -> dict[str, object]:
    logprobs = [
        {
            "token_id": token.token,
            "logprob": token.logprob,
            "top": [{"token_id": one, "logprob": logprob} for one, logprob in token.top],
        }
        for token in partial.logprobs
    ]
    return {
        "row": partial.id.index,
        "sample": partial.sample,
        "attempt": partial.attempt,
        "tokens": partial.tokens,
        "logprobs": logprobs or None,
    }


def _loaded(shard: str, entry: dict[str, Any]) -> Partial:
    logprobs = tuple(
        TokenLogprob(
            token["token_id"],
            token["logprob"],
            tuple((one["token_id"], one["logprob"]) for one in token["top"]),
        )
        for token in entry["logprobs"] or ()
    )
    row = RowId(shard, entry["row"])
    return Partial(row, entry["tokens"], entry["attempt"], entry["sample"], logprobs)


def partial_starts(run: RunDirectory, shard: str) -> set[int]:
    """The first rows of the spans of a shard that have saved tokens, read from file names."""
    return {int(path.name.partition("-")[0]) for path in _all_partials(run, shard)}


def discard_partials(run: RunDirectory, span: Span, *, keep_mine: bool = False) -> None:
    """Remove a span's partials; with `keep_mine` those of earlier workers, which mine contain."""
    mine = run.partial(span)
    remove([path for path in _partial_files(run, span) if not (keep_mine and path == mine)])


def _partial_files(run: RunDirectory, span: Span) -> list[Path]:
    start = f"{span.start:012d}"
    return [p for p in _all_partials(run, span.shard) if p.name.partition("-")[0] == start]


def _all_partials(run: RunDirectory, shard: str) -> list[Path]:
    return [path for path in files_in(run.partials(shard)) if PARTIAL_NAME.fullmatch(path.name)]
