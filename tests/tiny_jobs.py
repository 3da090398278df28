"""Whole jobs in a few lines: settings in, rows out, through the real engine. Know no fakes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobrunner.config import Settings
from jobrunner.job import run

Tables = Mapping[str, Mapping[str, Any]]


def settings_of(folder: Path, model: Path | str, tables: Tables, run_name: str = "run") -> Settings:
    """Settings of a quiet float32 job in `folder`; `tables` are those of a job file."""
    fixed: dict[str, dict[str, Any]] = {
        "output": {"path": run_name},
        "model": {"name": str(model), "dtype": "float32", "threads": 1},
        "generation": {"max_new_tokens": 12},
        "progress": {"style": "off"},
    }
    names = [*fixed, *(name for name in tables if name not in fixed)]
    merged = {name: {**fixed.get(name, {}), **tables.get(name, {})} for name in names}
    return Settings.model_validate({**merged, "folder": folder})


def answers(
    folder: Path, model: Path | str, tables: Tables, run_name: str = "run"
) -> list[dict[str, Any]]:
    """Run a job; return the rows of all result files, in the order of their names."""
    summary = run(settings_of(folder, model, tables, run_name))
    return [row for path in sorted(summary.results.rglob("*.*")) for row in result_rows(path)]


def result_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of one result file."""
    if path.suffix == ".parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_parquet(path: Path, **columns: Iterable[Any] | pa.Array) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: c if isinstance(c, pa.Array) else list(c) for name, c in columns.items()}
    pq.write_table(pa.table(arrays), path)
    return path


def kinds(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What became of each row: `ok` or the kind of its error."""
    return [row["error_kind"] or row["status"] for row in rows]
