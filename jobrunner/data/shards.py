"""Find Parquet shards, check their columns and cut them into spans. Reads footers only."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.data.layout import OUTCOME_SCHEMA
from jobrunner.errors import ConfigError, InfrastructureError
from jobrunner.records import Span

_SPAN_ROWS = 2048
_READ_FAULTS = (OSError, pa.ArrowException)


@dataclass(frozen=True, slots=True)
class Shard:
    """One input file. `name` is its path below the input's root, with forward slashes.

    `rows` are the rows that belong to the input; `cut_from` is the number of rows in the
    file where a limit left some of them out.
    """

    name: str
    path: Path
    rows: int
    cut_from: int | None = None

    @property
    def file_rows(self) -> int:
        return self.rows if self.cut_from is None else self.cut_from


def find_shards(path: str, base: Path) -> list[Shard]:
    """Find the Parquet files that `path` means: a file, a folder or a glob below `base`.

    A folder is searched to any depth; names that begin with a dot or an underscore are
    skipped. The list is sorted by name. Raises ConfigError where nothing is found or a file
    is not Parquet, InfrastructureError where a file cannot be read.
    """
    pattern = Path(os.path.expanduser(path))
    target = base / pattern
    with reading(target):
        if target.is_dir():
            root, files = target, _files_below(target)
        elif target.exists():
            root, files = target.parent, [target]
        elif glob.has_magic(str(pattern)):
            root, files = _files_of_glob(pattern, base)
        else:
            raise ConfigError(
                f"input path `{path}` does not exist (looked for `{target}`)",
                hint="name a Parquet file, a folder or a glob, relative to the job file",
            )
    if not files:
        raise ConfigError(
            f"input path `{path}` has no Parquet file (looked in `{root}`)",
            hint="a folder is searched for `*.parquet`; for other names use a glob",
        )
    named = sorted((file.relative_to(root).as_posix(), file) for file in files)
    for name, file in named:
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise ConfigError(f"the name of `{file}` is not UTF-8", hint="rename the file")
    return [Shard(name, file, _footer(file).num_rows) for name, file in named]


def limit_shards(shards: Sequence[Shard], limit: int) -> list[Shard]:
    """Make the first `limit` rows of the input the whole input."""
    kept: list[Shard] = []
    left = limit
    for shard in shards:
        if left <= 0:
            break
        if shard.rows > left:
            shard = replace(shard, rows=left, cut_from=shard.file_rows)
        kept.append(shard)
        left -= shard.rows
    return kept


def shard_fingerprint(shard: Shard) -> dict[str, int | str]:
    """Say what identifies the content of a shard: bytes, rows, hash of the raw footer.

    Never the modification time: copying or touching a file changes nothing.
    """
    try:
        with shard.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(size - 8)
            footer_bytes = int.from_bytes(file.read(4), "little")
            file.seek(size - 8 - footer_bytes)
            footer = file.read(footer_bytes)
    except OSError as error:
        raise _unreadable(shard.path, error) from error
    digest = hashlib.blake2b(footer, digest_size=16).hexdigest()
    return {"size": size, "rows": shard.rows, "footer": digest}


def check_unchanged(shard: Shard, fingerprint: Mapping[str, Any]) -> None:
    """Raise InfrastructureError if a shard is not what it was when the job began."""
    if shard_fingerprint(shard) != fingerprint:
        raise InfrastructureError(
            f"`{shard.path}` changed while the job ran",
            hint="restore it, then run the same command again",
        )


def cut_spans(shards: Sequence[Shard], span_rows: int = _SPAN_ROWS) -> list[Span]:
    """Cut the input into spans of at most `span_rows` rows: the same for every worker.

    Small row groups are put together and never torn; a group with more than `span_rows`
    rows is cut inside and shares no span with its neighbours.
    """
    return [span for shard in shards for span in _spans_of(shard, span_rows)]


def check_columns(shards: Sequence[Shard], needed: Sequence[str], kept: Sequence[str]) -> pa.Schema:
    """Check that all shards have the needed and kept columns; return the schema of the kept.

    `needed` are read as prompts and may be of any type. `kept` are carried into the results,
    hence of one type in all shards and not named like a result column. Raises ConfigError.
    """
    if taken := [name for name in kept if name in OUTCOME_SCHEMA.names]:
        raise ConfigError(
            f"kept column `{taken[0]}` has the name of a result column",
            hint=f"these names are taken: {', '.join(OUTCOME_SCHEMA.names)}",
        )
    first: pa.Schema | None = None
    for shard in shards:
        schema = _schema(shard.path)
        for name in (*needed, *kept):
            _check_column(shard, schema, name)
        for name in kept:
            _check_kept(shard, schema.field(name))
        carried = carried_schema(schema, kept)
        if first is None:
            first = carried
        for expected, found in zip(first, carried, strict=True):
            if expected.type != found.type:
                raise ConfigError(
                    f"kept column `{found.name}` is {found.type} in `{shard.name}` "
                    f"and {expected.type} in `{shards[0].name}`",
                    hint="all shards need one type: write them again, or do not keep the column",
                )
    return pa.schema([]) if first is None else first


def strange_column(shards: Sequence[Shard], name: str, *, lists: bool) -> str:
    """Say which shard's column `name` is not of the type that prompts have; empty if none is.

    Messages are `lists`, a prompt is text, also as large_string, string_view or dictionary.
    """
    for shard in shards:
        type_ = _schema(shard.path).field(name).type
        inner = type_.value_type if pa.types.is_dictionary(type_) else type_
        text = pa.types.is_string(inner) or pa.types.is_large_string(inner)
        text = text or pa.types.is_string_view(inner)
        if not (pa.types.is_nested(type_) if lists else text) and not pa.types.is_null(type_):
            wanted = "a list of messages" if lists else "text"
            return f"column `{name}` of `{shard.name}` is {type_}, not {wanted}"
    return ""


def _files_below(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        # os.walk would leave the folder out without a word
        raise error

    files: list[Path] = []
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        # a link may lead back to a folder above it
        real = os.path.realpath(here)
        folders[:] = [] if real in seen else [name for name in folders if not _hidden(name)]
        if real not in seen:
            files += [Path(here, name) for name in names if _is_shard(name)]
        seen.add(real)
    return files


def _is_shard(name: str) -> bool:
    return name.lower().endswith(".parquet") and not _hidden(name)


def _files_of_glob(pattern: Path, base: Path) -> tuple[Path, list[Path]]:
    parts = pattern.parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = base.joinpath(*parts[:fixed])
    wild = parts[fixed:]
    if ".." in wild:
        raise ConfigError(
            f"input path `{pattern}` has `..` after a wildcard",
            hint="a shard is named by its path below a folder: put `..` in front",
        )
    wants_hidden = any(_hidden(part) for part in wild)
    # a set: several `**` find a file several times
    names = {
        name
        for name in glob.glob(str(Path(*wild)), root_dir=root, recursive=True)
        if wants_hidden or not any(_hidden(part) for part in Path(name).parts)
    }
    return root, [root / name for name in names if (root / name).is_file()]


def _hidden(name: str) -> bool:
    return name.startswith((".", "_"))


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
    """The rows of each row group that belong to the input."""
    footer = _footer(shard.path)
    left = shard.rows
    for group in range(footer.num_row_groups):
        rows = min(left, footer.row_group(group).num_rows)
        left -= rows
        yield rows


def _check_column(shard: Shard, schema: pa.Schema, name: str) -> None:
    found = len(schema.get_all_field_indices(name))
    if found == 1:
        return
    if found > 1:
        raise ConfigError(
            f"`{shard.name}` has {found} columns `{name}`", hint="give each column its own name"
        )
    nearest = difflib.get_close_matches(name, schema.names, n=1)
    meant = f"did you mean `{nearest[0]}`? " if nearest else ""
    columns = ", ".join(f"`{column}`" for column in schema.names)
    raise ConfigError(
        f"`{shard.name}` has no column `{name}`", hint=f"{meant}its columns are {columns}"
    )


def carried_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Make the schema of kept columns: names and types alone.

    What else a writer noted of a column may differ between shards.
    """
    return pa.schema([pa.field(name, schema.field(name).type) for name in columns])


