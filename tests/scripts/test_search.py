"""Property tests take the same examples in each run, and a search takes more and other ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROPERTY = """
from pathlib import Path
from hypothesis import given, strategies as st
from tests.properties import examples

@examples(6)
@given(st.integers())
def test_numbers(number):
    with open({drawn!r}, "a") as file:
        print(number, file=file)
    assert number < {limit}
"""


@pytest.fixture
def test_file(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    return tmp_path / "test_numbers.py"


def drawn_by(test_file: Path, command: list[str], *, limit: float = 1e999, code: int = 0) -> tuple:
    """Run a command on a property of numbers; return the numbers it took and what it said."""
    drawn = test_file.with_name("drawn")
    drawn.write_text("")
    text = f'float("{limit}")'
    test_file.write_text(PROPERTY.format(drawn=str(drawn), limit=text))
    done = subprocess.run(
        [sys.executable, *command, str(test_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return drawn.read_text().split(), done.stdout


@pytest.mark.slow
def test_each_run_takes_the_same_examples(test_file: Path) -> None:
    pytest_alone = ["-m", "pytest", "-p", "no:cacheprovider"]
    (once, _), (again, _) = drawn_by(test_file, pytest_alone), drawn_by(test_file, pytest_alone)
    assert once == again
    assert len(once) == 3


@pytest.mark.slow
def test_search_takes_more_examples_and_other_ones(test_file: Path) -> None:
    command = ["scripts/search", "--minutes", "0", "--seed"]
    one, said = drawn_by(test_file, [*command, "1"])
    other, _ = drawn_by(test_file, [*command, "2"])
    assert one != other
    assert min(len(one), len(other)) == 60
    assert "1 properties held, of 1 runs in " in said


def test_search_ends_at_a_failure_and_says_how_to_repeat_it(test_file: Path) -> None:
    _, said = drawn_by(test_file, ["scripts/search", "--minutes", "60"], limit=100, code=1)
    assert "Falsifying example" in said or "Failing test case" in said
    assert "@reproduce_failure(" in said
    command = said.splitlines()[-1].removeprefix("FAULT: python ").split()
    assert command[-1].endswith("test_numbers.py::test_numbers")
    _, again = drawn_by(test_file, command[:-1], limit=100, code=1)
    blob = said.partition("@reproduce_failure(")[2].partition(")")[0]
    assert blob in again
