"""Check that all shards have the columns that a job asks for, and settle the types of kept ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from jobrunner.data.input.formats.content import Wanted
from jobrunner.data.input.formats.kept import AS_JSON
from jobrunner.data.input.shards import Shard
from jobrunner.data.layout import TAKEN_NAMES
from jobrunner.errors import ConfigError

PromptKind = Literal["text", "messages", "token_ids"]


def check_columns(shards: Sequence[Shard], wanted: Wanted) -> pa.Schema:
    """Check that all shards have the wanted columns; return the schema of the carried ones.

    The needed ones may be of any type. The carried ones go into the results, hence are of one
    type in all shards and not named like a result column. Raises ConfigError.
    """
    if taken := [name for name in wanted.carried if name in TAKEN_NAMES]:
        raise ConfigError(
            f"kept column `{taken[0]}` has the name of a result column",
            hint=f"these names are taken: {', '.join(TAKEN_NAMES)}",
        )
    known = list(_with_columns(shards))
    for shard in known:
        for name in (*wanted.needed, *wanted.carried):
            _check_column(shard, name)
        for name in wanted.carried:
            _check_kept(shard, shard.schema.field(name))
            _check_same_type(known[0], shard, name)
    if not known:
        return pa.schema([pa.field(name, pa.string()) for name in wanted.carried])
    return _carried_schema(known[0].schema, wanted.carried)


def strange_column(shards: Sequence[Shard], name: str, kind: PromptKind) -> str:
    """Say which shard's column `name` is not of the type that prompts have; empty if none is.

    Nothing is said of JSON, where every row has its own type.
    """
    for shard in _with_columns(shards):
        type_ = shard.schema.field(name).type
        fits, wanted = _PROMPT_TYPES[kind]
        if not pa.types.is_null(type_) and not fits(type_):
            return f"column `{name}` of `{shard.name}` is {type_}, not {wanted}"
    return ""


def _is_text(type_: Any) -> bool:
    inner = type_.value_type if pa.types.is_dictionary(type_) else type_
    of_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_text(inner) for is_text in of_text)


def _is_list(type_: Any) -> bool:
    of_lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(type_) for is_list in of_lists)


def _is_list_of_integers(type_: Any) -> bool:
    return _is_list(type_) and pa.types.is_integer(type_.value_type)


_PROMPT_TYPES = {
    "text": (_is_text, "text"),
    "messages": (pa.types.is_nested, "a list of messages"),
    "token_ids": (_is_list_of_integers, "a list of integers"),
}


def _with_columns(shards: Sequence[Shard]) -> Iterator[Shard]:
    """Leave out files that say nothing of their columns, having no rows."""
    return (shard for shard in shards if shard.rows or len(shard.content.schema))


def _check_column(shard: Shard, name: str) -> None:
    found = len(shard.schema.get_all_field_indices(name))
    if found == 1:
        return
    if found > 1:
        raise ConfigError(
            f"`{shard.name}` has {found} columns `{name}`", hint="give each column its own name"
        )
    nearest = difflib.get_close_matches(name, shard.schema.names, n=1)
    meant = f"did you mean `{nearest[0]}`? " if nearest else ""
    columns = ", ".join(f"`{column}`" for column in shard.schema.names)
    raise ConfigError(
        f"`{shard.name}` has no column `{name}`", hint=f"{meant}its columns are {columns}"
    )


def _carried_schema(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    """Make the schema of carried columns: names and types alone.

    What else a writer noted of a column may differ between shards.
    """
    found = [schema.field(name) for name in columns]
    return pa.schema(
        [
            pa.field(f.name, f.type, metadata=AS_JSON if f.metadata == AS_JSON else None)
            for f in found
        ]
    )


def _check_kept(shard: Shard, column: pa.Field) -> None:
    """Refuse what Arrow reads only in one piece: a dictionary inside another type."""
    inner = [column.type.field(place) for place in range(column.type.num_fields)]
    while inner:
        part = inner.pop()
        if pa.types.is_dictionary(part.type):
            raise ConfigError(
                f"kept column `{column.name}` of `{shard.name}` is {column.type}: "
                "a dictionary inside another type cannot be carried",
                hint="write the column as plain text, or do not keep it",
            )
        inner += [part.type.field(place) for place in range(part.type.num_fields)]


def _check_same_type(first: Shard, shard: Shard, name: str) -> None:
    expected, found = first.schema.field(name).type, shard.schema.field(name).type
    if expected != found:
        raise ConfigError(
            f"kept column `{name}` is {found} in `{shard.name}` and {expected} in `{first.name}`",
            hint="all shards need one type: write them again, or do not keep the column",
        )
