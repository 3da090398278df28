"""Whole jobs over OpenAI batch files, run with the fake model."""

import json

import duckdb
import pytest

from jobrunner.commands.reading import committed_rows_sql
from jobrunner.data.claims import Claims, Identity
from jobrunner.data.layout import RunDirectory
from jobrunner.data.openai import writing
from jobrunner.data.openai.reading import ERRORS_SUFFIX, RESPONSES_SUFFIX
from jobrunner.data.prompts import prompts
from jobrunner.data.prompts.faults import RowFault
from jobrunner.data.results.retry import mark_retries
from jobrunner.errors import ConfigError, ExitCode
from tests.world import World, kill

JOB = """
[input]
path = "input"
format = "openai"
[output]
path = "run"
[model]
name = {model!r}
dtype = "float32"
[generation]
max_new_tokens = 12
[progress]
style = "off"
[checkpoint]
every = "1h"
part_rows = 4
"""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHARD = "batch.jsonl"


class BatchWorld(World):
    """A job over batch files."""

    def __init__(self, folder, model):
        super().__init__(folder, model)
        self.job_file.write_text(JOB.format(model=str(model)))

    def add_batch(self, lines, name=SHARD):
        path = self.folder / "input" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in map(json.dumps, lines)))

    @property
    def directory(self):
        return RunDirectory(self.folder / "run", "test-0-00", RESPONSES_SUFFIX)

    def responses(self, name="batch"):
        return self.lines(name + RESPONSES_SUFFIX)

    def errors(self, name="batch"):
        return self.lines(name + ERRORS_SUFFIX)

    def lines(self, name):
        """The lines of a result file, without the time when the job was begun."""
        lines = [json.loads(line) for line in (self.directory.results / name).open()]
        for line in lines:
            line["response"]["body"].pop("created", None)
        return lines

    def files(self):
        """All result files with their lines."""
        return {path.name: self.lines(path.name) for path in self.directory.results.iterdir()}


def request(custom_id, url=CHAT, **body):
    asked = (
        {"messages": [{"role": "user", "content": f"Hello {custom_id}"}]}
        if url == CHAT
        else {"prompt": f"Hello {custom_id}"}
    )
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**asked, **body}}


def some_requests(count, wrong=()):
    """Requests of all sorts; those whose number is in `wrong` ask for the impossible."""
    sorts = [
        {},
        {"url": COMPLETIONS, "logprobs": 2},
        {"n": 3, "temperature": 0.7, "seed": 5},
        {"logprobs": True, "top_logprobs": 1, "max_tokens": 4},
    ]
    return [
        request(f"r{number}", **sorts[number % 4], **({"top_p": 7} if number in wrong else {}))
        for number in range(count)
    ]


def ids(lines):
    return [line["custom_id"] for line in lines]


@pytest.fixture
def world(tmp_path, tiny_model):
    return BatchWorld(tmp_path, tiny_model)


@pytest.fixture
def other_world(tmp_path, tiny_model):
    folder = tmp_path / "other"
    folder.mkdir()
    return BatchWorld(folder, tiny_model)


def test_every_request_has_a_line_in_one_of_two_files(world):
    world.add_batch(some_requests(11, wrong={2, 7}))
    assert world.run().exit_code == ExitCode.ROW_ERRORS
    assert ids(world.responses()) == [f"r{number}" for number in range(11) if number not in (2, 7)]
    assert ids(world.errors()) == ["r2", "r7"]
    assert world.problems() == []


def test_nesting_near_pythons_own_bound_is_the_same_row_to_all_who_read_it(world):
    levels = [1, 100, 300, *range(860, 1000, 2)]
    lines = [{**request(f"r{depth}"), "more": [depth]} for depth in levels]
    world.add_batch(lines)
    path = world.folder / "input" / SHARD
    nested = [
        line.replace(f"[{depth}]", "[" * depth + "]" * depth)
        for depth, line in zip(levels, path.read_text().splitlines(), strict=True)
    ]
    path.write_text("\n".join(nested))
    assert world.run().exit_code == ExitCode.ROW_ERRORS
    assert ids(world.responses()) == ["r1", "r100"]
    assert world.problems() == []


