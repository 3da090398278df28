"""Bring the settings of an input together with its files. Reads footers only."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from jobrunner.config import Settings
from jobrunner.data.layout import result_name
from jobrunner.data.shards import (
    Shard,
    check_columns,
    cut_spans,
    find_shards,
    limit_shards,
    shard_fingerprint,
    strange_column,
)
from jobrunner.errors import ConfigError
from jobrunner.records import Span

# what a name in a folder may be long on the file systems of Linux
NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class Input:
    """The shards of a job by name, the columns carried into its results, and its spans.

    `strange_column` says, if not empty, that prompts come from a column of another type.
    """

    shards: Mapping[str, Shard]
    fingerprints: Mapping[str, Mapping[str, Any]]
    kept_schema: pa.Schema
    spans: tuple[Span, ...]
    strange_column: str

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the input; keys name the shards."""
        return {f"input shard `{name}`": value for name, value in self.fingerprints.items()}


def open_input(settings: Settings) -> Input:
    """Find the input's shards and check their columns. Raises ConfigError, InfrastructureError."""
    table = settings.input
    shards = find_shards(table.path, settings.folder)
    _check_places(settings, shards)
    if settings.limit is not None:
        shards = limit_shards(shards, settings.limit)
    kept_schema = check_columns(shards, [table.column], list(table.keep))
    return Input(
        shards={shard.name: shard for shard in shards},
        fingerprints={shard.name: dict(shard_fingerprint(shard)) for shard in shards},
        kept_schema=kept_schema,
        spans=tuple(cut_spans(shards)),
        strange_column=strange_column(shards, table.column, lists=table.messages is not None),
    )


def _check_places(settings: Settings, shards: Sequence[Shard]) -> None:
    """Refuse results that would become input, and two shards with one result file."""
    run = settings.run_directory
    for shard in shards:
        root = shard.path.parents[shard.name.count("/")].resolve()
        searched = "**" in settings.input.path or (settings.folder / settings.input.path).is_dir()
        if shard.path.resolve().is_relative_to(run) or (searched and run.is_relative_to(root)):
            raise ConfigError(
                f"the run directory `{run}` lies in the input `{settings.input.path}`:"
                " results would become input",
                hint="choose an `output.path` elsewhere",
            )
    names: dict[str, str] = {}
    for shard in shards:
        if any(len(os.fsencode(part)) > NAME_BYTES for part in result_name(shard.name).split("/")):
            raise ConfigError(
                f"the result file of `{shard.name}` would have a name of over {NAME_BYTES} bytes",
                hint="rename the shard",
            )
        other = names.setdefault(result_name(shard.name), shard.name)
        if other != shard.name:
            raise ConfigError(
                f"shards `{other}` and `{shard.name}` would have the same result file",
                hint="rename one of them",
            )
