"""Read and write result files in the format that a job asks for: Parquet or JSON lines.

What a file says of itself - its sums and where it comes from - is in the footer of a Parquet file,
under the key `cbjob`; JSON lines have no footer, so there it is in a file of the run directory's
state that names the size and the time of its result. Knows nothing of parts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.config import Settings
from jobrunner.data.layout import OUTCOME_SCHEMA, RunDirectory, is_gone
from jobrunner.data.openai.reading import RESPONSES_SUFFIX, read_answer_outcomes
from jobrunner.data.results.json_values import json_values
from jobrunner.data.results.outcomes import window_rows
from jobrunner.data.results.parts import FOOTER_KEY, Tally, read_said, reading_own, tally_of

_JSON_SUFFIXES = {"none": ".jsonl", "gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}
_CODECS = {suffix: codec for codec, suffix in _JSON_SUFFIXES.items() if codec != "none"}


def result_suffix(settings: Settings) -> str:
    """What the names of a job's result files end in. JSON lines are plain unless asked for."""
    if settings.input.format == "openai":
        return RESPONSES_SUFFIX
    output = settings.output
    if output.format != "jsonl":
        return ".parquet"
    asked = "compression" in output.model_fields_set
    return _JSON_SUFFIXES[output.compression if asked else "none"]


class RowWriter(Protocol):
    """The result of a shard being written; it sums up what goes in."""

    tally: Tally

    def write(self, table: pa.Table) -> None:
        """Write the next rows, kept columns before outcomes."""


class ResultWriter:
    """A result file being written; it sums up what goes in."""

    def __init__(self, file: pq.ParquetWriter | _JsonLines) -> None:
        self._file = file
        self.tally = Tally()

    def write(self, table: pa.Table) -> None:
        """Write the next rows, kept columns before outcomes."""
        self._file.write_table(table)
        self.tally += tally_of(table)


@contextmanager
def writing_result(
    run: RunDirectory,
    shard: str,
    schema: pa.Schema,
    compression: str,
    provenance: Mapping[str, object],
) -> Iterator[ResultWriter]:
    """Write the result file of a shard; it is there, whole, when the block ends well.

    `compression` is for Parquet: the name of a JSON file says its own.
    """
    with run.writing(run.result(shard)) as temporary:
        if run.suffix == ".parquet":
            with pq.ParquetWriter(temporary, schema, compression=compression) as file:
                yield (writer := ResultWriter(file))
                said = {"tally": asdict(writer.tally), **provenance}
                file.add_key_value_metadata({FOOTER_KEY: json.dumps(said)})
            return
        with _JsonLines(temporary, run.suffix) as lines:
            yield (writer := ResultWriter(lines))
        write_tally(run, shard, temporary, writer.tally, provenance)


def write_tally(
    run: RunDirectory,
    shard: str,
    temporary: Path,
    tally: Tally,
    provenance: Mapping[str, object],
) -> None:
    """Write what a result file says of itself, before it gets its name."""
    said = {"result": _mark(temporary), "tally": asdict(tally), **provenance}
    with run.writing(run.tally(shard)) as beside:
        beside.write_text(json.dumps(said, indent=1))


def read_result_tally(run: RunDirectory, shard: str) -> Tally:
    """Read the sums of a finished shard; add them up where they are not on record."""
    path = run.result(shard)
    if run.suffix == ".parquet":
        with reading_own(path):
            return Tally(**read_said(path)["tally"])
    said = _read_beside(run.tally(shard))
    if said is not None and said.get("result") == _mark(path):
        with reading_own(run.tally(shard)):
            return Tally(**said["tally"])
    # a kill came between the two files, or the folder was copied
    return sum(map(tally_of, read_outcomes(run, shard, OUTCOME_SCHEMA)), Tally())


def read_outcomes(run: RunDirectory, shard: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Stream the outcomes of a result file, those columns of `schema`, a window at a time."""
    path, rows = run.result(shard), window_rows(schema.names)
    with reading_own(path):
        if run.suffix == ".parquet":
            with pq.ParquetFile(path, pre_buffer=False) as file:
                # a column of the input may be called `row.x`, which Arrow takes for a part of `row`
                for batch in file.iter_batches(rows, columns=schema.names, use_threads=False):
                    yield pa.Table.from_batches([batch.select(schema.names)]).cast(schema)
            return
        if run.suffix == RESPONSES_SUFFIX:
            yield from read_answer_outcomes(run, shard, schema)
            return
        for objects in read_json_rows(path, run.suffix, rows):
            yield outcomes_of(objects, schema)


def read_json_rows(path: Path, suffix: str, rows: int) -> Iterator[list[dict[str, Any]]]:
    """Stream the objects of a file of JSON lines, at most so many at a time.

    Raises ValueError where a line is no JSON object.
    """
    with (
        pa.input_stream(str(path), compression=_CODECS.get(suffix)) as file,
        io.TextIOWrapper(file, encoding="utf-8", newline="\n") as lines,
    ):
        while window := [json.loads(line) for line in islice(lines, rows)]:
            if not all(isinstance(row, dict) for row in window):
                raise ValueError("a line is no JSON object")
            yield window


def outcomes_of(objects: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Make a table of outcomes out of JSON objects. Raises KeyError, TypeError, ArrowInvalid."""
    return pa.Table.from_arrays(
        [pa.array([row[field.name] for row in objects], field.type) for field in schema],
        schema=schema,
    )


class _JsonLines:
    """Writes tables as lines of strict JSON, one object a row, its keys in the schema's order."""

    def __init__(self, path: Path, suffix: str) -> None:
        self._file = pa.output_stream(str(path), compression=_CODECS.get(suffix))

    def write_table(self, table: pa.Table) -> None:
        columns = [json_values(column) for column in table.columns]
        for row in zip(*columns, strict=True):
            line = json.dumps(
                dict(zip(table.column_names, row, strict=True)),
                ensure_ascii=False,
                allow_nan=False,
            )
            self._file.write(f"{line}\n".encode())

    def __enter__(self) -> _JsonLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def _mark(path: Path) -> dict[str, int]:
    """What tells a result file from the one that it replaced."""
    stat = path.stat()
    return {"size": stat.st_size, "modified_ns": stat.st_mtime_ns}


def _read_beside(path: Path) -> dict[str, Any] | None:
    try:
        said = json.loads(path.read_text())
    except OSError as error:
        if is_gone(error):
            return None
        raise
    except ValueError:
        # it only saves reading the result
        return None
    return said if isinstance(said, dict) else None
