"""`cbjob verify` finds what is wrong, and nothing else."""

import json
import math
import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobrunner.commands.verify import find_problems, verify_command
from jobrunner.data.intervals import Intervals
from jobrunner.data.results.parts import FOOTER_KEY, Tally
from jobrunner.data.results.pending import Pending, write_pending
from tests.world import World


@pytest.fixture
def done(tmp_path, tiny_model):
    """A finished job of 12 rows in two shards, with kept columns of awkward types."""
    world = World(tmp_path, tiny_model)
    for name in ("a.parquet", "b.parquet"):
        path = tmp_path / "input" / name
        path.parent.mkdir(exist_ok=True)
        table = pa.table(
            {
                "prompt": [f"{name} {index}" for index in range(6)],
                "id": pa.array(["x", "y"] * 3).dictionary_encode(),
                "score": [0.5, math.nan, None, 1.0, 2.0, 3.0],
                "scores": [[0.5, math.nan], None, [], [1.0], [2.0], [3.0]],
            }
        )
        pq.write_table(table, path)
    text = world.job_file.read_text().replace('["id"]', '["id", "score", "scores"]')
    world.job_file.write_text(text)
    world.run()
    return world


def rewrite(world, change):
    """Change a result file as another program would that keeps what the footer says."""
    path = world.directory.result("a.parquet")
    said = {FOOTER_KEY: pq.read_metadata(path).metadata[FOOTER_KEY]}
    pq.write_table(change(pq.read_table(path)).replace_schema_metadata(said), path)


def set_column(table, name, values, type_=None):
    place = table.schema.get_field_index(name)
    field = table.schema.field(place)
    return table.set_column(place, field, pa.array(values, type_ or field.type))


def test_a_right_job_verifies_also_with_nan_and_dictionaries(done):
    assert done.problems() == []


def test_rewriting_a_result_without_changing_it_is_no_problem(done):
    rewrite(done, lambda table: table)
    assert done.problems() == []


WRONG = {
    "rows swapped": lambda t: t.take([1, 0, 2, 3, 4, 5]),
    "a row missing": lambda t: t.slice(0, 5),
    "a row doubled": lambda t: pa.concat_tables([t, t.slice(5)]),
    "a kept value changed": lambda t: set_column(t, "score", [0.6, math.nan, None, 1, 2, 3]),
    "an answer gone": lambda t: set_column(t, "text", [None] * 6),
    "an answer emptied of its reason": lambda t: set_column(t, "finish_reason", [None] * 6),
    "a reason that does not exist": lambda t: set_column(t, "finish_reason", ["banana"] * 6),
    "an error on an ok row": lambda t: set_column(t, "error", ["oops"] + [None] * 5),
    "tokens below zero": lambda t: set_column(t, "output_tokens", [-7, 1, 1, 1, 1, 1]),
    "sums that differ": lambda t: set_column(t, "output_tokens", [700, 1, 1, 1, 1, 1]),
    "an error without a kind": lambda t: set_column(t, "status", ["error"] + ["ok"] * 5),
    "a column gone": lambda t: t.drop_columns(["finish_reason"]),
    "a column more": lambda t: t.append_column("more", pa.array(range(6))),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_result_file_is_found(done, change):
    rewrite(done, change)
    assert any("a.parquet" in problem for problem in done.problems())


def test_a_damaged_result_file_is_found(done):
    path = done.directory.result("a.parquet")
    path.write_bytes(path.read_bytes()[:-30])
    assert any("cannot be read" in problem for problem in done.problems())


def test_a_missing_result_file_is_found(done):
    done.directory.result("a.parquet").unlink()
    assert done.problems() == ["shard a.parquet: not finished: 0 of 6 rows are done"]


@pytest.mark.parametrize(
    "name", ["results/c.parquet", ".cbjob/tmp/x", ".cbjob/parts/a.parquet/y", ".cbjob/claims/z"]
)
def test_a_stray_file_is_found(done, name):
    path = done.folder / "run" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    [problem] = done.problems()
    assert problem.startswith(f"stray file {path}")


def test_control_characters_of_names_do_not_reach_the_terminal(done, capsys):
    (done.directory.results / "\x1b[2J.parquet").touch()
    assert verify_command(done.job_file, limit=None, overrides=()) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_a_changed_input_is_found(done):
    path = done.folder / "input/a.parquet"
    pq.write_table(set_column(pq.read_table(path), "prompt", ["other"] * 6), path)
    [problem] = done.problems()
    assert problem.startswith("input shard `a.parquet`: footer")


LINES = ('output.format="jsonl"', 'output.columns=["token_ids", "chunks"]', "generation.n=2")


@pytest.fixture
def lines(done):
    """The same job with several samples, as JSON lines: its world and its run directory."""
    shutil.rmtree(done.folder / "run")
    path = done.folder / "input/b.parquet"
    pq.write_table(set_column(pq.read_table(path), "prompt", [None] * 6), path)
    done.run(*LINES)
    return done, replace(done.directory, suffix=".jsonl")


def problems_of(world, run):
    return list(find_problems(world.settings(*LINES), run))


def test_json_lines_with_samples_verify(lines):
    world, run = lines
    assert problems_of(world, run) == []
    rows = [json.loads(line) for line in run.result("a.parquet").read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.5, None, None, 1.0, 2.0, 3.0]
    assert [row["scores"] for row in rows[:3]] == [[0.5, None], None, []]
    assert {len(row["samples"]) for row in rows} == {2}
    assert rows[0]["token_ids"] == rows[0]["samples"][0]["token_ids"]
    errors = [json.loads(line) for line in run.result("b.parquet").read_text().splitlines()]
    assert {(row["status"], row["samples"]) for row in errors} == {("error", None)}


WRONG_LINES = {
    "rows swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
    "a row missing": lambda rows: rows[:-1],
    "a row doubled": lambda rows: [*rows, rows[-1]],
    "a kept value changed": lambda rows: [rows[0] | {"score": 0.6}, *rows[1:]],
    "a kept list changed": lambda rows: [rows[0] | {"scores": []}, *rows[1:]],
    "a sample gone": lambda rows: [rows[0] | {"samples": rows[0]["samples"][:1]}, *rows[1:]],
    "a sum changed": lambda rows: [rows[0] | {"output_tokens": 99}, *rows[1:]],
    "a key more": lambda rows: [rows[0] | {"more": 1}, *rows[1:]],
    "keys in another order": lambda rows: [dict(sorted(rows[0].items())), *rows[1:]],
    "a text for a number": lambda rows: [rows[0] | {"chunks": "one"}, *rows[1:]],
    "no object": lambda rows: [[1], *rows[1:]],
}


@pytest.mark.parametrize("change", WRONG_LINES.values(), ids=WRONG_LINES.keys())
def test_a_wrong_file_of_json_lines_is_found(lines, change):
    world, run = lines
    path = run.result("a.parquet")
    rows = change([json.loads(line) for line in path.read_text().splitlines()])
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert any(str(path) in problem for problem in problems_of(world, run))


def test_what_workers_say_and_what_is_spooled_may_stay(done):
    for name in (".cbjob/status/x.json", ".cbjob/input/train/0.parquet"):
        path = done.folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert done.problems() == []


def test_rows_that_run_again_are_not_finished(done):
    write_pending(done.directory, "a.parquet", Pending(Intervals([(2, 4)]), Tally(4)))
    assert done.problems() == ["shard a.parquet: not finished: 4 of 6 rows are done"]
