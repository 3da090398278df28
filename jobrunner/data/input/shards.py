"""Look at the files of an input once and cut them into spans. Knows nothing of prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from jobrunner.data.input.files import File, reading
from jobrunner.data.input.finding import Found, find_files
from jobrunner.data.input.formats.content import Content, Wanted
from jobrunner.data.input.formats.csv import look_at_csv
from jobrunner.data.input.formats.jsonl import Survey, look_at_jsonl
from jobrunner.data.input.formats.parquet import look_at_parquet
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Span

log = logging.getLogger("cbjob")

_SPAN_ROWS = 2048
_COMPRESSIONS = ("", ".gz", ".zst")
SUFFIXES = {
    "parquet": (".parquet",),
    "jsonl": tuple(f".{name}{end}" for name in ("jsonl", "ndjson") for end in _COMPRESSIONS),
    "csv": tuple(f".csv{end}" for end in _COMPRESSIONS),
}


@dataclass(frozen=True, slots=True)
class Shard:
    """One input file. `name` is its path below the input's root, with forward slashes.

    `rows` are the rows that belong to the input; a limit may leave some of the file's out.
    `schema` has the columns that can be asked for, `partition` the values of those that the
    names of folders give: these count, whatever the file itself says. `str(file)` names it to
    a person.
    """

    name: str
    file: File | str
    content: Content
    rows: int
    schema: pa.Schema
    partition: Mapping[str, str | int | None] = field(default_factory=dict)


def find_shards(
    path: str,
    base: Path,
    format_name: str = "auto",
    wanted: Wanted = Wanted(),  # noqa: B008 - a named tuple
    limit: int | None = None,
) -> list[Shard]:
    """Find and look at the files that `path` means, as far as the first `limit` rows reach.

    With `auto` the suffix of a name tells the format, and what has no known suffix is Parquet.
    Raises ConfigError where nothing is found, formats are mixed or a file is not what it should
    be, InfrastructureError where a file cannot be read.
    """
    name = "jsonl" if format_name == "openai" else format_name
    known = SUFFIXES.values() if name == "auto" else [SUFFIXES[name]]
    found = find_files(path, base, [suffix for suffixes in known for suffix in suffixes])
    if name == "auto":
        name = _common_format(path, found)
    if name == "jsonl":
        return _look_at_jsonl(found, wanted, limit)
    look = look_at_csv if name == "csv" else look_at_parquet
    return limit_shards((_shard(one, look) for one in found), limit)


def limit_shards(shards: Iterable[Shard], limit: int | None) -> list[Shard]:
    """Make the first `limit` rows of the input the whole input; look at no shard after them."""
    if limit is None:
        return list(shards)
    kept: list[Shard] = []
    left = limit
    for shard in shards:
        kept.append(replace(shard, rows=min(shard.rows, left)))
        left -= kept[-1].rows
        if left <= 0:
            break
    return kept


def shard_fingerprint(shard: Shard) -> dict[str, int | str]:
    """Say what identified a shard when it was looked at: its bytes and its number of rows.

    Never the modification time: copying or touching a file changes nothing.
    """
    return {**shard.content.looked_at, "rows": shard.rows}


def check_unchanged(shard: Shard) -> None:
    """Raise InfrastructureError if a shard is not what it was when it was looked at."""
    with reading(shard.file):
        now = shard.content.identity()
    if now != shard.content.looked_at:
        raise InfrastructureError(
            f"`{shard.file}` changed while the job ran",
            hint="restore it, then run the same command again",
        )


def cut_spans(shards: Sequence[Shard], span_rows: int = _SPAN_ROWS) -> list[Span]:
    """Cut the input into spans of at most `span_rows` rows: the same for every worker.

    Small groups of rows are put together and never torn; a group with more than `span_rows`
    rows is cut inside and shares no span with its neighbours.
    """
    return [span for shard in shards for span in _spans_of(shard, span_rows)]


def _common_format(path: str, found: Sequence[Found]) -> str:
    by_format: dict[str, list[str]] = {}
    for one in found:
        by_format.setdefault(_format_of(one.name), []).append(one.name)
    if len(by_format) > 1:
        counts = ", ".join(
            f"{len(names):,} {name} (`{names[0]}`)" for name, names in sorted(by_format.items())
        )
        raise ConfigError(
            f"input path `{path}` has files of several formats: {counts}",
            hint="name one as `input.format`, or use a glob that finds one kind only",
        )
    return next(iter(by_format))


def _format_of(name: str) -> str:
    matches = (
        format_name for format_name, suffixes in SUFFIXES.items() if name.lower().endswith(suffixes)
    )
    return next(matches, "parquet")


def _look_at_jsonl(found: Sequence[Found], wanted: Wanted, limit: int | None) -> list[Shard]:
    """Look at JSON Lines: their columns are those of all files together."""
    survey = Survey(wanted)
    shards = limit_shards((_shard(one, lambda f: look_at_jsonl(f, survey)) for one in found), limit)
    if names := survey.as_json():
        log.info(
            "kept as JSON text, having nested values or values of several types: %s",
            ", ".join(f"`{name}`" for name in names),
        )
    schema = survey.schema()
    return [
        replace(shard, schema=_with_partition(schema, one))
        for shard, one in zip(shards, found, strict=False)
    ]


def _shard(found: Found, look: Callable[[File], Content]) -> Shard:
    with reading(found.file):
        content = look(found.file)
    schema = _with_partition(content.schema, found)
    return Shard(found.name, found.file, content, content.rows, schema, found.partition)


def _with_partition(schema: pa.Schema, found: Found) -> pa.Schema:
    fields = [column for column in schema if column.name not in found.partition]
    fields += [
        pa.field(name, pa.int64() if name in found.integers else pa.string())
        for name in found.partition
    ]
    return pa.schema(fields)


def _spans_of(shard: Shard, span_rows: int) -> Iterator[Span]:
    start = stop = 0
    for rows in _group_rows(shard):
        if stop > start and stop + rows - start > span_rows:
            yield Span(shard.name, start, stop)
            start = stop
        stop += rows
        # only a group larger than a span gets here with more than a span
        if stop - start > span_rows:
            while start < stop:
                yield Span(shard.name, start, min(start + span_rows, stop))
                start = min(start + span_rows, stop)
    if stop > start:
        yield Span(shard.name, start, stop)


def _group_rows(shard: Shard) -> Iterator[int]:
    """The rows of each group that belong to the input."""
    left = shard.rows
    for group in shard.content.groups:
        yield min(left, group)
        left -= min(left, group)
