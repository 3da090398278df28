"""`cbjob check`: everything that can be known of a job before it runs.

What is found goes into a `CheckReport`; how it reads is in `check_view`.
"""

from __future__ import annotations

import json as json_module
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobrunner.commands.check_view import as_json, text_lines
from jobrunner.config import TABLES, InputTable, Settings
from jobrunner.data.census import Census, RowsReport
from jobrunner.data.ids import IdReport, UniqueIds
from jobrunner.data.inputs import Input
from jobrunner.data.openai.requests import OPENAI_COLUMNS
from jobrunner.data.prompts import Prompts
from jobrunner.data.sources import Reader
from jobrunner.errors import ExitCode, JobError
from jobrunner.jobfile import load_settings
from jobrunner.opening import Job, load, open_job
from jobrunner.records import Completion, Request, Row

if TYPE_CHECKING:
    from jobrunner.engine.loading import ModelInfo

# how many rows without an id of their own are named
ID_EXAMPLES = 10

# batches of rows that are read and encoded while one is counted
BATCHES_AHEAD = 4

Show = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the input: in how many shards it has which type."""

    name: str
    shards_by_type: dict[str, int]


@dataclass(frozen=True, slots=True)
class InputReport:
    """The shards of a job; `size_bytes` are those of their files as they are stored."""

    formats: tuple[str, ...]
    shards: int
    rows: int
    size_bytes: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model that can run here, and how much of it fits.

    `kv_tokens` is the room of the KV memory, estimated from what is free unless `proven` says
    that the model was loaded, and computes the same here as by itself.
    """

    folder: Path
    architecture: str
    layers: int
    parameters: int
    weight_bytes: int
    dtype: str
    device: str
    max_model_len: int
    max_batch_size: int
    block_size: int
    kv_bytes_per_token: int
    kv_tokens: int
    proven: bool

    @property
    def longest_sequences(self) -> float:
        """How many sequences of the greatest length fit into the KV memory."""
        return self.kv_tokens / self.max_model_len


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What is known of a job before it runs.

    `changed` are the settings that are not at their default, `effective` all of them as they hold,
    `generation` the parameters of a row that sets none.
    """

    job: str
    changed: dict[str, Any]
    effective: dict[str, Any]
    generation: dict[str, Any]
    input: InputReport
    model: ModelReport
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    ids: IdReport | None = None
    rows: RowsReport | None = None

    @property
    def exit_code(self) -> ExitCode:
        if self.ids is not None and self.ids.count:
            return ExitCode.USAGE
        if self.rows is not None and self.rows.error_rows:
            return ExitCode.ROW_ERRORS
        return ExitCode.OK


def check_command(
    job: Path,
    *,
    limit: int | None,
    overrides: Sequence[str],
    rows: bool,
    load: bool,
    json: bool,
) -> int:
    """Print what is known of a job before it runs; return the exit code."""
    try:
        settings = load_settings(job, overrides, limit)
        report = examine(settings, rows=rows, load=load, show_progress=sys.stderr.isatty())
    except JobError as error:
        if json:
            click.echo(json_module.dumps({"ok": False, "error": str(error), "hint": error.hint}))
        raise
    # what a job file may hold beside JSON, a date for a chat template, becomes text
    said = json_module.dumps(as_json(report), default=str) if json else None
    click.echo(said or "\n".join(text_lines(report)))
    return report.exit_code


def examine(
    settings: Settings, *, rows: bool = False, load: bool = True, show_progress: bool = False
) -> CheckReport:
    """Find out everything; raises JobError for what keeps the job from running.

    `rows` reads and tokenises every row, `load` loads the model and proves it.
    """
    with _noting() as (notes, warnings):
        job = open_job(settings)
        model = model_report(job, loaded=load)
        warnings += job_warnings(job, model)
        return CheckReport(
            job=settings.job.name,
            changed=changed_settings(settings),
            effective=effective_settings(job),
            generation=dict(job.prompts.effective),
            input=input_report(job.input),
            model=model,
            ids=check_ids(job, show_progress=show_progress),
            rows=take_census(job, model.kv_tokens, show_progress) if rows else None,
            # the same choice is made, and said, when the model is loaded
            notes=tuple(dict.fromkeys(notes)),
            warnings=tuple(dict.fromkeys(warnings)),
        )


@contextmanager
def _noting() -> Iterator[tuple[list[str], list[str]]]:
    """Collect what the parts say of their choices, apart from their warnings."""
    notes: list[str] = []
    warnings: list[str] = []

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            (warnings if record.levelno >= logging.WARNING else notes).append(record.getMessage())

    logger, handler = logging.getLogger("cbjob"), Notes()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield notes, warnings
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def changed_settings(settings: Settings) -> dict[str, Any]:
    """The keys that are not at their default, as `table.key`."""
    return {
        f"{table}.{name}": value
        for table in TABLES
        for name, value in getattr(settings, table).model_dump(exclude_defaults=True).items()
    }


def effective_settings(job: Job) -> dict[str, Any]:
    """Every key as it holds once the model is known, with what else decides about requests."""
    settings = {
        f"{table}.{name}": value
        for table in TABLES
        for name, value in getattr(job.settings, table).model_dump().items()
    }
    resolved = {"model.device": job.device, "model.dtype": job.dtype}
    return {**settings, **resolved, **job.prompts.describe()}


def input_report(job_input: Input) -> InputReport:
    """Sum up the shards and their columns."""
    columns: dict[str, dict[str, int]] = {}
    for shard in job_input.shards.values():
        for field in shard.schema:
            types = columns.setdefault(field.name, {})
            types[str(field.type)] = types.get(str(field.type), 0) + 1
    sizes = [fingerprint.get("size", 0) for fingerprint in job_input.fingerprints.values()]
    return InputReport(
        formats=tuple(sorted({shard.content.format for shard in job_input.shards.values()})),
        shards=len(job_input.shards),
        rows=sum(shard.rows for shard in job_input.shards.values()),
        size_bytes=sum(sizes),
        columns=tuple(Column(name, types) for name, types in columns.items()),
    )


def model_report(job: Job, *, loaded: bool) -> ModelReport:
    """Tell what the model needs and what fits; load and prove it if asked to."""
    from jobrunner.engine.loading import estimate_kv_blocks, read_model_info, resolve_limits

    model, batching = job.settings.model, job.settings.batching
    info = read_model_info(
        job.model_folder,
        device=model.device,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        block_size=batching.block_size,
    )
    limits = resolve_limits(
        info.device,
        batching.max_batch_size,
        batching.token_budget,
        batching.chunk_size,
        batching.lookahead,
    )
    if loaded:
        blocks = load(job).kv_blocks
    else:
        blocks = estimate_kv_blocks(
            info, limits, kv_memory=batching.kv_memory, block_size=batching.block_size
        )
    return _model_report(job, info, limits.max_batch_size, blocks, proven=loaded)


def _model_report(
    job: Job, info: ModelInfo, max_batch_size: int, kv_blocks: int, *, proven: bool
) -> ModelReport:
    block_size = job.settings.batching.block_size
    return ModelReport(
        folder=job.model_folder,
        architecture=info.architecture,
        layers=info.layers,
        parameters=info.parameters,
        weight_bytes=info.weight_bytes,
        dtype=info.dtype,
        device=info.device,
        max_model_len=info.max_model_len,
        max_batch_size=max_batch_size,
        block_size=block_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        kv_tokens=kv_blocks * block_size,
        proven=proven,
    )


def job_warnings(job: Job, model: ModelReport) -> list[str]:
    """What lets a job run, but hardly as it was meant."""
    found = []
    if job.input.strange_column:
        found.append(f"{job.input.strange_column}: such rows become bad_type errors")
    wanted = job.settings.generation.max_new_tokens
    if wanted >= model.max_model_len:
        found.append(
            f"max_new_tokens is {wanted:,}, the model's context {model.max_model_len:,}:"
            " texts end there"
        )
    if model.kv_tokens < model.max_model_len:
        found.append(
            f"the KV memory has room for {model.kv_tokens:,} tokens, the model's context is"
            f" {model.max_model_len:,}: a row that grows longer becomes a cannot_fit error"
        )
    return found


def id_column(table: InputTable) -> str | None:
    """The column whose values have to be unique, if there is one."""
    return OPENAI_COLUMNS[0] if table.format == "openai" and table.id is None else table.id


def check_ids(job: Job, *, show_progress: bool = False) -> IdReport | None:
    """Find rows without an id of their own; None where the rows have no ids."""
    column = id_column(job.settings.input)
    if column is None:
        return None
    shards = list(job.input.shards.values())
    with (
        Reader(shards, column) as reader,
        UniqueIds(ID_EXAMPLES) as ids,
        _progress("ids", job.input, show_progress) as show,
    ):
        for span in job.input.spans:
            for rows in reader.read(span):
                ids.add(row for row in rows if row.error is None)
                show(len(rows))
        return ids.report()


def take_census(job: Job, kv_tokens: int | None, show_progress: bool = False) -> RowsReport:
    """Read and tokenise every row, and count what they would become."""
    settings = job.settings
    census = Census(
        max_new_tokens=settings.generation.max_new_tokens,
        max_model_len=job.max_model_len,
        block_size=settings.batching.block_size,
        kv_tokens=kv_tokens,
    )
    shards = list(job.input.shards.values())
    with (
        Reader(shards, settings.input.column, job.input.needed) as reader,
        _progress("rows", job.input, show_progress) as show,
    ):
        batches = (rows for span in job.input.spans for rows in reader.read(span))
        for rows, encoded in _encoded(job.prompts, batches):
            census.add(encoded)
            show(rows)
    return census.report()


def _encoded(
    prompts: Prompts, batches: Iterable[Sequence[Row]]
) -> Iterator[tuple[int, list[Request | Completion]]]:
    """Encode on another thread, a few batches ahead; give the number of rows with each result.

    The tokenizer leaves Python to the others while it works.
    """
    ahead: deque[tuple[int, Future[list[Request | Completion]]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for rows in batches:
            ahead.append((len(rows), pool.submit(prompts.encode, rows, {})))
            if len(ahead) > BATCHES_AHEAD:
                count, encoded = ahead.popleft()
                yield count, encoded.result()
        for count, encoded in ahead:
            yield count, encoded.result()


@contextmanager
def _progress(what: str, job_input: Input, visible: bool) -> Iterator[Show]:
    """Show on a terminal how far a pass over all rows is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not visible
    ) as bar:
        total = sum(shard.rows for shard in job_input.shards.values())
        task = bar.add_task(f"reading {what}", total=total)
        yield lambda count: bar.advance(task, count)
