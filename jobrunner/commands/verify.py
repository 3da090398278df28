"""`cbjob verify`: check that the results hold every input row once, in order, unchanged.

Trusts nothing that the run wrote of itself: it reads the input and the results, a batch at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.config import Settings
from jobrunner.console.printable import printable
from jobrunner.data.fingerprint import ABSENT, read_fingerprint, same, show
from jobrunner.data.input.inputs import Input, open_input
from jobrunner.data.input.shards import Shard
from jobrunner.data.input.sources import read_columns
from jobrunner.data.intervals import Intervals
from jobrunner.data.layout import RunDirectory, outcome_schema, result_name
from jobrunner.data.openai.checks import answer_problems
from jobrunner.data.openai.reading import ERRORS_SUFFIX, RESPONSES_SUFFIX
from jobrunner.data.results.json_values import json_values
from jobrunner.data.results.merge import Reblock
from jobrunner.data.results.outcome_checks import is_sound
from jobrunner.data.results.outcomes import extras_of, window_rows
from jobrunner.data.results.parts import Tally, live_parts, tally_of
from jobrunner.data.results.pending import is_merged, read_pending
from jobrunner.data.results.result_files import (
    outcomes_of,
    read_json_rows,
    read_result_tally,
    result_suffix,
)
from jobrunner.errors import ConfigError, ExitCode, InfrastructureError
from jobrunner.jobfile import load_settings


def verify_command(job: Path, *, limit: int | None, overrides: Sequence[str]) -> int:
    """Print what is wrong with a job's results, or that nothing is; return the exit code."""
    settings = load_settings(job, overrides, limit)
    suffix = result_suffix(settings)
    run = RunDirectory(settings.run_directory, worker="verify", suffix=suffix)
    problems = list(find_problems(settings, run))
    for problem in problems:
        click.echo(printable(f"problem: {problem}"))
    if problems:
        unfinished = all("not finished" in problem for problem in problems)
        ending = "is not finished" if unfinished else "does not verify"
        click.echo(printable(f"{run.root} {ending}"))
        return ExitCode.UNEXPECTED
    shards = open_input(settings).shards
    tallies = (read_result_tally(run, shard) for shard in shards)
    click.echo(printable(f"{run.root} verifies: {sum(tallies, Tally())}; shards: {len(shards):,}"))
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
        if run.result(shard.name).exists() and run.suffix == RESPONSES_SUFFIX:
            yield from answer_problems(run, shard)
        elif run.result(shard.name).exists():
            result = _Result(run, shard, job_input.kept_schema, extras_of(settings))
            yield from result.problems()
        if not is_merged(run, shard.name):
            unfinished = True
            yield from _part_problems(run, shard)
    yield from _strays(run, job_input, unfinished)


def _input_problems(job_input: Input, recorded: dict[str, object]) -> Iterator[str]:
    now = json.loads(json.dumps(job_input.fingerprint()))
    then = {
        key: value
        for key, value in recorded.items()
        if key in now or key.startswith("input shard ")
    }
    for key in sorted({*now, *then}):
        if not same(now.get(key), then.get(key)):
            begun = show(then.get(key, ABSENT))
            yield f"{key}: {begun} when the run began, {show(now.get(key, ABSENT))} now"


