"""`cbjob status`: how far a job is, who works on it, and how to read what is done.

Reads the run directory alone: it takes no claim, writes nothing, and needs neither the input nor
the model.
"""

from __future__ import annotations

import json as json_module
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from jobrunner.commands.reading import committed_rows_sql
from jobrunner.config import Settings
from jobrunner.console.printable import printable
from jobrunner.data.claims import Identity
from jobrunner.data.fingerprint import read_fingerprint
from jobrunner.data.layout import RunDirectory
from jobrunner.data.progress import Progress, load_partials, partial_starts
from jobrunner.data.results.parts import Tally
from jobrunner.data.results.result_files import result_suffix
from jobrunner.data.workers import Worker, find_workers
from jobrunner.errors import ExitCode, InfrastructureError
from jobrunner.jobfile import load_settings
from jobrunner.records import RowId, Span

WATCH_S = 2.0
_SHARD_KEY = "input shard `"

State = Literal["not begun", "running", "stopped", "finished"]


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is.

    `tally` sums over the finished rows; a row that two workers have finished at once counts twice
    in it until its shard is merged, in `rows_done` once. `partial_rows` are rows with
    `partial_tokens` saved of an answer that is not finished. `eta_s` and `output_tokens_per_s`
    are what the workers that are alive say together, None where they say nothing.
    """

    state: State
    directory: Path
    rows: int = 0
    rows_done: int = 0
    shards: int = 0
    shards_done: int = 0
    tally: Tally = field(default_factory=Tally)
    partial_rows: int = 0
    partial_tokens: int = 0
    workers: tuple[Worker, ...] = ()
    output_tokens_per_s: float | None = None
    eta_s: float | None = None
    sql: str | None = None


def status_command(
    job: Path, *, limit: int | None, overrides: Sequence[str], json: bool, watch: bool
) -> int:
    """Print how far the job is, again and again with `watch`; the exit code is 0."""
    settings = load_settings(job, overrides, limit)
    try:
        while True:
            status = look(settings)
            _print(status, json=json, clear=watch and not json)
            if not watch or status.state == "finished":
                break
            time.sleep(WATCH_S)
    except KeyboardInterrupt:
        # the way to leave a watch
        pass
    return ExitCode.OK


def _print(status: JobStatus, *, json: bool, clear: bool) -> None:
    if clear and sys.stdout.isatty():
        click.clear()
    click.echo(json_module.dumps(as_json(status)) if json else "\n".join(text_lines(status)))


def look(settings: Settings) -> JobStatus:
    """Read the state of a run directory. Raises InfrastructureError where a file is damaged."""
    run = RunDirectory(settings.run_directory, "status", result_suffix(settings))
    recorded = read_fingerprint(run)
    if recorded is None:
        return JobStatus("not begun", run.root)
    progress = Progress(run, _shard_rows(run, recorded))
    here = Identity.of_this_process("status")
    workers = tuple(find_workers(run, here))
    saved = list(_partials(run, progress))
    return JobStatus(
        state=_state(progress, workers),
        directory=run.root,
        rows=progress.rows,
        rows_done=progress.rows_done,
        shards=len(progress.unmerged) + progress.shards_merged,
        shards_done=progress.shards_merged,
        tally=progress.tally,
        partial_rows=len({row for row, _ in saved}),
        partial_tokens=sum(tokens for _, tokens in saved),
        workers=workers,
        output_tokens_per_s=_sum([w.numbers["output_tokens_per_s"] for w in _speaking(workers)]),
        eta_s=_eta_s(_speaking(workers)),
        sql=committed_rows_sql(run, progress.unmerged),
    )


def _shard_rows(run: RunDirectory, recorded: dict[str, Any]) -> dict[str, int]:
    """The rows of each shard, as the run noted them when it began."""
    shards = {key: value for key, value in recorded.items() if key.startswith(_SHARD_KEY)}
    try:
        if not shards:
            raise ValueError("a job has shards")
        return {key[len(_SHARD_KEY) : -1]: int(value["rows"]) for key, value in shards.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise InfrastructureError(
            f"`{run.job_file}` is damaged: it does not say the rows of every shard",
            hint="restore it or use another output.path",
        ) from error


def _state(progress: Progress, workers: Sequence[Worker]) -> State:
    if progress.complete:
        return "finished"
    return "running" if any(worker.liveness == "alive" for worker in workers) else "stopped"


def _partials(run: RunDirectory, progress: Progress) -> Iterator[tuple[RowId, int]]:
    """The rows with saved tokens that are not finished, and how many tokens, by sample."""
    for shard in progress.unmerged:
        done = progress[shard].done
        for start in sorted(partial_starts(run, shard)):
            for partial in load_partials(run, Span(shard, start, start + 1)).values():
                if partial.id.index not in done:
                    yield partial.id, len(partial.tokens)


def _speaking(workers: Sequence[Worker]) -> list[Worker]:
    return [worker for worker in workers if worker.liveness == "alive" and worker.fresh]


def _sum(numbers: Sequence[float]) -> float | None:
    return sum(numbers) if numbers else None


def _eta_s(workers: Sequence[Worker]) -> float | None:
    """Each says how long it would take by itself; together they add up their speeds."""
    alone_s = [worker.numbers["eta_s"] for worker in workers]
    speeds = [1 / eta_s for eta_s in alone_s if eta_s]
    return 1 / sum(speeds) if speeds else None


def as_json(status: JobStatus) -> dict[str, Any]:
    """The status as one JSON object."""
    fields = asdict(status)
    fields["directory"] = str(status.directory)
    fields["tally"]["error_rows"] = status.tally.error_rows
    return fields


def text_lines(status: JobStatus) -> list[str]:
    """The status for a person."""
    lines = [f"{status.state}: {status.directory}"]
    if status.state == "not begun":
        return [*lines, "  nothing is there yet: cbjob run begins the job"]
    tally = status.tally
    lines += [
        f"  rows     {status.rows_done:,} of {status.rows:,} done ({_percent(status)}),"
        f" shards {status.shards_done:,} of {status.shards:,}",
        f"  errors   {_errors(tally)}",
        f"  tokens   {tally.prompt_tokens:,} prompt, {tally.output_tokens:,} output",
    ]
    if status.state != "finished":
        lines.append(
            f"  begun    {status.partial_rows:,} more rows have"
            f" {status.partial_tokens:,} tokens saved"
        )
    if status.output_tokens_per_s is not None:
        lines.append(
            f"  speed    {status.output_tokens_per_s:,.0f} output tokens/s,"
            f" ETA {_duration(status.eta_s)}"
        )
    lines += [f"  worker   {_worker(worker)}" for worker in status.workers]
    if status.state == "stopped":
        lines.append("  go on    cbjob run goes on from here")
    if status.sql is not None:
        lines.append(f"  read     {shell_line(status.sql)}")
    return [printable(line) for line in lines]


def shell_line(sql: str) -> str:
    """A line for a shell that runs the query."""
    return f"duckdb -c {shlex.quote(sql)}"


def _percent(status: JobStatus) -> str:
    # rounded down: 100% is said only when nothing is left
    thousandths = 1000 * status.rows_done // status.rows if status.rows else 1000
    return f"{thousandths / 10:.1f}%"


def _errors(tally: Tally) -> str:
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in tally.errors.items())
    return f"{tally.error_rows:,}" + (f" ({kinds})" if kinds else "")


def _worker(worker: Worker) -> str:
    parts = [f"{worker.liveness}: process {worker.pid} of {worker.host}"]
    if worker.device:
        parts.append(f"on {worker.device}")
    if worker.silent_s is None:
        parts.append("has said nothing yet")
    else:
        parts.append(f"last word {_duration(worker.silent_s)} ago")
        parts += [
            f"{words} {worker.numbers[name]:,.0f}"
            for name, words in (
                ("output_tokens_per_s", "output tokens/s"),
                ("rows_this_run", "rows"),
                ("running", "running"),
                ("waiting", "waiting"),
            )
            if worker.fresh and worker.numbers.get(name) is not None
        ]
        if times := worker.numbers.get("out_of_memory"):
            parts.append(
                f"out of memory {times:,} times: now at most"
                f" {worker.numbers['token_budget']:,} tokens"
                f" and {worker.numbers['max_batch_size']:,} rows a step"
            )
    return ", ".join(parts)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest_s:02}s" if minutes else f"{rest_s}s"
