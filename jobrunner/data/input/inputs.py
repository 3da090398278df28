"""Bring the settings of an input together with its files, and name the columns that it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa

from jobrunner.config import InputTable, Settings
from jobrunner.data.input.columns import PromptKind, check_columns, strange_column
from jobrunner.data.input.files import LocalFile, local_path
from jobrunner.data.input.formats.content import Wanted
from jobrunner.data.input.hub import find_dataset
from jobrunner.data.input.shards import (
    Shard,
    cut_spans,
    find_shards,
    shard_fingerprint,
)
from jobrunner.data.layout import RunDirectory, result_name
from jobrunner.data.openai.requests import OPENAI_COLUMNS
from jobrunner.data.prompts.templates import needed_columns
from jobrunner.data.results.result_files import result_suffix
from jobrunner.errors import ConfigError
from jobrunner.records import Span

# what a name in a folder may be long on the file systems of Linux
NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Input:
    """The shards of a job by name, the columns carried into its results, and its spans.

    `needed` are the columns beside that of the prompts that requests are made of. `origin` are
    the settings that decide what the rows are. `strange_column` says, if not empty, that prompts
    come from a column of another type.
    """

    shards: Mapping[str, Shard]
    fingerprints: Mapping[str, Mapping[str, Any]]
    kept_schema: pa.Schema
    spans: tuple[Span, ...]
    strange_column: str
    needed: tuple[str, ...] = ()
    origin: Mapping[str, Any] | None = None

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the input; keys name the settings and the shards."""
        shards = {f"input shard `{name}`": value for name, value in self.fingerprints.items()}
        return {**(self.origin or {}), **shards}


def open_input(settings: Settings) -> Input:
    """Find the input's shards and check their columns. Raises ConfigError, InfrastructureError.

    Text files are read through once, to count and hash them. A `dataset` that is to be streamed
    is copied into the run directory first.
    """
    table = settings.input
    needed = _needed(table)
    wanted = Wanted((*((table.column,) if table.column else ()), *needed), _carried(table))
    if table.dataset is not None:
        cache = RunDirectory(settings.run_directory, "").state / "input"
        shards = find_dataset(table, settings.folder, cache, wanted, settings.limit)
    else:
        shards = find_shards(
            table.path or "", settings.folder, table.format, wanted, settings.limit
        )
    _check_run_directory(settings, shards)
    _check_result_names(shards, result_suffix(settings))
    kept_schema = check_columns(shards, wanted)
    return Input(
        shards={shard.name: shard for shard in shards},
        fingerprints={shard.name: shard_fingerprint(shard) for shard in shards},
        kept_schema=kept_schema,
        spans=tuple(cut_spans(shards)),
        strange_column=_strange_column(table, shards),
        needed=needed,
        origin=_origin(table, shards),
    )


def _needed(table: InputTable) -> tuple[str, ...]:
    of_format = OPENAI_COLUMNS if table.format == "openai" else ()
    return tuple(dict.fromkeys((*of_format, *needed_columns(table))))


def _carried(table: InputTable) -> tuple[str, ...]:
    named = [*table.keep, table.id]
    return tuple(dict.fromkeys(name for name in named if name is not None))


def _origin(table: InputTable, shards: Sequence[Shard]) -> dict[str, Any]:
    """The settings that decide how the same bytes become rows, or where rows come from."""
    if table.dataset is not None:
        named = ("dataset", "split", "streaming")
        return {f"input.{name}": getattr(table, name) for name in named} | {"input.id": table.id}
    of_rows = "openai" if table.format == "openai" else shards[0].content.format
    return {"input.format": of_rows, "input.id": table.id}


def _strange_column(table: InputTable, shards: Sequence[Shard]) -> str:
    if table.column is None:
        return ""
    kind: PromptKind = "text"
    if table.messages is not None:
        kind = "messages"
    elif table.token_ids is not None:
        kind = "token_ids"
    return strange_column(shards, table.column, kind)


def _check_run_directory(settings: Settings, shards: Sequence[Shard]) -> None:
    """Refuse results that would become input."""
    run = settings.run_directory
    path = local_path(settings.input.path or "")
    searched = "**" in path or (settings.folder / path).is_dir()
    for shard in shards:
        if not isinstance(shard.file, LocalFile) or settings.input.path is None:
            continue
        file = shard.file.path
        root = file.parents[shard.name.count("/")].resolve()
        if file.resolve().is_relative_to(run) or (searched and run.is_relative_to(root)):
            raise ConfigError(
                f"the run directory `{run}` lies in the input `{settings.input.path}`:"
                " results would become input",
                hint="choose an `output.path` elsewhere",
            )


def _check_result_names(shards: Sequence[Shard], suffix: str) -> None:
    """Refuse names that no file can have, and result files that are in each other's way."""
    names: dict[str, str] = {}
    for shard in shards:
        name = result_name(shard.name, suffix)
        if any(len(os.fsencode(part)) > NAME_BYTES for part in name.split("/")):
            raise ConfigError(
                f"the result file of `{shard.name}` would have a name of over {NAME_BYTES} bytes",
                hint="rename the shard",
            )
        other = names.setdefault(name, shard.name)
        if other != shard.name:
            raise ConfigError(
                f"shards `{other}` and `{shard.name}` would have the same result file",
                hint="rename one of them",
            )
    for name, shard_name in names.items():
        folders = map(str, PurePosixPath(name).parents)
        if other := next((names[folder] for folder in folders if folder in names), ""):
            raise ConfigError(
                f"the result file of `{other}` would stand where that of `{shard_name}` needs a"
                " folder",
                hint="rename one of them",
            )
