"""What a row becomes depends on no other row: whole jobs on a tiny real model, in float32."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_jobs import answers, write_parquet

# a seed of its own keys the draws of a row wherever it stands
ROWS: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "one plain prompt"},
    {"id": "top_k", "prompt": "two", "how": {"temperature": 1.5, "top_k": 5, "seed": 1}},
    {"id": "penalties", "prompt": "three", "how": {"repetition_penalty": 1.4, "top_p": 0.9}},
    {"id": "counted", "prompt": "4", "how": {"presence_penalty": 1.0, "frequency_penalty": 0.5}},
    {"id": "seed", "prompt": "five five", "how": {"temperature": 1.0, "seed": 7}},
    {"id": "stop", "prompt": "six", "how": {"stop": ["e", "a", "o", " "], "min_new_tokens": 1}},
    {"id": "n", "prompt": "seven", "how": {"temperature": 1.2, "seed": 3, "n": 3}},
    {"id": "also plain", "prompt": "one plain pr"},
]
NAMES = "temperature top_k top_p repetition_penalty presence_penalty frequency_penalty seed stop"
NAMES += " min_new_tokens n"


def answered(
    folder: Path, model: Path, rows: Sequence[Mapping[str, Any]], batch: int
) -> dict[str, dict[str, Any]]:
    """Run these rows as one job; return what became of them, by id."""
    how = [{name: row.get("how", {}).get(name) for name in NAMES.split()} for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("id", "prompt")}
    write_parquet(folder / "in/a.parquet", **columns, how=how)
    tables = {
        "input": {"path": "in", "prompt": "prompt", "params": ("how",), "keep": ("id",)},
        "batching": {"max_batch_size": batch},
    }
    found = answers(folder, model, tables)
    return {row.pop("id"): {k: v for k, v in row.items() if k != "row"} for row in found}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    return answered(tmp_path_factory.mktemp("together"), tiny_model, ROWS, batch=8)


def test_each_kind_of_row_shows_in_its_answer(together: dict[str, Any]) -> None:
    assert {row["status"] for row in together.values()} == {"ok"}
    assert together["stop"]["finish_reason"] == "stop"
    assert len({sample["text"] for sample in together["n"]["samples"]}) == 3


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_case_P_permuted_rows_in_batches_of_any_size_are_answered_alike(
    tmp_path: Path, tiny_model: Path, together: dict[str, Any], batch: int
) -> None:
    permuted = random.Random(batch).sample(ROWS, len(ROWS))
    assert answered(tmp_path, tiny_model, permuted, batch) == together


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_case_P_a_row_alone_is_answered_as_among_others(
    tmp_path: Path, tiny_model: Path, together: dict[str, Any], row: dict[str, Any]
) -> None:
    assert answered(tmp_path, tiny_model, [row], batch=1) == {row["id"]: together[row["id"]]}
