"""Whole jobs over shards of odd shape: huge row groups and prompts, other types, no rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.data.models import demo_model_folder, missing_demo_files
from jobrunner.errors import ExitCode
from tests.tiny_jobs import answers, kinds, write_parquet
from tests.tiny_tokenizers import byte_level
from tests.world import World

RAW = {"prompt": "prompt", "chat": False}
MOST_MORE_BYTES = 25_000_000


def in_child(work: Callable[[], None]) -> int:
    """Do some work in a child process; return by how many bytes its memory grew at the most."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = memory_bytes("VmRSS")
            work()
            os.write(writer, str(memory_bytes("VmHWM") - before).encode())
            os._exit(0)
        finally:
            os._exit(99)
    os.close(writer)
    said = os.read(reader, 99)
    os.close(reader)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return int(said)


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def grown_by_a_job(folder: Path, model: Path, ids: list[str], limit: int) -> int:
    """Run the first rows of one row group in a child; return how many bytes that took.

    Null prompts cost no tokens; what is kept no codec shrinks.
    """
    world = World(folder, model)
    (folder / "input").mkdir()
    table = pa.table({"id": ids, "prompt": pa.nulls(len(ids), pa.string())})
    path = folder / "input/a.parquet"
    pq.write_table(table, path, row_group_size=len(ids), use_dictionary=False, compression=None)
    del table

    def work() -> None:
        done = world.run("errors.max_rate=1.0", limit=limit)
        assert done.exit_code == ExitCode.ROW_ERRORS

    growth = in_child(work)
    [found] = world.results().values()
    assert [row["id"] for row in found] == ids[:limit]
    return growth


def test_case_W_one_row_group_of_200_thousand_rows_is_read_as_far_as_it_is_needed(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows, wanted = 200_000, 1_000
    noise = os.urandom(250 * rows).hex()
    ids = [noise[500 * row : 500 * row + 500] for row in range(rows)]
    growth = []
    for name, some in {"small": ids[:wanted], "huge": ids}.items():
        (tmp_path / name).mkdir()
        growth.append(grown_by_a_job(tmp_path / name, tiny_model, some, wanted))
    print(f"memory grew by {growth[0] / 1e6:.0f} MB, in a huge row group {growth[1] / 1e6:.0f} MB")
    # a hundred million bytes are in the huge row group
    assert growth[1] - growth[0] < MOST_MORE_BYTES


@pytest.mark.slow
def test_case_V_memory_does_not_grow_with_the_rows_of_one_row_group(tmp_path: Path) -> None:
    """20 thousand against 200 thousand rows, with the tokenizer of the demo model if it is here."""
    script = Path(__file__).parent.parent / "scripts/bench_memory"
    tokenizer = "demo"
    if missing_demo_files(demo_model_folder()):
        tokenizer = str(byte_level(tmp_path / "model"))
    done = subprocess.run([sys.executable, script, tmp_path, "--tokenizer", tokenizer], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("too_long", ["error", "truncate_left"])
def test_case_W_a_prompt_of_a_megabyte_between_short_ones(
    tmp_path: Path, tiny_model: Path, too_long: str
) -> None:
    big = "word " * 200_000
    write_parquet(tmp_path / "in/a.parquet", prompt=["before", big, "after"])
    rows = answers(tmp_path, tiny_model, {"input": {**RAW, "path": "in", "too_long": too_long}})
    kind = "prompt_too_long" if too_long == "error" else "ok"
    assert kinds(rows) == ["ok", kind, "ok"]
    write_parquet(tmp_path / "short/a.parquet", prompt=["before", "after"])
    expected = answers(tmp_path, tiny_model, {"input": {**RAW, "path": "short"}}, "other")
    assert [rows[0]["text"], rows[2]["text"]] == [row["text"] for row in expected]


TEXTS = ["one", "two", "one", "three"]
COLUMNS: dict[str, Callable[[], pa.Array]] = {
    "large_string": lambda: pa.array(TEXTS, pa.large_string()),
    "dictionary": lambda: pa.array(TEXTS).dictionary_encode(),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    """What the texts become as a plain column."""
    folder = tmp_path_factory.mktemp("plain")
    write_parquet(folder / "in/a.parquet", prompt=TEXTS)
    table = {"path": "in", "prompt": "prompt", "chat": True}
    return answers(folder, tiny_model, {"input": table})


@pytest.mark.parametrize("kind", COLUMNS)
def test_case_W_prompts_of_other_types_of_text_are_answered_alike(
    tmp_path: Path, tiny_model: Path, plain: list[dict[str, Any]], kind: str
) -> None:
    column = COLUMNS[kind]()
    write_parquet(tmp_path / "in/a.parquet", prompt=column, id=column)
    table = {"path": "in", "prompt": "prompt", "chat": True, "keep": ("id",)}
    rows = answers(tmp_path, tiny_model, {"input": table})
    assert [row.pop("id") for row in rows] == TEXTS
    assert rows == plain


def test_case_W_messages_as_lists_of_structs_are_answered_like_their_prompts(
    tmp_path: Path, tiny_model: Path, plain: list[dict[str, Any]]
) -> None:
    turn = pa.struct({"role": pa.string(), "content": pa.string(), "name": pa.string()})
    turns = pa.array([[{"role": "user", "content": text}] for text in TEXTS], pa.list_(turn))
    write_parquet(tmp_path / "in/a.parquet", turns=turns)
    assert answers(tmp_path, tiny_model, {"input": {"path": "in", "messages": "turns"}}) == plain


def test_case_W_shards_without_rows_and_with_only_errors_have_their_results(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_parquet(tmp_path / "in/a.parquet", prompt=pa.array([], pa.string()))
    write_parquet(tmp_path / "in/b.parquet", prompt=[None, "", None])
    write_parquet(tmp_path / "in/c.parquet", prompt=["good"])
    rows = answers(tmp_path, tiny_model, {"input": {**RAW, "path": "in"}})
    assert kinds(rows) == ["null_prompt", "empty_prompt", "null_prompt", "ok"]
    found = sorted(path.name for path in (tmp_path / "run/results").iterdir())
    assert found == ["a.parquet", "b.parquet", "c.parquet"]
