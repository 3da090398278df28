"""Templates over the columns of a row, in a sandbox. Know nothing of chat templates or tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import isroutine
from typing import Any

from jobrunner.config import InputTable
from jobrunner.data.prompts.faults import RowFault, reason
from jobrunner.errors import ConfigError

# no prompt is longer, and no model reads one that is
MOST_CHARACTERS = 64 * 2**20
# what would make the prompts of a resumed job differ from those of its start
_NOT_REPEATABLE = {"filters": ["random"], "globals": ["lipsum"]}


def needed_columns(table: InputTable) -> tuple[str, ...]:
    """Name the columns that templates, tools and parameters are made of, each once.

    The column of prompts is among them where it serves for those too.

    Raises ConfigError where a template is none.
    """
    named = [table.tools, *table.params, table.priority, table.arrival]
    for key in ("template", "prefill"):
        source = getattr(table, key)
        if source is not None:
            named += ColumnTemplate(key, source).columns
    return tuple(dict.fromkeys(name for name in named if name is not None))


class ColumnTemplate:
    """A jinja2 template whose variables are columns. `key` is its key in `[input]`.

    It sees no files and cannot change what it is given; a null that it prints, and work
    beyond bounds, is a fault of the row. Raises ConfigError where it is not a template.
    """

    def __init__(self, key: str, source: str) -> None:
        from jinja2 import TemplateSyntaxError, meta

        self._key = key
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"`input.{key}` is not a template: {error.message} in its line {error.lineno}"
            ) from error
        names = meta.find_undeclared_variables(tree)
        self.columns = tuple(sorted(names - environment.globals.keys()))

    def render(self, columns: Mapping[str, object]) -> str:
        """Fill in the columns of one row. Raises RowFault."""
        values = {name: _with_nulls(columns[name], f"`{name}`") for name in self.columns}
        try:
            return "".join(_bounded(self._template.generate(values)))
        except Exception as error:  # a template is a program, it raises anything
            words = f"makes `input.{self._key}` fail: {reason(error)}"
            raise RowFault("template_error", words) from error


class Null:
    """A null of a row: false, none, and never printed. `name` says where it comes from."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __hash__(self) -> int:
        return hash(None)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"{self.name} is null and has no `{name}`")

    def __repr__(self) -> str:
        # what a list or a mapping prints of what is in it, too
        raise ValueError(f"it prints {self.name}, which is null")


def _with_nulls(value: object, name: str) -> Any:
    if value is None:
        return Null(name)
    if isinstance(value, dict):
        return {key: _with_nulls(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item, f"{name}[{place}]") for place, item in enumerate(value)]
    return value


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    characters = 0
    for piece in pieces:
        characters += len(piece)
        if characters > MOST_CHARACTERS:
            raise OverflowError(f"it makes over {MOST_CHARACTERS:,} characters")
        yield piece


@cache
def _environment() -> Any:
    # loaded here, not at import: `cbjob --help` must not wait for it
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        # `"x" * 10**9` would take the memory of the job
        intercepted_binops = frozenset(["*", "**"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_size(operator, left, right)
            return super().call_binop(context, operator, left, right)

    # rows are text, not web pages: nothing is escaped
    environment = Environment(
        undefined=StrictUndefined,
        finalize=_printable,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = _to_json
    environment.tests["none"] = lambda value: value is None or isinstance(value, Null)
    for kind, names in _NOT_REPEATABLE.items():
        for name in names:
            getattr(environment, kind).pop(name, None)
    return environment


def _printable(value: object) -> object:
    if value is None:
        raise ValueError("it prints a null")
    if isroutine(value) or isinstance(value, type | Iterator):
        # Python spells it by its place in memory, which is another one in every run
        raise ValueError("it prints a function, and not what comes of it")
    return value


def _check_size(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if any(isinstance(side, int) and abs(side) > 1024 for side in (left, right)):
            raise OverflowError("a power of numbers over 1,024")
    elif isinstance(left, int) != isinstance(right, int):
        times, many = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(many, str | list | tuple) and len(many) * times > MOST_CHARACTERS:
            raise OverflowError(f"it repeats a value beyond {MOST_CHARACTERS:,} characters")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_plain)


def _plain(value: object) -> object:
    return None if isinstance(value, Null) else str(value)
