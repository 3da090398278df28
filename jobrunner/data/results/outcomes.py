"""Make tables of outcomes out of finished rows, column by column. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from jobrunner.config import Settings
from jobrunner.data.layout import EXTRA_FIELDS, LOGPROBS_TYPE, outcome_schema
from jobrunner.data.results.samples import Answer, FinishedRow
from jobrunner.records import TokenLogprob

# rows of outcomes read, merged or checked at a time, and those with log-probabilities,
# of which a row can have megabytes
WINDOW_ROWS = 2048
HEAVY_WINDOW_ROWS = 128


def extras_of(settings: Settings) -> tuple[str, ...]:
    """Name the columns of a job's outcomes beyond those that every job has, in their order."""
    wanted: set[str] = set(settings.output.columns)
    if settings.input.too_long != "error":
        wanted.add("truncated_tokens")
    # a row may ask for them in its own parameters, for several samples too
    if settings.output.logprobs is not None or settings.input.format == "openai":
        wanted.add("logprobs")
    if settings.generation.n > 1 or settings.input.params or settings.input.format == "openai":
        wanted.add("samples")
    return tuple(name for name in EXTRA_FIELDS if name in wanted)


def window_rows(columns: Collection[str]) -> int:
    """How many rows with these columns to hold at a time."""
    return HEAVY_WINDOW_ROWS if {"logprobs", "samples"} & set(columns) else WINDOW_ROWS


def outcome_table(rows: Iterable[FinishedRow], extras: Collection[str] = ()) -> pa.Table:
    """Make the table of outcomes, one row each, in the given order."""
    rows = list(rows)
    schema = outcome_schema(extras)
    columns = _base_columns(rows)
    columns |= {name: _extra_column(name, rows, extras) for name in extras}
    arrays = [
        values if isinstance(values, pa.Array) else pa.array(values, field.type)
        for field in schema
        for values in [columns[field.name]]
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def logprobs_array(values: Sequence[Sequence[TokenLogprob] | None]) -> pa.Array:
    """Make a column of log-probabilities, a list of tokens each; infinite ones become null."""
    tokens = [token for value in values if value is not None for token in value]
    likeliest = [pair for token in tokens for pair in token.top]
    pairs = pa.StructArray.from_arrays(
        [_ids(pair[0] for pair in likeliest), _finite(pair[1] for pair in likeliest)],
        fields=list(LOGPROBS_TYPE.value_type.field("top").type.value_type),
    )
    entries = pa.StructArray.from_arrays(
        [
            _ids(token.token for token in tokens),
            _finite(token.logprob for token in tokens),
            _lists([token.top for token in tokens], pairs),
        ],
        fields=list(LOGPROBS_TYPE.value_type),
    )
    return _lists(values, entries)


def _base_columns(rows: Sequence[FinishedRow]) -> dict[str, Any]:
    errors = [row.error for row in rows]
    ok = _first_answers(rows)
    return {
        "row": [row.id.index for row in rows],
        "status": ["error" if error else "ok" for error in errors],
        "text": [answer and answer.text for answer in ok],
        "finish_reason": [answer and answer.completion.finish_reason for answer in ok],
        "error_kind": [error and error.kind for error in errors],
        "error": [error and error.message for error in errors],
        "prompt_tokens": [row.answers[0].completion.prompt_tokens for row in rows],
        "output_tokens": [sum(len(a.completion.tokens) for a in row.answers) for row in rows],
    }


def _extra_column(name: str, rows: Sequence[FinishedRow], extras: Collection[str]) -> Any:
    answers = [row.answers[0] for row in rows]
    match name:
        case "truncated_tokens":
            requests = [answer.completion.request for answer in answers]
            return [request.truncated_tokens if request else 0 for request in requests]
        case "prompt_text":
            return [answer.prompt_text for answer in answers]
        case "chunks":
            return [answer.completion.chunks for answer in answers]
        case "token_ids":
            return _token_lists(_first_answers(rows))
        case "logprobs":
            ok = _first_answers(rows)
            return logprobs_array([None if a is None else a.completion.logprobs for a in ok])
        case "samples":
            return _samples(rows, extras)
    raise ValueError(f"no column `{name}`")


def _samples(rows: Sequence[FinishedRow], extras: Collection[str]) -> pa.Array:
    answers = [row.answers if row.error is None else None for row in rows]
    each = [answer for samples in answers if samples is not None for answer in samples]
    nothing = [None] * len(each)
    arrays = [
        pa.array([answer.text for answer in each], pa.string()),
        pa.array([answer.completion.finish_reason for answer in each], pa.string()),
        _ids(len(answer.completion.tokens) for answer in each),
        _token_lists(each if "token_ids" in extras else nothing),
        logprobs_array([a.completion.logprobs for a in each] if "logprobs" in extras else nothing),
    ]
    fields = list(EXTRA_FIELDS["samples"].type.value_type)
    return _lists(answers, pa.StructArray.from_arrays(arrays, fields=fields))


def _first_answers(rows: Sequence[FinishedRow]) -> list[Answer | None]:
    """The first sample of each row, None for a row that is an error."""
    return [row.answers[0] if row.error is None else None for row in rows]


def _token_lists(answers: Sequence[Answer | None]) -> pa.Array:
    tokens = [None if answer is None else answer.completion.tokens for answer in answers]
    return _lists(tokens, _ids(token for ids in tokens if ids is not None for token in ids))


def _lists(values: Sequence[Collection[Any] | None], entries: pa.Array) -> pa.Array:
    """Cut an array of entries into the lists that `values` are, null where one is None."""
    *starts, end = accumulate((len(value or ()) for value in values), initial=0)
    # an offset that is null makes its list null
    offsets = [
        None if value is None else start for value, start in zip(values, starts, strict=True)
    ]
    return pa.ListArray.from_arrays(pa.array([*offsets, end], pa.int32()), entries)


def _ids(values: Iterable[int]) -> pa.Array:
    return pa.array(np.fromiter(values, np.int64))


def _finite(values: Iterable[float]) -> pa.Array:
    numbers = np.fromiter(values, np.float64)
    return pa.array(numbers, mask=~np.isfinite(numbers))
