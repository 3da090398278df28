"""`cbjob check`: everything that can be known of a job before it runs.

What is found goes into a `CheckReport`; how it reads is in `check_view`.
"""

from __future__ import annotations

import json as json_module
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from jobrunner.commands.check_report import CheckReport, Column, InputReport, ModelReport
from jobrunner.commands.check_rows import check_ids, take_census
from jobrunner.commands.check_view import as_json, text_lines
from jobrunner.commands.run import share_the_cores
from jobrunner.config import TABLES, Settings
from jobrunner.data.input.inputs import Input
from jobrunner.errors import JobError
from jobrunner.jobfile import load_settings
from jobrunner.opening import Job, load, open_job


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
    share_the_cores()
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
    from jobrunner.engine.loading import estimate_kv_blocks, resolve_limits

    info, batching = job.model, job.settings.batching
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
    return ModelReport(
        folder=job.model_folder,
        architecture=info.architecture,
        layers=info.layers,
        parameters=info.parameters,
        weight_bytes=info.weight_bytes,
        dtype=info.dtype,
        device=info.device,
        max_model_len=info.max_model_len,
        max_batch_size=limits.max_batch_size,
        block_size=batching.block_size,
        kv_bytes_per_token=info.kv_bytes_per_token,
        kv_tokens=blocks * batching.block_size,
        proven=loaded,
    )


def job_warnings(job: Job, model: ModelReport) -> list[str]:
    """What lets a job run, but hardly as it was meant."""
    found = job.warnings()
    if model.kv_tokens < model.max_model_len:
        found.append(
            f"the KV memory has room for {model.kv_tokens:,} tokens, the model's context is"
            f" {model.max_model_len:,}: a row that grows longer becomes a cannot_fit error"
        )
    return found
