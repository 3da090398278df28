"""Turn a job file into settings; everything that is wrong with it is said at once, in words."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from jobrunner.config import NOT_YET, Settings, Table
from jobrunner.errors import ConfigError

Whole = TypeVar("Whole", bound=Table)

_NO_FILE = Path("command line")


def load_settings(
    path: Path | str,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    style: str | None = None,
) -> Settings:
    """Read a job file, change it by `table.key=value` overrides, and check all of it.

    Raises ConfigError that lists every problem at once.
    """
    options = {} if style is None else {"progress.style": (style, f"--progress {style}")}
    return load_tables(Settings, Path(path), overrides, limit, options)


def load_tables(
    whole: type[Whole],
    path: Path | None,
    overrides: Sequence[str] = (),
    limit: int | None = None,
    options: Mapping[str, tuple[Any, str]] | None = None,
) -> Whole:
    """Read a file of tables, change it, and check all of it.

    `whole` has a field for each table, and `folder` and `limit` beside them. `path` None stands
    for an empty file. `options` are values by `table.key`, each with the words on the command
    line that it came from. Raises ConfigError that lists every problem at once.
    """
    document = {} if path is None else _read_toml(path)
    path = path or _NO_FILE
    sources: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        _apply(override, document, sources, problems)
    for key, (value, words) in (options or {}).items():
        table, _, name = key.partition(".")
        _set(document, table, name, value)
        sources[key] = words
    problems += _key_problems(whole, document, path, sources)
    settings, more = _validate(whole, document, path, sources, limit)
    problems += more
    if problems or settings is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"{count} in the settings", *problems]))
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"no job file `{path}`", hint=_files_like(path)) from error
    except IsADirectoryError as error:
        raise ConfigError(f"`{path}` is a folder", hint="name the job file in it") from error
    except (ValueError, RecursionError) as error:
        # not TOML, not UTF-8, a number of thousands of digits, nesting without end
        raise ConfigError(f"`{path}` is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the job file `{path}`: {error.strerror}") from error


def _files_like(path: Path) -> str:
    """Name job files in the folder of one that is not there, the nearest names first."""
    if not path.parent.is_dir():
        return f"there is no folder `{path.parent}`"
    names = sorted(found.name for found in path.parent.glob("*.toml"))
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0.3)
    names = [*nearest, *(name for name in names if name not in nearest)]
    if not names:
        return "`cbjob init` writes one to begin with"
    return "did you mean " + " or ".join(f"`{path.parent / name}`" for name in names[:3]) + "?"


def _apply(
    override: str, document: dict[str, Any], sources: dict[str, str], problems: list[str]
) -> None:
    key, equals, text = override.partition("=")
    table, dot, name = key.strip().partition(".")
    if not (equals and dot and name):
        problems.append(f"  `--set {override}`: must have the form table.key=value")
        return
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text
    except (ValueError, RecursionError):
        # a bare word: the shell has eaten its quotes
        value = text
    _set(document, table, name, value)
    sources[f"{table}.{name}"] = f"--set {override}"


def _set(document: dict[str, Any], table: str, name: str, value: Any) -> None:
    entries = document.setdefault(table, {})
    if isinstance(entries, dict):
        entries[name] = value


def _tables(whole: type[Table]) -> dict[str, type[Table]]:
    """The tables of a whole, by name."""
    found = {name: field.annotation for name, field in whole.model_fields.items()}
    return {
        name: table
        for name, table in found.items()
        if isinstance(table, type) and issubclass(table, Table)
    }


def _key_problems(
    whole: type[Table], document: Mapping[str, Any], path: Path, sources: Mapping[str, str]
) -> list[str]:
    """Unknown keys, with the nearest known one, and keys whose feature is not built yet."""
    problems = []
    tables = _tables(whole)
    for table, entries in document.items():
        if table in tables and not isinstance(entries, dict):
            problems.append(f"  `{table}` in `{path}` = {_toml(entries)}: must be a table")
            continue
        if table not in tables:
            names = entries if isinstance(entries, dict) else ()
            where = next(
                (sources[f"{table}.{n}"] for n in names if f"{table}.{n}" in sources), path
            )
            nearest = _nearest(table, list(tables))
            problems.append(f"  unknown table `{table}` in `{where}`{nearest}")
            continue
        known = tables[table].model_fields
        later = NOT_YET.get(table, frozenset())
        for name, value in entries.items():
            where = f"`{table}.{name}` in `{sources.get(f'{table}.{name}', path)}`"
            if name in later:
                problems.append(f"  {where} = {_toml(value)} is not yet supported")
            elif name not in known:
                problems.append(
                    f"  unknown key {where} = {_toml(value)}{_nearest(name, [*known, *later])}"
                )
    return problems


def _validate(
    whole: type[Whole],
    document: Mapping[str, Any],
    path: Path,
    sources: Mapping[str, str],
    limit: int | None,
) -> tuple[Whole | None, list[str]]:
    """Validate the known keys; what is wrong is left out and the rest looked at again.

    So problems between keys are found in the same run as problems of single keys.
    """
    tables = {
        name: {k: v for k, v in document[name].items() if k in table.model_fields}
        for name, table in _tables(whole).items()
        if isinstance(document.get(name), dict)
    }
    problems: dict[str, None] = {}
    left_out: set[str] = set()
    while True:
        try:
            settings = whole.model_validate(
                tables | {"folder": path.resolve().parent, "limit": limit}
            )
        except ValidationError as error:
            found = error.errors()
        else:
            return settings, list(problems)
        for entry in found:
            if not _follows(entry, left_out):
                problems[_problem(whole, entry, path, sources)] = None
        wrong = {
            (table, name) for table, name in map(_place, found) if name in tables.get(table, {})
        }
        if not wrong:
            return None, list(problems)
        for table, name in wrong:
            del tables[table][name]
            left_out.add(name)


def _place(entry: Any) -> tuple[str, str]:
    """The table and the key that a problem is about, empty where it is about several."""
    table, name = (*(str(part) for part in entry["loc"]), "", "")[:2]
    return table, name


def _follows(entry: Any, left_out: Collection[str]) -> bool:
    """Whether a problem is there only because wrong keys were left out."""
    missing = entry["type"] == "missing" and _place(entry)[1] in left_out
    return missing or any(f"`{key}`" in entry["msg"] for key in left_out)


def _problem(whole: type[Table], entry: Any, path: Path, sources: Mapping[str, str]) -> str:
    """Say one problem that pydantic found: key, file, value, what is wanted."""
    table, name = _place(entry)
    key = f"{table}.{name}".rstrip(".")
    # what two tables say together has no key
    where = f"  `{key}` in `{sources.get(key, path)}`" if key else f"  `{path}`"
    message = entry["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if entry["type"] == "missing":
        return f"{where} is missing"
    if not name:
        return f"{where}: {message}"
    if len(entry["loc"]) > 2 and isinstance(entry["loc"][2], str):
        # of a union of types each member reports its own failure: say the union instead
        message = f"must be {_expected(_tables(whole)[table], name)}"
    return f"{where} = {_toml(entry['input'])}: {_lower(message)}"


def _expected(table: type[Table], name: str) -> str:
    schema = table.model_json_schema()["properties"][name]
    return " or ".join(
        _describe(option) for option in schema.get("anyOf", [schema]) if option["type"] != "null"
    )


def _describe(option: Mapping[str, Any]) -> str:
    if "const" in option:
        return f'"{option["const"]}"'
    if "examples" in option:
        return f'a text like "{option["examples"][0]}"'
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    words |= {"string": "a text", "array": "a list"}
    least = f" of at least {option['minimum']}" if "minimum" in option else ""
    return words[option["type"]] + least


def _nearest(name: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{found[0]}`?" if found else f"; known: {', '.join(sorted(known))}"


def _toml(value: object) -> str:
    if isinstance(value, str):
        return '"' + value.encode("unicode_escape").decode().replace('"', '\\"') + '"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
