"""Write the response and error files of a shard. Knows nothing of parts.

The error file is settled first. The presence of the response file is the commit: a kill between
the two leaves a shard that is not finished, and both are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from jobrunner.data.input.shards import Shard
from jobrunner.data.input.sources import Reader
from jobrunner.data.layout import RunDirectory, remove
from jobrunner.data.openai.reading import AnswerLine, errors_path, read_answers
from jobrunner.data.openai.requests import Asker, read_asker
from jobrunner.data.openai.responses import TokenBytes, encoded, error_line, response_line
from jobrunner.data.results.parts import Tally, tally_of
from jobrunner.data.results.result_files import write_tally
from jobrunner.records import RowId, Span

# what an answer needs of the line that it is for
_ASKER_COLUMNS = ("custom_id", "url")


@dataclass(frozen=True, slots=True)
class Answering:
    """What every answer of a job says or needs: the model, a time in Unix seconds, the tokens."""

    model: str
    created_s: int
    token_bytes: TokenBytes


class AnswerWriter:
    """The two files of one shard being written; it sums up what goes in."""

    def __init__(
        self,
        answering: Answering,
        shard: str,
        askers: Iterator[Asker],
        kept: Callable[[int], bytes],
        responses: IO[bytes],
        errors: IO[bytes],
    ) -> None:
        """`kept` gives the line of a row whose response stays as it was."""
        self.tally = Tally()
        self._answering = answering
        self._shard = shard
        self._askers = askers
        self._kept = kept
        self._responses = responses
        self._errors = errors

    def write(self, table: pa.Table) -> None:
        """Write the outcomes of the next rows."""
        for outcome in table.to_pylist():
            self._write_row(RowId(self._shard, outcome["row"]), next(self._askers), outcome)
        self.tally += tally_of(table)

    def _write_row(self, row: RowId, asker: Asker, outcome: Mapping[str, Any]) -> None:
        if outcome["status"] == "error":
            self._errors.write(encoded(error_line(row, asker, outcome)))
        elif outcome["samples"] is None:
            # it was read from the old response file
            self._responses.write(self._kept(row.index))
        else:
            line = response_line(
                row,
                asker,
                outcome,
                model=self._answering.model,
                created_s=self._answering.created_s,
                token_bytes=self._answering.token_bytes,
            )
            self._responses.write(encoded(line))


@contextmanager
def writing_answers(
    run: RunDirectory,
    shard: Shard,
    answering: Answering,
    provenance: Mapping[str, object],
) -> Iterator[AnswerWriter]:
    """Write the answer files of a shard; both are there, whole, when the block ends well.

    Where rows of a finished shard ran again, the lines of the others are copied.
    """
    name, errors = shard.name, errors_path(run, shard.name)
    with run.writing(run.result(name)) as responses_path:
        with (
            run.writing(errors) as errors_temporary,
            errors_temporary.open("wb") as errors_file,
            responses_path.open("wb") as responses_file,
            closing(read_askers(shard)) as askers,
        ):
            kept = _Responses(run, name)
            writer = AnswerWriter(answering, name, askers, kept, responses_file, errors_file)
            yield writer
        if not writer.tally.error_rows:
            remove([errors])
        write_tally(run, name, responses_path, writer.tally, provenance)


def read_askers(shard: Shard) -> Generator[Asker]:
    """Stream where the answers of a shard's rows go."""
    with Reader([shard], None, _ASKER_COLUMNS) as reader:
        for rows in reader.read(Span(shard.name, 0, shard.rows)):
            yield from (read_asker(row.others) for row in rows)


class _Responses:
    """Finds lines of an old response file, asked for in the order of rows."""

    def __init__(self, run: RunDirectory, shard: str) -> None:
        self._run = run
        self._shard = shard
        self._lines: Iterator[AnswerLine] | None = None

    def __call__(self, row: int) -> bytes:
        if self._lines is None:
            self._lines = read_answers(self._run, self._shard)
        return next(line.raw for line in self._lines if line.row == row and not line.is_error)
