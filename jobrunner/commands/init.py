"""`cbjob init`: write a job file in which every key stands with its default and its meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from jobrunner.commands.keys import EXAMPLES, KEYS, REQUIRED, TABLES_HELP
from jobrunner.config import DURATION_UNITS, TABLES, DurationText, Settings, table_model
from jobrunner.errors import ConfigError, ExitCode

STDOUT = Path("-")
_HEAD = """\
# A job for cbjob: cbjob check {name}, then cbjob run {name}.
# Keys behind a # stand at their default, or are examples where it says so: remove the # to set
# them. Paths are relative to this file."""
_COMMENT_COLUMN = 40


def init_command(file: Path, *, schema: bool) -> int:
    """Write the template to a file that is not there yet, or print it, or the schema."""
    if schema:
        click.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))
        return ExitCode.OK
    if file == STDOUT:
        click.echo(template("job.toml"), nl=False)
        return ExitCode.OK
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(template(file.name))
    except FileExistsError as error:
        raise ConfigError(
            f"`{file}` is there already", hint="name another file, or `-` to see the template"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write `{file}`: {error.strerror}") from error
    click.echo(f"wrote {file}: say what its rows and its model are, then cbjob check {file}")
    return ExitCode.OK


def template(name: str) -> str:
    """Make a job file of every key; those that a job must say have example values."""
    sections = [_HEAD.format(name=name)]
    sections += ["\n".join(_section(table)) for table in TABLES]
    return "\n\n".join(sections) + "\n"


def _section(table: str) -> Iterator[str]:
    yield f"# {TABLES_HELP[table]}"
    yield f"[{table}]"
    for name, field in table_model(table).model_fields.items():
        key = f"{table}.{name}"
        set_ = "" if key in REQUIRED else "# "
        example = "example: " if set_ and key in EXAMPLES else ""
        entry = f"{set_}{name} = {EXAMPLES.get(key) or _default(field)}"
        yield f"{entry.ljust(_COMMENT_COLUMN)}  # {example}{KEYS[table][name]}{_choices(field)}"


def _default(field: FieldInfo) -> str:
    if _is_duration(field):
        return _words(field.default)
    # JSON spells these defaults as TOML does
    return json.dumps(field.default)


def _words(seconds: float) -> str:
    # none fits into 0
    fitting = {unit: size for unit, size in DURATION_UNITS.items() if size <= seconds} or {"s": 1.0}
    size, unit = max((size, unit) for unit, size in fitting.items())
    return f'"{seconds / size:g}{unit}"'


def _is_duration(field: FieldInfo) -> bool:
    return any(
        isinstance(item, BeforeValidator) and item.json_schema_input_type is DurationText
        for item in field.metadata
    )


def _choices(field: FieldInfo) -> str:
    found = [part for part in get_args(field.annotation) if isinstance(part, str)]
    return f" ({', '.join(found)})" if found else ""


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors that complete and check TOML."""
    schema = Settings.model_json_schema()
    for name in ("folder", "limit"):
        # not of the file: one is where it lies, the other is an option of the command line
        del schema["properties"][name]
    for table in TABLES:
        definition = schema["$defs"][table_model(table).__name__]
        definition["description"] = TABLES_HELP[table]
        for name, field in table_model(table).model_fields.items():
            entry = definition["properties"][name]
            entry["description"] = KEYS[table][name]
            if _is_duration(field):
                # bounds of the seconds that come of it, and those seconds
                for bound in ("gt", "ge", "le"):
                    entry.pop(bound, None)
                entry["default"] = json.loads(_default(field))
    return schema