class _Result:
    """One result file, compared with its shard: columns, row numbers, outcomes, kept values."""

    def __init__(
        self, run: RunDirectory, shard: Shard, kept_schema: pa.Schema, extras: Sequence[str]
    ) -> None:
        self._run = run
        self._path = run.result(shard.name)
        self._shard = shard
        self._kept_schema = kept_schema
        self._outcome_schema = outcome_schema(extras)
        self._schema = pa.schema([*kept_schema, *self._outcome_schema])

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with it; it is read once, a window at a time."""
        try:
            if self._run.suffix == ".parquet":
                yield from self._parquet_problems()
            else:
                yield from self._content_problems(self._json_windows(), _same_json)
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            yield f"{self._path}: cannot be read: {error}"

    def _parquet_problems(self) -> Iterator[str]:
        with pq.ParquetFile(self._path, pre_buffer=False) as file:
            if not file.schema_arrow.equals(self._schema):
                found, wanted = _words(file.schema_arrow), _words(self._schema)
                yield f"{self._path}: schema is {found}, not {wanted}"
                return
            batches = file.iter_batches(window_rows(self._schema.names), use_threads=False)
            windows = (
                _Window(
                    pa.Table.from_batches([batch.select(self._outcome_schema.names)]),
                    {name: batch.column(name) for name in self._kept_schema.names},
                )
                for batch in batches
            )
            yield from self._content_problems(windows, _same)

    def _json_windows(self) -> Iterator[_Window]:
        names = self._schema.names
        for rows in read_json_rows(self._path, self._run.suffix, window_rows(names)):
            for row in rows:
                if list(row) != names:
                    raise ValueError(
                        f"a line has the keys {', '.join(row)}, not {', '.join(names)}"
                    )
            kept = {name: [row[name] for row in rows] for name in self._kept_schema.names}
            yield _Window(outcomes_of(rows, self._outcome_schema), kept)

    def _content_problems(
        self, windows: Iterable[_Window], same: Callable[[pa.Array, Any], bool]
    ) -> Iterator[str]:
        path, rows = self._path, self._shard.rows
        names = self._kept_schema.names
        kept = Reblock(read_columns(self._shard, self._kept_schema)) if names else None
        seen, tally = 0, Tally()
        for window in windows:
            outcomes = window.outcomes
            expected = np.arange(seen, seen + len(outcomes))
            if seen + len(outcomes) > rows or not np.array_equal(outcomes["row"], expected):
                yield f"{path}: rows are not 0 to {rows - 1} in order (near row {seen:,})"
                return
            for outcome in outcomes.to_pylist():
                if not is_sound(outcome):
                    yield f"{path}: row {outcome['row']} is neither answered nor explained"
            if kept is not None:
                wanted = kept.take(len(outcomes)).combine_chunks()
                for name in names:
                    if not same(wanted[name].combine_chunks(), window.kept[name]):
                        yield f"{path}: column `{name}` differs from the input's near row {seen:,}"
                        return
            tally += tally_of(outcomes)
            seen += len(outcomes)
        if seen != rows:
            yield f"{path}: has {seen:,} rows, its shard {rows:,}"
        elif is_merged(self._run, self._shard.name):
            yield from self._sum_problems(tally)

    def _sum_problems(self, tally: Tally) -> Iterator[str]:
        try:
            if tally != read_result_tally(self._run, self._shard.name):
                yield f"{self._path}: the sums that the run keeps of it differ from its rows"
        except InfrastructureError as error:
            yield str(error)


@dataclass(frozen=True, slots=True)
class _Window:
    """Some rows of a result file: their outcomes, and their kept columns as the file has them."""

    outcomes: pa.Table
    kept: Mapping[str, Any]


def _same(one: pa.Array, other: pa.Array) -> bool:
    """Compare values: NaN equals NaN, and dictionaries may list their words differently."""
    if one.equals(other):
        return True
    try:
        return repr(one.to_pylist()) == repr(other.to_pylist())
    except UnicodeDecodeError:
        return False


def _same_json(one: pa.Array, other: list[Any]) -> bool:
    """Compare by how JSON spells the values."""
    return json.dumps(json_values(one)) == json.dumps(other)


def _part_problems(run: RunDirectory, shard: Shard) -> Iterator[str]:
    """Say what is missing of an unfinished shard, and what two of its parts both hold."""
    try:
        parts = live_parts(run, shard.name)
        pending = read_pending(run, shard.name)
    except InfrastructureError as error:
        yield str(error)
        return
    ranges = sorted(range_ for footer in parts.values() for range_ in footer.rows)
    for one, other in pairwise(ranges):
        if other[0] < one[1]:
            yield f"shard {shard.name}: row {other[0]:,} is in two parts"
    done = Intervals(ranges)
    if pending is not None:
        done.update(pending.rows.complement(shard.rows))
    yield f"shard {shard.name}: not finished: {len(done):,} of {shard.rows:,} rows are done"


def _strays(run: RunDirectory, job_input: Input, unfinished: bool) -> Iterator[str]:
    known = {result_name(shard, run.suffix) for shard in job_input.shards}
    if run.suffix == RESPONSES_SUFFIX:
        known |= {result_name(shard, ERRORS_SUFFIX) for shard in job_input.shards}
    for path in sorted(run.results.rglob("*")):
        if path.is_file() and path.relative_to(run.results).as_posix() not in known:
            yield f"stray file {path}: no shard of the input has this name"
    if not unfinished:
        # what stays: the record of the job, the spooled input, what workers last said of
        # themselves and of result files, and the devices of workers that are just leaving
        stays = {run.job_file, run.finished_file, *(run.tally(shard) for shard in job_input.shards)}
        folders = (run.status, run.state / "input", run.claims / "devices")
        for path in sorted(run.state.rglob("*")):
            stays_there = path in stays or any(path.is_relative_to(folder) for folder in folders)
            if path.is_file() and not stays_there:
                yield f"stray file {path}: the job is finished"


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
