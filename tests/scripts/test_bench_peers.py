"""The requests that engines are compared on, and cbjob beside a peer on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PEERS = SCRIPTS / "peers"

# whole benchmarks, if small ones
pytestmark = pytest.mark.slow


def run_script(path: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *map(str, options)], capture_output=True, text=True
    )


def lengths_file(path: Path, *lengths: tuple[int, int]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt_tokens", "output_tokens"), *lengths])
    return path


def test_the_second_workload_is_what_its_formula_gives(tmp_path):
    assert run_script(PEERS / "workload.py", "--long-answers", tmp_path / "a").returncode == 0
    assert (tmp_path / "a").read_text() == (PEERS / "long_answers.csv").read_text()


def test_requests_have_their_lengths_begin_differently_and_are_the_same_again(tmp_path, tiny_model):
    lengths = PEERS / "lengths.csv"
    done = run_script(PEERS / "workload.py", tiny_model, lengths, tmp_path / "a")
    assert done.returncode == 0, done.stderr
    requests = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    with lengths.open() as file:
        wanted = [(int(r["prompt_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
    assert [(len(r["prompt_token_ids"]), r["max_tokens"]) for r in requests] == wanted
    # so no engine can share a block between two prompts
    assert len({tuple(request["prompt_token_ids"][:16]) for request in requests}) == 256
    run_script(PEERS / "workload.py", tiny_model, lengths, tmp_path / "b", "--limit", 9)
    lines = (tmp_path / "a").read_text().splitlines()
    assert (tmp_path / "b").read_text().splitlines() == lines[:9]


RUNNER = """
import os, sys
sys.path.insert(0, {peers!r})
from serving import Channel, Row, serve, timed
channel = Channel()
print("what a library prints")
os.system("echo what its child prints")
seen = []
def generate(rows):
    seen.append([row.max_tokens for row in rows])
    print(seen, file=sys.stderr)
    return [[7] * row.max_tokens for row in rows]
rows = [Row([1], n) for n in (1, 40, 3, 4, 5)]
serve(channel, rows, timed(generate), version="1", config="none")
"""


def test_a_runner_warms_up_answers_when_told_and_keeps_stdout_for_that():
    program = [sys.executable, "-c", RUNNER.format(peers=str(PEERS))]
    done = subprocess.run(program, input="run\nrun\n", capture_output=True, text=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert said[0] == {"ready": True, "version": "1", "config": "none"}
    assert [answer["lengths"] for answer in said[1:]] == [[1, 40, 3, 4, 5]] * 2
    # a few rows, of a few tokens, to warm up
    assert done.stderr.splitlines()[2] == "[[1, 16, 3, 4]]"
    assert done.returncode == 0


def test_a_runner_refuses_what_is_no_command():
    program = [sys.executable, "-c", RUNNER.format(peers=str(PEERS))]
    done = subprocess.run(program, input="walk\n", capture_output=True, text=True)
    assert done.returncode == 1
    assert "not a command" in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--peer", "vlm=python"], "the peers are vllm"),
        (["--peer", "openvino=python"], "needs --openvino-model"),
    ],
)
def test_peers_that_cannot_be_run_are_refused(options, words):
    done = run_script(SCRIPTS / "bench_peers", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_cbjob_and_a_peer_answer_in_turns(tmp_path, tiny_model):
    lengths = lengths_file(tmp_path / "few.csv", (9, 3), (20, 5), (12, 1), (11, 1))
    options = ["--model", tiny_model, "--dtype", "float32", "--threads", 1]
    options += ["--workload", lengths, "--limit", 3, "--repeats", 2, "--wait-quiet", 0]
    done = run_script(SCRIPTS / "bench_peers", *options, "--peer", "generate=")
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # none always goes first
    assert [run["engine"] for run in runs] == ["cbjob", "generate", "generate", "cbjob"]
    assert {(run["output_tokens"], run["wrong_rows"]) for run in runs} == {(9, 0)}
    assert all(run["wall_s"] >= 0 and run["peak_memory_mb"] > 50 for run in runs)
    assert "| cbjob 0" in done.stdout
    assert "every engine has made exactly the tokens that were asked for" in done.stdout


def test_a_peer_that_cannot_start_is_named(tmp_path, tiny_model):
    lengths = lengths_file(tmp_path / "few.csv", (9, 1))
    (tmp_path / "python").write_text("#!/bin/sh\nexit 5\n")
    os.chmod(tmp_path / "python", 0o755)
    options = ["--model", tiny_model, "--workload", lengths, "--threads", 1]
    options += ["--dtype", "float32", "--peer", f"generate={tmp_path / 'python'}"]
    done = run_script(SCRIPTS / "bench_peers", *options)
    assert done.returncode == 1
    assert "error: generate ended with exit code 5" in done.stderr
