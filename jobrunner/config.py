"""Turn job.toml into frozen, validated settings. All validation of settings lives here."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from jobrunner.errors import ConfigError

DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
SIZE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40} | {
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def _quantity(value: object, units: Mapping[str, float], example: str) -> float:
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"must be a number with a unit out of {', '.join(units)}, like {example}")
    return float(match[1]) * units[match[2]]


def _duration(value: object) -> float:
    """Seconds from `"30s"`."""
    return _quantity(value, DURATION_UNITS, '"30s"')


def _size(value: object) -> object:
    """Bytes from `"8GiB"`; a number of bytes from Python and "auto" pass through."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return int(_quantity(value, SIZE_UNITS, '"8GiB"'))


def _tuple(value: object) -> object:
    """TOML has lists; a single value may stand for a list of one."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _text(value: str) -> str:
    """Text that can be written to a file and named to the system."""
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("must be Unicode text without NUL")
    return value


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise ValueError("must not name a column twice")
    return values


# what no clock, index or tensor goes beyond
TEN_YEARS_S = 10 * 365 * 86400.0
MOST = 2**31 - 1

Duration = Annotated[float, BeforeValidator(_duration), Field(gt=0, le=TEN_YEARS_S)]
Size = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_size)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_tuple)]
Columns = Annotated[Strings, AfterValidator(_distinct)]
Text = Annotated[str, AfterValidator(_text)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_text)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, le=MOST)], ...], BeforeValidator(_tuple)]
Positive = Annotated[int, Field(ge=1, le=MOST)]


class Table(BaseModel):
    """One table of job.toml. `NOT_YET` names keys of the design whose feature is not built."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class JobTable(Table):
    name: str = "job"
    seed: int = 0


class InputTable(Table):
    path: PathText
    prompt: str | None = None
    messages: str | None = None
    system: Text | None = None
    chat: Literal["auto"] | bool = "auto"
    keep: Columns = ()

    @model_validator(mode="after")
    def _one_source_of_prompts(self) -> InputTable:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must name one column, as `prompt` or as `messages`, not both")
        if self.messages is not None and self.chat is False:
            raise ValueError("`messages` needs the chat template: `chat` cannot be false")
        return self

    @property
    def column(self) -> str:
        """The column that prompts come from."""
        return self.prompt if self.prompt is not None else str(self.messages)


class OutputTable(Table):
    path: PathText


class ModelTable(Table):
    name: PathText
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    max_model_len: Literal["auto"] | Annotated[int, Field(ge=2, le=MOST)] = "auto"


class GenerationTable(Table):
    max_new_tokens: Positive = 256
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    seed: int | None = None


class BatchingTable(Table):
    max_batch_size: Literal["auto"] | Positive = "auto"
    token_budget: Literal["auto"] | Positive = "auto"
    chunk_size: Literal["auto"] | Positive = "auto"
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16
    kv_memory: Size = "auto"
    prefix_cache: bool = True
    lookahead: Literal["auto"] | Positive = "auto"

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> BatchingTable:
        batch, budget = self.max_batch_size, self.token_budget
        if isinstance(batch, int) and isinstance(budget, int) and batch > budget:
            raise ValueError(
                f"`max_batch_size` {batch} is over `token_budget` {budget}:"
                " every sequence needs a token a step"
            )
        return self


class CheckpointTable(Table):
    every: Duration = 30.0
    grace: Duration = 30.0
    part_rows: Positive = 2000


class ProgressTable(Table):
    every: Duration = 10.0
    style: Literal["auto", "rich", "plain", "none"] = "auto"
    metrics: bool = False


NOT_YET: dict[str, frozenset[str]] = {
    "job": frozenset({"price_per_gpu_hour"}),
    "input": frozenset(
        "format dataset split streaming template token_ids chat_template chat_template_kwargs tools"
        " prefill id priority arrival params too_long".split()
    ),
    "output": frozenset({"format", "columns", "logprobs", "compression"}),
    "model": frozenset({"revision", "attention", "allow_unsafe_weights"}),
    "generation": frozenset(
        "min_new_tokens top_k min_p repetition_penalty presence_penalty frequency_penalty"
        " stop_on_repetition n use_model_defaults".split()
    ),
    "batching": frozenset(
        "policy reserve order preemption swap_memory starvation_limit preferred_batch_size"
        " max_queue_delay schedule_every max_step".split()
    ),
    "errors": frozenset({"max_rate", "max_count"}),
    "workers": frozenset({"engine", "count", "devices"}),
    "slurm": frozenset({"partition", "account", "gres", "time", "lines"}),
}