def _check_kept(shard: Shard, field: pa.Field) -> None:
    """Refuse what Arrow reads only in one piece: a dictionary inside another type."""
    inner = [field.type.field(place) for place in range(field.type.num_fields)]
    while inner:
        part = inner.pop()
        if pa.types.is_dictionary(part.type):
            raise ConfigError(
                f"kept column `{field.name}` of `{shard.name}` is {field.type}: "
                "a dictionary inside another type cannot be carried",
                hint="write the column as plain text, or do not keep it",
            )
        inner += [part.type.field(place) for place in range(part.type.num_fields)]


def _schema(path: Path) -> pa.Schema:
    try:
        return _footer(path).schema.to_arrow_schema()
    except (UnicodeDecodeError, pa.ArrowNotImplementedError) as error:
        raise ConfigError(
            f"the columns of `{path}` cannot be read: {error}", hint="copy or write the file again"
        ) from error


def _footer(path: Path) -> Any:
    try:
        return pq.read_metadata(path)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"`{path}` is not a Parquet file: {error}",
            hint="take it out of the input, or copy it again if it is cut short",
        ) from error
    except _READ_FAULTS as error:
        raise _unreadable(path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while an input file is read into an InfrastructureError."""
    try:
        yield
    except _READ_FAULTS as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: BaseException) -> InfrastructureError:
    return InfrastructureError(
        f"cannot read `{path}`: {error}",
        hint="check the file and its disk, then run the same command again",
    )
