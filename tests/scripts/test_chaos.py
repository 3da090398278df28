"""Short campaigns of kills and faults, and what they call lost; the long ones are run by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import find_difference

CHAOS = Path(__file__).resolve().parent.parent.parent / "scripts/chaos"
ROWS = {"a": [{"row": 0, "text": "x"}, {"row": 1, "text": "y"}]}


def campaign(*words):
    command = [sys.executable, str(CHAOS), "--workers", "3", "--seed", "3", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_random_kills_and_faults_lose_nothing_double_nothing_and_change_nothing():
    done = campaign("--kills", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills 6, " in done.stdout
    assert "rounds that differ: 0" in done.stdout


@pytest.mark.slow
def test_nor_do_they_with_a_model_of_transformers():
    done = campaign("--kills", "3", "--model", "tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rounds that differ: 0" in done.stdout


def difference(found, gap=1.0):
    ties = []
    return find_difference(ROWS, {"a": found}, lambda shard, one, other: gap, ties), ties


def test_lost_doubled_and_different_rows_are_named():
    zero, one = ROWS["a"]
    assert difference([zero, one]) == ("", [])
    assert difference([zero])[0] == "a: lost [1], doubled [], different []"
    assert difference([zero, one, one])[0] == "a: lost [], doubled [1], different []"
    other = one | {"text": "z"}
    said = 'a: lost [], doubled [], different [{"row": 1, "text": "z"}]'
    assert difference([zero, other]) == (said, [])


def test_a_row_that_differs_by_a_near_tie_is_only_noted():
    zero, one = ROWS["a"]
    assert difference([zero, one | {"text": "z"}], gap=5e-5) == ("", ["a row 1: gap 5.0e-05"])
