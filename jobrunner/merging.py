"""Make the result file of a shard as its job asks for it. Knows nothing of engines or workers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from jobrunner import __version__
from jobrunner.data.input.shards import check_unchanged
from jobrunner.data.input.sources import read_columns
from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai.writing import Answering, writing_answers
from jobrunner.data.results.merge import merge_shard
from jobrunner.data.results.outcomes import extras_of
from jobrunner.data.results.parts import Tally
from jobrunner.data.results.provenance import provenance_of
from jobrunner.opening import Job


def check_input(job: Job, shard: str) -> None:
    """Raise JobError where a shard is not what it was when the job was opened."""
    check_unchanged(job.input.shards[shard])


def provenance(job: Job, fingerprint: Mapping[str, Any]) -> dict[str, object]:
    """What the result files say of how they came to be."""
    return provenance_of(__version__, job.settings, fingerprint, job.prompts.describe())


def merge(job: Job, directory: RunDirectory, origin: Mapping[str, object], name: str) -> Tally:
    """Join the parts of a shard to its result file, in the format that the job asks for."""
    shard = job.input.shards[name]
    check_input(job, name)
    kept = partial(read_columns, shard, job.input.kept_schema)
    writing = None
    if job.settings.input.format == "openai":
        writing = partial(writing_answers, directory, shard, _answering(job, directory), origin)
    return merge_shard(
        directory,
        name,
        shard.rows,
        kept,
        job.input.kept_schema,
        extras=extras_of(job.settings),
        compression=job.settings.output.compression,
        provenance=origin,
        writing=writing,
    )


def _answering(job: Job, directory: RunDirectory) -> Answering:
    # when the job was begun: the same for every worker and every merge
    created_s = int(directory.job_file.stat().st_mtime)
    return Answering(job.settings.model.name, created_s, job.prompts.token_bytes)
