"""Read the response and error files of a shard together. Knows nothing of the input or of parts.

A row is in one of the two; both are in the order of rows. A shard without errors has no error
file. Some things an answer file does not say: log-probabilities by token id, the tokens of a
prompt whose row is an error, that repetition ended a text.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai.responses import error_kind, row_index
from jobrunner.data.results.outcomes import HEAVY_WINDOW_ROWS

RESPONSES_SUFFIX = ".responses.jsonl"
ERRORS_SUFFIX = ".errors.jsonl"


class AnswerLine(NamedTuple):
    """A line of an answer file: as it is, and what it says."""

    row: int
    is_error: bool
    raw: bytes
    said: Mapping[str, Any]


def errors_path(run: RunDirectory, shard: str) -> Path:
    """The error file of a shard, beside its response file."""
    responses = run.result(shard)
    return responses.with_name(responses.name.removesuffix(RESPONSES_SUFFIX) + ERRORS_SUFFIX)


def read_answers(run: RunDirectory, shard: str) -> Iterator[AnswerLine]:
    """Stream the lines of a shard's two files, ordered by row if each of them is.

    Raises ValueError, KeyError or TypeError where a line is none of ours.
    """
    files = [_lines(run.result(shard), is_error=False)]
    if errors_path(run, shard).exists():
        files.append(_lines(errors_path(run, shard), is_error=True))
    return heapq.merge(*files, key=lambda line: line.row)


def read_answer_outcomes(run: RunDirectory, shard: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Stream what the answer files say of outcomes; of the rest, columns of extras are empty."""
    nothing = {field.name: None if field.nullable else 0 for field in schema}
    outcomes = (nothing | _outcome(line) for line in read_answers(run, shard))
    while window := list(islice(outcomes, HEAVY_WINDOW_ROWS)):
        yield pa.Table.from_pylist(window, schema=schema)


def _lines(path: Path, *, is_error: bool) -> Iterator[AnswerLine]:
    with path.open("rb") as file:
        for raw in file:
            said = json.loads(raw)
            yield AnswerLine(row_index(said["id"]), is_error, raw, said)


def _outcome(line: AnswerLine) -> dict[str, Any]:
    body = line.said["response"]["body"]
    if line.is_error:
        error = body["error"]
        said = {"error_kind": error_kind(error["code"]), "error": error["message"]}
        return {"row": line.row, "status": "error", **said}
    choice, *_ = body["choices"]
    message = choice.get("message")
    return {
        "row": line.row,
        "status": "ok",
        "text": choice["text"] if message is None else message["content"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": body["usage"]["prompt_tokens"],
        "output_tokens": body["usage"]["completion_tokens"],
    }
