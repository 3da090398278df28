"""Compare the answer files of a shard with its input, for `cbjob verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any, get_args

from jobrunner.data.input.shards import Shard
from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai.reading import AnswerLine, errors_path, read_answers
from jobrunner.data.openai.requests import Asker
from jobrunner.data.openai.responses import error_kind, line_id
from jobrunner.data.openai.writing import read_askers
from jobrunner.data.results.pending import is_merged
from jobrunner.data.results.result_files import read_result_tally
from jobrunner.errors import InfrastructureError
from jobrunner.records import ErrorKind, RowId


def answer_problems(run: RunDirectory, shard: Shard) -> Iterator[str]:
    """Say what is wrong with the two files of a shard; each is read once, a line at a time."""
    try:
        yield from _problems(run, shard)
    except InfrastructureError as error:
        yield str(error)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        yield f"{run.result(shard.name)}: cannot be read: {error!r}"


def _problems(run: RunDirectory, shard: Shard) -> Iterator[str]:
    path, rows, errors = run.result(shard.name), 0, 0
    with closing(read_askers(shard)) as askers:
        for line in read_answers(run, shard.name):
            where = errors_path(run, shard.name) if line.is_error else path
            if line.row != rows or rows >= shard.rows:
                yield (
                    f"{where}: rows are not 0 to {shard.rows - 1} in order,"
                    f" each in one of two files (near row {rows:,})"
                )
                return
            if fault := _fault(line, RowId(shard.name, rows), next(askers)):
                yield f"{where}: row {rows:,} {fault}"
            rows, errors = rows + 1, errors + line.is_error
    if rows != shard.rows:
        yield f"{path}: has with its error file {rows:,} rows, its shard {shard.rows:,}"
    elif is_merged(run, shard.name):
        kept = read_result_tally(run, shard.name)
        if (kept.rows, kept.error_rows) != (rows, errors):
            yield f"{path}: the sums that the run keeps of it differ from its rows"


def _fault(line: AnswerLine, row: RowId, asker: Asker) -> str:
    said = line.said
    if said["id"] != f"batch_req_{line_id(row)}" or said["custom_id"] != asker.custom_id:
        return "answers another request"
    response = said["response"]
    sound = _is_explained(response) if line.is_error else _is_answered(response, asker)
    return "" if sound else "is neither answered nor explained"


def _is_answered(response: Mapping[str, Any], asker: Asker) -> bool:
    body = response["body"]
    kind = "chat.completion" if asker.chat else "text_completion"
    if response["status_code"] != 200 or body["object"] != kind or not body["choices"]:
        return False
    usage = body["usage"]
    if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
        return False
    return all(_is_choice(choice, place) for place, choice in enumerate(body["choices"]))


def _is_choice(choice: Mapping[str, Any], place: int) -> bool:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    reason = choice["finish_reason"]
    return choice["index"] == place and isinstance(text, str) and reason in ("stop", "length")


def _is_explained(response: Mapping[str, Any]) -> bool:
    error = response["body"]["error"]
    known = error_kind(error["code"]) in get_args(ErrorKind)
    return response["status_code"] in (400, 500) and known and bool(error["message"])
