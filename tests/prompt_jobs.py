"""Prompts of small jobs on tiny tokenizers, and what becomes of single values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobrunner.config import SOURCES, GenerationTable, InputTable
from jobrunner.data.prompts.prompts import Prompts
from jobrunner.records import Completion, Request, Row, RowId


def open_prompts(folder: Path, **changes: Any) -> Prompts:
    """Open prompts whose settings differ from those of a raw prompt's job."""
    source = {"input": {}, "generation": {"max_new_tokens": 16}}
    known = {"job_seed": 0, "max_model_len": 1_000, "base": folder, "logprobs": None}
    for key, value in ({"chat": False, "prompt": "p"} | changes).items():
        if key in known:
            known[key] = value
        else:
            table = "generation" if key in GenerationTable.model_fields else "input"
            source[table][key] = value
    if any(name in changes for name in SOURCES):
        source["input"]["prompt"] = changes.get("prompt")
    return Prompts(
        folder,
        input=InputTable(path="a.parquet", **source["input"]),
        generation=GenerationTable(**source["generation"]),
        **known,
    )


def rows_of(*values: object) -> list[Row]:
    return [Row(RowId("a.parquet", index), value) for index, value in enumerate(values)]


def encode(prompts: Prompts, *values: object) -> list[Request | Completion]:
    return prompts.encode(rows_of(*values), {})


def request_of(prompts: Prompts, value: object) -> Request:
    (outcome,) = encode(prompts, value)
    assert isinstance(outcome, Request), outcome
    return outcome


def error_of(prompts: Prompts, value: object) -> tuple[str, str]:
    (outcome,) = encode(prompts, value)
    assert isinstance(outcome, Completion)
    assert outcome.error is not None
    return outcome.error.kind, outcome.error.message


def kinds(outcomes: Sequence[Request | Completion]) -> list[str]:
    return [
        outcome.error.kind if isinstance(outcome, Completion) and outcome.error else "ok"
        for outcome in outcomes
    ]


def outcomes_of(prompts: Prompts, *records: dict[str, object]) -> list[Request | Completion]:
    """What becomes of rows given by their columns; a column `p` is that of prompts."""
    rows = [Row(RowId("a.parquet", i), record.get("p"), record) for i, record in enumerate(records)]
    return prompts.encode(rows, {})


def only_request(outcomes: Sequence[Request | Completion]) -> Request:
    (outcome,) = outcomes
    assert isinstance(outcome, Request), outcome
    return outcome


def only_error(outcomes: Sequence[Request | Completion]) -> tuple[str, str]:
    (outcome,) = outcomes
    assert isinstance(outcome, Completion)
    assert outcome.error is not None
    return outcome.error.kind, outcome.error.message.removeprefix("row 0 of `a.parquet` ")
