"""`cbjob verify`: check that the results hold every input row once, in order, unchanged.

Trusts nothing that the run wrote of itself: it reads the input and the results, a batch at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_args

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.config import Settings, load_settings
from jobrunner.data.fingerprint import ABSENT, read_fingerprint, show
from jobrunner.data.inputs import Input, open_input
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import OUTCOME_SCHEMA, RunDirectory, result_name
from jobrunner.data.merge import Reblock
from jobrunner.data.results import Tally, read_parts, read_result_tally, tally_of
from jobrunner.data.shards import Shard
from jobrunner.data.sources import read_columns
from jobrunner.errors import ConfigError, ExitCode, InfrastructureError
from jobrunner.records import ErrorKind, FinishReason

BATCH_ROWS = 1024


def verify_command(job: Path, *, limit: int | None, overrides: Sequence[str]) -> int:
    """Print what is wrong with a job's results, or that nothing is; return the exit code."""
    settings = load_settings(job, overrides, limit)
    run = RunDirectory(settings.run_directory, worker="verify")
    problems = list(find_problems(settings, run))
    for problem in problems:
        click.echo(f"problem: {problem}")
    if problems:
        unfinished = all("not finished" in problem for problem in problems)
        click.echo(f"{run.root} {'is not finished' if unfinished else 'does not verify'}")
        return ExitCode.UNEXPECTED
    shards = open_input(settings).shards
    tallies = (read_result_tally(run.result(shard)) for shard in shards)
    click.echo(f"{run.root} verifies: {sum(tallies, Tally())}; shards: {len(shards):,}")
    return ExitCode.OK


def find_problems(settings: Settings, run: RunDirectory) -> Iterator[str]:
    """Yield everything that keeps the results from being what they promise, in words."""
    recorded = read_fingerprint(run)
    if recorded is None:
        raise ConfigError(f"`{run.root}` is not a run directory", hint="run the job first")
    job_input = open_input(settings)
    yield from _input_problems(job_input, recorded)
    unfinished = False
    for shard in job_input.shards.values():
        if run.result(shard.name).exists():
            yield from _result_problems(run.result(shard.name), shard, job_input.kept_schema)
        else:
            unfinished = True
            yield from _part_problems(run, shard)
    yield from _strays(run, job_input, unfinished)


def _input_problems(job_input: Input, recorded: dict[str, object]) -> Iterator[str]:
    now = json.loads(json.dumps(job_input.fingerprint()))
    then = {key: value for key, value in recorded.items() if key.startswith("input shard ")}
    for key in sorted({*now, *then}):
        if now.get(key) != then.get(key):
            begun = show(then.get(key, ABSENT))
            yield f"{key}: {begun} when the run began, {show(now.get(key, ABSENT))} now"


def _result_problems(path: Path, shard: Shard, kept_schema: pa.Schema) -> Iterator[str]:
    """Compare one result file with its shard: schema, row numbers, statuses, kept columns."""
    try:
        with pq.ParquetFile(path, pre_buffer=False) as result:
            expected = pa.schema([*kept_schema, *OUTCOME_SCHEMA])
            if not result.schema_arrow.equals(expected):
                yield f"{path}: schema is {_words(result.schema_arrow)}, not {_words(expected)}"
                return
            yield from _content_problems(path, result, shard, kept_schema)
    except (pa.ArrowException, OSError) as error:
        yield f"{path}: cannot be read: {error}"


def _content_problems(
    path: Path, result: pq.ParquetFile, shard: Shard, kept_schema: pa.Schema
) -> Iterator[str]:
    kept = Reblock(read_columns(shard, kept_schema.names)) if len(kept_schema) else None
    seen, tally = 0, Tally()
    for batch in result.iter_batches(BATCH_ROWS, use_threads=False):
        indices = batch.column("row").to_numpy()
        if seen + len(batch) > shard.rows or not np.array_equal(
            indices, np.arange(seen, seen + len(batch))
        ):
            yield f"{path}: rows are not 0 to {shard.rows - 1} in order (near row {seen:,})"
            return
        yield from _status_problems(path, batch)
        if kept is not None:
            rows = kept.take(len(batch)).combine_chunks()
            for name in kept_schema.names:
                if not _same(rows[name].combine_chunks(), batch.column(name)):
                    yield f"{path}: column `{name}` differs from the input's near row {seen:,}"
                    return
        tally += tally_of(pa.Table.from_batches([batch]))
        seen += len(batch)
    try:
        if seen == shard.rows and tally != read_result_tally(path):
            yield f"{path}: the sums in its footer differ from its rows"
    except InfrastructureError as error:
        yield str(error)
    if seen != shard.rows:
        yield f"{path}: has {seen:,} rows, its shard {shard.rows:,}"


def _same(one: pa.Array, other: pa.Array) -> bool:
    """Compare values: NaN equals NaN, and dictionaries may list their words differently."""
    if one.equals(other):
        return True
    try:
        return repr(one.to_pylist()) == repr(other.to_pylist())
    except UnicodeDecodeError:
        return False


def _status_problems(path: Path, batch: pa.RecordBatch) -> Iterator[str]:
    """An ok row has a text and a reason to end, an error row a kind and a message."""
    for outcome in batch.select(OUTCOME_SCHEMA.names).to_pylist():
        said = {key for key in ("text", "finish_reason", "error_kind", "error") if outcome[key]}
        if outcome["text"] is not None:
            said.add("text")
        right = {
            "ok": said == {"text", "finish_reason"}
            and outcome["finish_reason"] in get_args(FinishReason),
            "error": said == {"error_kind", "error"}
            and outcome["error_kind"] in get_args(ErrorKind),
        }
        tokens = min(outcome["prompt_tokens"], outcome["output_tokens"])
        if not right.get(outcome["status"]) or tokens < 0:
            yield f"{path}: row {outcome['row']} is neither answered nor explained"


def _part_problems(run: RunDirectory, shard: Shard) -> Iterator[str]:
    """Say what is missing of an unfinished shard, and what two of its parts both hold."""
    try:
        parts = read_parts(run, shard.name)
    except InfrastructureError as error:
        yield str(error)
        return
    replaced = {name for footer in parts.values() for name in footer.replaces}
    ranges = sorted(
        range_
        for path, footer in parts.items()
        if path.name not in replaced
        for range_ in footer.rows
    )
    for one, other in pairwise(ranges):
        if other[0] < one[1]:
            yield f"shard {shard.name}: row {other[0]:,} is in two parts"
    done = len(Intervals(ranges))
    yield f"shard {shard.name}: not finished: {done:,} of {shard.rows:,} rows are done"


def _strays(run: RunDirectory, job_input: Input, unfinished: bool) -> Iterator[str]:
    known = {result_name(shard) for shard in job_input.shards}
    for path in sorted(run.results.rglob("*")):
        if path.is_file() and path.relative_to(run.results).as_posix() not in known:
            yield f"stray file {path}: no shard of the input has this name"
    if not unfinished:
        for path in sorted(run.state.rglob("*")):
            # the devices of workers that are just leaving
            leaving = path.is_relative_to(run.claims / "devices")
            if path.is_file() and path != run.job_file and not leaving:
                yield f"stray file {path}: the job is finished"


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
