"""Generation parameters: of the job, of the model, of a row. Know nothing of tokens or draws."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobrunner.config import GenerationTable
from jobrunner.data.json_text import read_json_text
from jobrunner.data.models import read_json
from jobrunner.data.prompts.faults import RowFault, shown
from jobrunner.errors import ConfigError
from jobrunner.records import Row

# what a row may set for itself
ROW_PARAMETERS = tuple(
    "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty"
    " max_new_tokens min_new_tokens stop stop_token_ids seed n ignore_eos".split()
)
# what `use_model_defaults` takes over
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WHOLE = ("top_k", "max_new_tokens", "min_new_tokens", "seed", "n")


def effective_generation(table: GenerationTable, folder: Path) -> GenerationTable:
    """The job's parameters, those of generation_config.json where the job asks for them.

    A key that the job sets is never changed. Raises ConfigError where the model's are invalid.
    """
    if not table.use_model_defaults:
        return table
    path = folder / "generation_config.json"
    found = read_json(path)
    defaults = {key: found[key] for key in _MODEL_DEFAULTS if found.get(key) is not None}
    if found.get("do_sample") is False:
        defaults["temperature"] = 0.0
    elif found.get("do_sample"):
        # transformers samples at 1 where nothing is said
        defaults.setdefault("temperature", 1.0)
    own = {key: value for key, value in table if key in table.model_fields_set}
    try:
        return GenerationTable.model_validate(defaults | own)
    except ValidationError as error:
        raise ConfigError(
            f"`{path}` has defaults that cannot be used: {_problems(error)}",
            hint="set these keys in `[generation]`, or drop `use_model_defaults`",
        ) from error


class RowParameters:
    """The job's parameters with what a row changes, each checked like the job's own.

    `columns` names one column of structs (or JSON text), or a column per parameter; none for
    no parameters per row. `vocabulary` is the number of token ids. Raises ConfigError.
    """

    def __init__(self, columns: Sequence[str], base: GenerationTable, vocabulary: int) -> None:
        self._struct = len(columns) == 1 and columns[0] not in ROW_PARAMETERS
        self._columns = tuple(columns)
        self._base = base
        self._given = base.model_dump()
        self._vocabulary = vocabulary
        if not self._struct and (odd := [name for name in columns if name not in ROW_PARAMETERS]):
            raise ConfigError(
                f"`input.params` names column `{odd[0]}`, which is no parameter",
                hint=f"{_meant(odd[0])}a row can set {', '.join(ROW_PARAMETERS)}",
            )
        if problem := self._unknown_stop(base):
            raise ConfigError(f"`generation.stop_token_ids` {problem}")

    def of(self, row: Row) -> GenerationTable:
        """The parameters of a row. Raises RowFault."""
        if not self._columns:
            return self._base
        if self._struct:
            (column,) = self._columns
            return self.changed_by(row.others.get(column), f"`{column}`")
        named = {name: _from_text(name, row.others.get(name)) for name in self._columns}
        return self.changed_by(named, "its columns")

    def changed_by(self, value: object, place: str) -> GenerationTable:
        """The job's parameters changed by a struct, null or JSON text. Raises RowFault."""
        changes = {key: _whole(key, item) for key, item in _struct(value, place).items()}
        if not changes:
            return self._base
        if unknown := [key for key in changes if key not in ROW_PARAMETERS]:
            raise RowFault(
                "bad_params",
                f"has in {place} the unknown parameter {shown(unknown[0])}:"
                f" {_meant(unknown[0])}a row can set {', '.join(ROW_PARAMETERS)}",
            )
        try:
            table = GenerationTable.model_validate(self._given | changes)
        except ValidationError as error:
            raise RowFault("bad_params", f"has in {place} {_problems(error)}") from error
        if problem := self._unknown_stop(table):
            raise RowFault("bad_params", f"has in {place} `stop_token_ids` {problem}")
        return table

    def _unknown_stop(self, table: GenerationTable) -> str:
        over = [token for token in table.stop_token_ids if token >= self._vocabulary]
        return f"= {over[0]:,}: the model's last token is {self._vocabulary - 1:,}" if over else ""


def _struct(value: object, place: str) -> dict[str, object]:
    if isinstance(value, str):
        try:
            value = read_json_text(value)
        except ValueError as error:
            raise RowFault("bad_params", f"has in {place} no JSON: {error}") from error
    if value is None:
        return {}
    if isinstance(value, list) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        # Arrow's maps come as pairs
        value = dict(value)
    if not isinstance(value, Mapping):
        kind = type(value).__name__
        raise RowFault("bad_params", f"has in {place} a {kind}, not parameters by name")
    return {str(key): item for key, item in value.items() if item is not None}


def _from_text(name: str, value: object) -> object:
    """A value from a file that has only text, as CSV."""
    if not isinstance(value, str):
        return value
    if value == "":
        return None
    try:
        found = read_json_text(value.lower() if name == "ignore_eos" else value)
    except ValueError:
        return value
    # a stop string is text, but for a list of them
    return found if name != "stop" or isinstance(found, list) else value


def _whole(key: str, value: object) -> object:
    """A whole number that pandas made a float for the sake of nulls beside it."""
    if key in _WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _problems(error: ValidationError) -> str:
    """Say what pydantic found: key, value, what is wanted."""
    return "; ".join(_problem(entry) for entry in error.errors(include_url=False))


def _problem(entry: Any) -> str:
    wanted = str(entry["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    if not entry["loc"]:
        return wanted
    return f"`{entry['loc'][0]}` = {shown(entry['input'])}: {wanted}"


def _meant(name: str) -> str:
    nearest = difflib.get_close_matches(name, ROW_PARAMETERS, n=1)
    return f"did you mean `{nearest[0]}`? " if nearest else ""
