"""The priority and the arrival that a row brings along."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner.config import InputTable
from jobrunner.data.prompts.templates import needed_columns
from jobrunner.records import Completion, Request
from tests.prompt_jobs import error_of, open_prompts, outcomes_of
from tests.tiny_tokenizers import byte_level


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("model"))


def only(outcomes: list[Request | Completion]) -> Request:
    (outcome,) = outcomes
    assert isinstance(outcome, Request), outcome
    return outcome


@pytest.mark.parametrize(
    ("value", "priority"),
    [(0, 0), (7, 7), (2**31 - 1, 2**31 - 1), (3.0, 3), ("4", 4), (None, 0), ("", 0)],
)
def test_a_row_says_its_priority(folder: Path, value: object, priority: int) -> None:
    prompts = open_prompts(folder, priority="rank")
    assert only(outcomes_of(prompts, {"p": "x", "rank": value})).priority == priority


@pytest.mark.parametrize(
    ("value", "arrival_s"), [(0, 0.0), (1.5, 1.5), ("2.5", 2.5), (None, 0.0), (10**9, 1e9)]
)
def test_a_row_says_when_it_arrives(folder: Path, value: object, arrival_s: float) -> None:
    prompts = open_prompts(folder, arrival="at")
    assert only(outcomes_of(prompts, {"p": "x", "at": value})).arrival_s == arrival_s


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "a priority is a whole number from 0 to 2,147,483,647"),
        (2**31, "a priority is a whole number from 0 to 2,147,483,647"),
        (0.5, "a priority is a whole number from 0 to 2,147,483,647"),
        ("high", "a priority is a number"),
        (True, "a priority is a number"),
        (float("nan"), "a priority is a number"),
        pytest.param(10**400, "a priority is a number", id="huge"),
    ],
)
def test_case_Q_a_bad_priority_is_a_bad_params_row(folder: Path, value: object, words: str) -> None:
    prompts = open_prompts(folder, priority="rank")
    (outcome,) = outcomes_of(prompts, {"p": "x", "rank": value})
    assert isinstance(outcome, Completion)
    assert outcome.error is not None
    assert outcome.error.kind == "bad_params"
    assert outcome.error.message.endswith(f" in `rank`: {words}")


@pytest.mark.parametrize("value", [-0.5, float("inf"), "soon", [1], False])
def test_case_Q_a_bad_arrival_is_a_bad_params_row(folder: Path, value: object) -> None:
    prompts = open_prompts(folder, arrival="at")
    (outcome,) = outcomes_of(prompts, {"p": "x", "at": value})
    assert isinstance(outcome, Completion)
    assert outcome.error is not None
    assert outcome.error.kind == "bad_params"
    assert "`at`: an arrival is a number" in outcome.error.message


def test_all_samples_of_a_row_have_its_priority_and_arrival(folder: Path) -> None:
    prompts = open_prompts(folder, priority="rank", arrival="at", n=2)
    outcomes = outcomes_of(prompts, {"p": "x", "rank": 2, "at": 3})
    found = [(o.priority, o.arrival_s) for o in outcomes if isinstance(o, Request)]
    assert found == [(2, 3.0), (2, 3.0)]


def test_the_columns_of_priority_and_arrival_are_read() -> None:
    table = InputTable(path="a", prompt="p", priority="rank", arrival="at")
    assert needed_columns(table) == ("rank", "at")


def test_a_prompt_that_is_no_priority_is_a_bad_params_row(folder: Path) -> None:
    assert error_of(open_prompts(folder, priority="p"), "x")[0] == "bad_params"