class Settings(Table):
    """A whole job. `folder` is the job file's: relative paths start there."""

    job: JobTable = JobTable()
    input: InputTable
    output: OutputTable
    model: ModelTable
    generation: GenerationTable = GenerationTable()
    batching: BatchingTable = BatchingTable()
    checkpoint: CheckpointTable = CheckpointTable()
    progress: ProgressTable = ProgressTable()
    folder: Path = Field(default_factory=Path.cwd)
    limit: Positive | None = None

    @property
    def run_directory(self) -> Path:
        return (self.folder / os.path.expanduser(self.output.path)).resolve()


TABLES = [name for name in Settings.model_fields if name not in ("folder", "limit")]


def load_settings(
    path: Path, overrides: Sequence[str] = (), limit: int | None = None, style: str | None = None
) -> Settings:
    """Read a job file, change it by `table.key=value` overrides, and check all of it.

    Raises ConfigError that lists every problem at once.
    """
    document = _read_toml(path)
    sources: dict[str, str] = {}
    problems: list[str] = []
    for override in overrides:
        _apply(override, document, sources, problems)
    if style is not None:
        _set(document, "progress", "style", style)
        sources["progress.style"] = f"--progress {style}"
    problems += _key_problems(document, path, sources)
    settings, more = _validate(document, path, sources, limit)
    problems += more
    if problems or settings is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"{count} in the settings", *problems]))
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"no job file `{path}`") from error
    except IsADirectoryError as error:
        raise ConfigError(f"`{path}` is a folder", hint="name the job file in it") from error
    except (ValueError, RecursionError) as error:
        # not TOML, not UTF-8, a number of thousands of digits, nesting without end
        raise ConfigError(f"`{path}` is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the job file `{path}`: {error.strerror}") from error


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


def _key_problems(document: Mapping[str, Any], path: Path, sources: Mapping[str, str]) -> list[str]:
    """Unknown keys, with the nearest known one, and keys whose feature is not built yet."""
    problems = []
    for table, entries in document.items():
        if table in TABLES and not isinstance(entries, dict):
            problems.append(f"  `{table}` in `{path}` = {_toml(entries)}: must be a table")
            continue
        if table not in TABLES and table not in NOT_YET:
            names = entries if isinstance(entries, dict) else ()
            where = next(
                (sources[f"{table}.{n}"] for n in names if f"{table}.{n}" in sources), path
            )
            problems.append(f"  unknown table `{table}` in `{where}`{_nearest(table, TABLES)}")
            continue
        if table not in TABLES:
            problems.append(f"  `[{table}]` in `{path}` is not yet supported")
            continue
        known = _keys(table)
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
    document: Mapping[str, Any], path: Path, sources: Mapping[str, str], limit: int | None
) -> tuple[Settings | None, list[str]]:
    """Validate the known keys; what is wrong is left out and the rest looked at again.

    So problems between keys are found in the same run as problems of single keys.
    """
    tables = {
        table: {k: v for k, v in document[table].items() if k in _keys(table)}
        for table in TABLES
        if isinstance(document.get(table), dict)
    }
    problems: dict[str, None] = {}
    left_out: set[str] = set()
    while True:
        try:
            settings = Settings.model_validate(
                tables | {"folder": path.resolve().parent, "limit": limit}
            )
        except ValidationError as error:
            wrong = set()
            for entry in error.errors():
                table, name = (*(str(part) for part in entry["loc"]), "")[:2]
                again = entry["type"] == "missing" and name in left_out
                if not again and not any(f"`{key}`" in entry["msg"] for key in left_out):
                    problems[_problem(entry, table, name, path, sources)] = None
                if name in tables.get(table, {}):
                    wrong.add((table, name))
            for table, name in wrong:
                del tables[table][name]
                left_out.add(name)
            if not wrong:
                return None, list(problems)
        else:
            return settings, list(problems)


def _problem(entry: Any, table: str, name: str, path: Path, sources: Mapping[str, str]) -> str:
    """Say one problem that pydantic found: key, file, value, what is wanted."""
    key = f"{table}.{name}".rstrip(".")
    where = f"  `{key}` in `{sources.get(key, path)}`"
    message = entry["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if entry["type"] == "missing":
        return f"{where} is missing"
    if not name:
        return f"{where}: {message}"
    if len(entry["loc"]) > 2 and isinstance(entry["loc"][2], str):
        # of a union of types each member reports its own failure: say the union instead
        message = f"must be {_expected(table, name)}"
    return f"{where} = {_toml(entry['input'])}: {_lower(message)}"


def _keys(table: str) -> Mapping[str, Any]:
    model = Settings.model_fields[table].annotation
    assert isinstance(model, type)
    assert issubclass(model, Table)
    return model.model_fields


def _expected(table: str, name: str) -> str:
    model = Settings.model_fields[table].annotation
    schema = model.model_json_schema()["properties"][name]  # type: ignore[union-attr]
    return " or ".join(
        _describe(option) for option in schema.get("anyOf", [schema]) if option["type"] != "null"
    )


def _describe(option: Mapping[str, Any]) -> str:
    if "const" in option:
        return f'"{option["const"]}"'
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