def test_no_errors_make_no_error_file(world):
    world.add_batch(some_requests(5))
    assert world.run().exit_code == ExitCode.OK
    assert list(world.files()) == ["batch.responses.jsonl"]
    assert world.problems() == []


def test_batch_without_an_answer_has_an_empty_response_file(world):
    world.add_batch(some_requests(3, wrong={0, 1, 2}))
    world.run()
    assert world.responses() == []
    assert ids(world.errors()) == ["r0", "r1", "r2"]
    assert world.problems() == []


def test_request_for_n_has_n_choices(world):
    world.add_batch([request("a", n=3, temperature=0.7)])
    world.run()
    (line,) = world.responses()
    body = line["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1


def test_each_request_gets_the_log_probabilities_it_asks_for(world):
    world.add_batch(some_requests(4))
    world.run()
    chat, completion, samples, top = (line["response"]["body"] for line in world.responses())
    assert chat["choices"][0]["logprobs"] is None
    assert [choice["logprobs"] for choice in samples["choices"]] == [None, None, None]
    tokens = completion["usage"]["completion_tokens"]
    assert len(completion["choices"][0]["logprobs"]["top_logprobs"]) == tokens
    content = top["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [1] * len(content)


def test_unlikely_token_is_spelled_as_a_number(world):
    world.add_batch([request("a", COMPLETIONS, logprobs=2)])
    world.run()
    (line,) = world.responses()
    tokens = line["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"]
    assert all(min(top.values()) == -9999.0 for top in tokens)


def test_line_that_is_no_json_is_an_error_without_a_name(world):
    world.add_batch(some_requests(2))
    with (world.folder / "input" / SHARD).open("a") as file:
        file.write('{"custom_id": \n')
    world.run()
    assert ids(world.responses()) == ["r0", "r1"]
    (line,) = world.errors()
    assert line["custom_id"] is None
    assert "the line is not JSON" in line["response"]["body"]["error"]["message"]
    assert world.problems() == []


def test_error_says_what_is_wrong_with_which_row(world):
    world.add_batch([request("a"), request("b", stream=True)])
    world.run()
    (line,) = world.errors()
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == (
        "row 1 of `batch.jsonl` asks for what cannot be done here: `stream`"
    )


def test_shards_named_like_error_files_keep_their_own_files(world):
    world.add_batch(some_requests(2, wrong={0}))
    world.add_batch(some_requests(1), name="batch.errors.jsonl")
    world.run()
    assert ids(world.errors()) == ["r0"]
    assert ids(world.responses("batch.errors")) == ["r0"]
    assert world.problems() == []


def test_stopped_job_goes_on_to_the_same_files(world, other_world):
    requests = some_requests(12, wrong={5})
    for one in (world, other_world):
        one.add_batch(requests)
    assert world.run_and_stop(6, batch=4).exit_code == ExitCode.RUN_AGAIN
    world.run()
    other_world.run()
    assert world.files() == other_world.files()
    assert world.problems() == []


def test_kill_between_the_two_files_leaves_both_to_be_written(world, other_world):
    requests = some_requests(9, wrong={4})

    def kill_before_responses():
        writing.write_tally = lambda *arguments: kill()

    for one in (world, other_world):
        one.add_batch(requests)
    assert world.fork(kill_before_responses) < 0
    assert list(world.files()) == ["batch.errors.jsonl"]
    world.run()
    other_world.run()
    assert world.files() == other_world.files()
    assert world.problems() == []


def retry_errors(world):
    run = world.directory
    claims = Claims(run.claims, run.temporary, Identity.of_this_process("cpu"))
    return mark_retries(run, [SHARD], claims)


def test_retried_rows_join_the_lines_that_were_there(world, monkeypatch):
    world.add_batch(some_requests(8))
    fails = {"r1", "r6"}

    def fail(record):
        if record["custom_id"] in fails:
            raise RowFault("internal", "failed")
        return read_request(record)

    read_request = prompts.read_request
    monkeypatch.setattr(prompts, "read_request", fail)
    world.run()
    before = {line["custom_id"]: line for line in world.responses()}
    assert ids(world.errors()) == ["r1", "r6"]
    fails.remove("r6")
    assert retry_errors(world) == 2
    world.run()
    after = {line["custom_id"]: line for line in world.responses()}
    assert list(after) == ["r0", "r2", "r3", "r4", "r5", "r6", "r7"]
    assert {name: line for name, line in after.items() if name != "r6"} == before
    assert ids(world.errors()) == ["r1"]
    assert world.problems() == []


def test_last_error_that_is_mended_takes_its_file_along(world, monkeypatch):
    world.add_batch(some_requests(3))
    with monkeypatch.context() as patch:
        patch.setattr(prompts, "read_request", always_failing)
        world.run()
    retry_errors(world)
    world.run()
    assert list(world.files()) == ["batch.responses.jsonl"]
    assert ids(world.responses()) == ["r0", "r1", "r2"]
    assert world.problems() == []


def always_failing(record):
    raise RowFault("internal", "failed")


def test_sums_survive_the_loss_of_their_record(world):
    world.add_batch(some_requests(6, wrong={3}))
    tally = world.run().tally
    world.directory.tally(SHARD).unlink()
    again = world.run().tally
    assert (again.rows, again.errors, again.output_tokens) == (
        tally.rows,
        tally.errors,
        tally.output_tokens,
    )


def test_committed_rows_are_read_once_while_a_shard_is_merged(world):
    world.add_batch(some_requests(6, wrong={3}))
    world.add_batch(some_requests(20, wrong={9}), name="later.jsonl")
    write_tally = writing.write_tally

    def kill_before_later_responses():
        writing.write_tally = lambda run, shard, *rest: (
            kill() if shard == "later.jsonl" else write_tally(run, shard, *rest)
        )

    assert world.fork(kill_before_later_responses) < 0
    assert sorted(world.files()) == [
        "batch.errors.jsonl",
        "batch.responses.jsonl",
        "later.errors.jsonl",
    ]
    query = committed_rows_sql(world.directory, ["later.jsonl"])
    counted = duckdb.sql(f"SELECT _result, count(*) FROM ({query}) GROUP BY ALL").fetchall()
    assert sorted(counted) == [("batch.responses.jsonl", 6), ("later.responses.jsonl", 20)]


@pytest.mark.parametrize(
    "override",
    [
        'output.format="parquet"',
        'output.columns=["token_ids"]',
        "output.logprobs=1",
        'output.compression="gzip"',
        'input.prompt="body"',
        'input.keep=["custom_id"]',
        'input.prefill="Yes"',
    ],
)
def test_key_without_a_place_in_a_batch_is_refused(world, override):
    with pytest.raises(ConfigError, match="OpenAI batch"):
        world.settings(override)


def test_answers_of_openai_need_a_batch_of_openai(world):
    with pytest.raises(ConfigError, match="needs `input"):
        world.settings('input.format="jsonl"', 'input.prompt="body"', 'output.format="openai"')


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines[:1] + lines[2:], "rows are not 0 to 4 in order"),
        (lambda lines: lines[:-1], "rows are not 0 to 4 in order"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "rows are not 0 to 4 in order"),
        (lambda lines: [*lines, lines[-1]], "rows are not 0 to 4 in order"),
        (lambda lines: [lines[0].replace('"r0"', '"r9"'), *lines[1:]], "answers another request"),
        (lambda lines: [lines[0].replace(": 200", ": 500"), *lines[1:]], "neither answered nor"),
        (lambda lines: [lines[0][:50], *lines[1:]], "cannot be read"),
        (lambda lines: ["{}\n", *lines[1:]], "cannot be read"),
    ],
    ids="lost last_lost swapped doubled renamed refused cut empty".split(),
)
def test_verify_sees_a_changed_response_file(world, change, problem):
    world.add_batch(some_requests(5, wrong={4}))
    world.run()
    path = world.directory.result(SHARD)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert any(problem in found for found in world.problems())


def test_verify_sees_a_lost_error_file(world):
    world.add_batch(some_requests(5, wrong={4}))
    world.run()
    (world.directory.results / "batch.errors.jsonl").unlink()
    (found,) = world.problems()
    assert "has with its error file 4 rows, its shard 5" in found
