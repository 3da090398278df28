"""Say how to read the rows that a job has committed so far, each once, with DuckDB."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobrunner.data.layout import RunDirectory, files_in
from jobrunner.data.openai.reading import RESPONSES_SUFFIX

# columns that come with the rows: the name of the result file that a row is in, or will be
RESULT_COLUMN = "_result"
_FILE = "_file"


def committed_rows_sql(run: RunDirectory, unmerged: Sequence[str]) -> str | None:
    """Write the query for every committed row of a run directory; None where there is none.

    `unmerged` are the shards without a result file. It reads result files as they are when it
    runs, and the parts that `unmerged` shards have now, unless the shard is finished then: so a
    row is read once, whatever the workers commit and merge meanwhile. Of two parts that hold a
    row, as two workers may have written, the first by name counts.
    """
    parts = {
        str(run.parts(shard)): _relative(run, run.result(shard))
        for shard in unmerged
        if any(path.suffix == ".parquet" for path in files_in(run.parts(shard)))
    }
    merged = any(path.is_file() for path in run.results.rglob("*"))
    if merged and parts:
        return _both(_results(run), _parts(parts))
    if merged:
        return f"SELECT * EXCLUDE ({_FILE}) FROM ({_results(run)})"
    return f"SELECT * EXCLUDE ({_FILE}) FROM ({_parts(parts)})" if parts else None


def _both(results: str, parts: str) -> str:
    return (
        f"WITH results AS ({results}), parts AS ({parts}) "
        f"SELECT * EXCLUDE ({_FILE}) FROM results UNION ALL BY NAME "
        f"SELECT * EXCLUDE ({_FILE}) FROM parts "
        f"WHERE {RESULT_COLUMN} NOT IN (SELECT {RESULT_COLUMN} FROM results)"
    )


def _results(run: RunDirectory) -> str:
    if run.suffix == RESPONSES_SUFFIX:
        return _answers(run)
    function = "read_parquet" if run.suffix == ".parquet" else "read_json"
    return _result_files(run, function, run.suffix, _name_in_results(run, _FILE))


def _answers(run: RunDirectory) -> str:
    """An OpenAI batch has two files a shard; it is finished when the response file is there."""
    name = _name_in_results(run, _FILE)
    name = f"regexp_replace({name}, '[.]errors[.]jsonl$', '{RESPONSES_SUFFIX}')"
    finished = f"SELECT {_name_in_results(run, 'file')} FROM glob({_pattern(run, run.suffix)})"
    return f"{_result_files(run, 'read_json', '.jsonl', name)} WHERE {name} IN ({finished})"


def _result_files(run: RunDirectory, function: str, suffix: str, name: str) -> str:
    options = f"filename='{_FILE}', union_by_name=true, hive_partitioning=false"
    return (
        f"SELECT {name} AS {RESULT_COLUMN}, * FROM {function}({_pattern(run, suffix)}, {options})"
    )


def _pattern(run: RunDirectory, suffix: str) -> str:
    return _literal(f"{glob.escape(str(run.results))}/**/*{suffix}")


def _name_in_results(run: RunDirectory, path: str) -> str:
    return f"substr({path}, {len(str(run.results)) + 2})"


def _parts(parts: Mapping[str, str]) -> str:
    patterns = ", ".join(_literal(f"{glob.escape(folder)}/*.parquet") for folder in parts)
    options = f"filename='{_FILE}', union_by_name=true, hive_partitioning=false"
    names = ", ".join(f"({_literal(folder)}, {_literal(name)})" for folder, name in parts.items())
    return (
        f"SELECT {RESULT_COLUMN}, p.* FROM read_parquet([{patterns}], {options}) p "
        f"JOIN (VALUES {names}) n(_folder, {RESULT_COLUMN}) "
        f"ON _folder = regexp_replace({_FILE}, '/[^/]*$', '') "
        f'QUALIFY row_number() OVER (PARTITION BY {RESULT_COLUMN}, "row" ORDER BY {_FILE}) = 1'
    )


def _relative(run: RunDirectory, path: Path) -> str:
    return path.relative_to(run.results).as_posix()


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
