"""The same questions in every format that can hold them get equal answers, row by row.

Through the real engine, the chat template, and with one row that draws by a seed of its own.
With `pytest -s` this prints a table.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.models import demo_model_folder, missing_demo_files
from jobrunner.job import run
from tests.object_store import s3_server
from tests.tiny_jobs import result_rows, settings_of

ROOT = Path(__file__).parent.parent
Question = Mapping[str, Any]
SEEDED = {"temperature": 1.0, "seed": 7}
QUESTIONS: list[Question] = [
    {"id": f"q{number}", "prompt": f'Question {number}:\n"what, is" ' + "é😀 x" * (number % 5)}
    for number in range(12)
] + [{"id": "seeded", "prompt": "Draw something.", "how": SEEDED}]


class Answer(NamedTuple):
    text: str
    prompt_tokens: int
    output_tokens: int
    finish_reason: str


BY_PARAMS = {"prompt": "prompt", "chat": True, "params": ("how",), "keep": ("id",)}


def records(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The questions with all their columns."""
    return [{"id": q["id"], "prompt": q["prompt"], "how": q.get("how")} for q in questions]


def as_parquet(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    how = pa.struct({"temperature": pa.float64(), "seed": pa.int64()})
    schema = pa.schema({"id": pa.string(), "prompt": pa.string(), "how": how})
    pq.write_table(pa.Table.from_pylist(records(questions), schema), folder / "a.parquet")
    return {"path": "a.parquet", **BY_PARAMS}


def as_json_lines(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    lines = "".join(json.dumps(record) + "\n" for record in records(questions))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return {"path": "a.jsonl.gz", **BY_PARAMS}


def as_csv(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    with (folder / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "prompt", "how"])
        for record in records(questions):
            writer.writerow([record["id"], record["prompt"], json.dumps(record["how"])])
    return {"path": "a.csv", **BY_PARAMS}


def as_saved_dataset(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(records(questions)).save_to_disk(folder / "saved")
    return {"dataset": "saved", **BY_PARAMS}


def as_dataset_folder(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    pytest.importorskip("datasets")
    (folder / "data").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records(questions))
    (folder / "data/train.jsonl").write_text(lines)
    return {"dataset": "data", **BY_PARAMS}


def as_openai_batch(folder: Path, questions: Sequence[Question]) -> dict[str, Any]:
    lines = [
        {
            "custom_id": record["id"],
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "any",
                "messages": [{"role": "user", "content": record["prompt"]}],
                **(record["how"] or {}),
            },
        }
        for record in records(questions)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"path": "a.jsonl", "format": "openai"}


def in_s3(folder: Path, questions: Sequence[Question], store: Any) -> dict[str, Any]:
    as_parquet(folder, questions)
    store.put_file(str(folder / "a.parquet"), f"bucket/{folder.name}/a.parquet")
    return {**BY_PARAMS, "path": f"s3://bucket/{folder.name}"}


Write = Callable[[Path, Sequence[Question]], dict[str, Any]]
FORMATS: dict[str, Write] = {
    "Parquet": as_parquet,
    "JSON Lines, .gz": as_json_lines,
    "CSV": as_csv,
    "datasets, saved to disk": as_saved_dataset,
    "datasets, folder": as_dataset_folder,
    "OpenAI batch": as_openai_batch,
}


def answered(
    folder: Path, model: Path | str, table: Mapping[str, Any], new_tokens: int
) -> dict[str, Answer]:
    """Run a job over an input; return the answers by id."""
    tables = {
        "input": table,
        "generation": {"max_new_tokens": new_tokens},
        "batching": {"max_batch_size": 4},
    }
    summary = run(settings_of(folder, model, tables))
    [path] = summary.results.iterdir()
    read = of_openai if table.get("format") == "openai" else of_row
    return dict(map(read, result_rows(path)))


def of_row(row: Mapping[str, Any]) -> tuple[str, Answer]:
    return row["id"], Answer(*(row[name] for name in Answer._fields))


def of_openai(line: Mapping[str, Any]) -> tuple[str, Answer]:
    body = line["response"]["body"]
    [choice], usage = body["choices"], body["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return line["custom_id"], Answer(choice["message"]["content"], *counts, choice["finish_reason"])


def equal(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> int:
    """How many rows are answered as expected."""
    return sum(found.get(id_) == answer for id_, answer in expected.items())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Answer]:
    """The answers to the questions in Parquet."""
    folder = tmp_path_factory.mktemp("expected")
    return answered(folder, tiny_model, as_parquet(folder, QUESTIONS), 16)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with s3_server(tmp_path_factory.mktemp("weed")) as store:
        yield store


def show(name: str, found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> None:
    tokens = sum(answer.output_tokens for answer in found.values())
    print(f"\n{name:24} {len(found):3} rows {tokens:5} tokens {equal(found, expected):3} equal")


def test_the_questions_have_answers_that_differ(expected: dict[str, Answer]) -> None:
    assert len({answer.text for answer in expected.values()}) == len(QUESTIONS)


@pytest.mark.parametrize("name", FORMATS)
def test_questions_in_any_format_are_answered_as_in_parquet(
    tmp_path: Path, tiny_model: Path, expected: dict[str, Answer], name: str
) -> None:
    found = answered(tmp_path, tiny_model, FORMATS[name](tmp_path, QUESTIONS), 16)
    show(name, found, expected)
    assert found == expected


def test_questions_in_s3_are_answered_as_on_a_disk(
    tmp_path: Path, tiny_model: Path, expected: dict[str, Answer], s3: Any
) -> None:
    found = answered(tmp_path, tiny_model, in_s3(tmp_path, QUESTIONS, s3), 16)
    show("Parquet in S3", found, expected)
    assert found == expected


@pytest.mark.slow
@pytest.mark.skipif(
    bool(missing_demo_files(demo_model_folder())), reason="scripts/demo_model was not run"
)
def test_the_demo_model_answers_16_real_questions_alike(tmp_path: Path, s3: Any) -> None:
    source = sorted((ROOT / "jobs/data/gsm8k").glob("*.parquet"))
    rows = pa.concat_tables(map(pq.read_table, source)).to_pylist()[:16]
    questions = [{"id": str(n), "prompt": row["question"]} for n, row in enumerate(rows)]
    formats = {**FORMATS, "Parquet in S3": lambda folder, asked: in_s3(folder, asked, s3)}
    expected: dict[str, Answer] = {}
    for name, write in formats.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        found = answered(folder, "demo", write(folder, questions), 48)
        expected = expected or found
        show(name, found, expected)
        assert found == expected
