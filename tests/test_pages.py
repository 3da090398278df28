"""The pages on faults and threats name a test in each line, and the tests are there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["jobs/FAULTS.md", "jobs/SECURITY.md"]


def lines_of(page):
    """The lines of a page's table, without its head."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    return lines[2:]


def named_in(line):
    """The tests in the last column of a line."""
    cell = line.rstrip("| ").rpartition("|")[2]
    return re.findall(r"`(tests/[^`]+)`", cell)


@cache
def names_of_tests(path):
    """The tests of a file as pytest names them; nothing is imported."""
    found = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{path}::{node.name}" if isinstance(node, ast.ClassDef) else path
        found |= {f"{prefix}::{one.name}" for one in inside if isinstance(one, ast.FunctionDef)}
    return {name for name in found if name.rpartition("::")[2].startswith("test_")}


@pytest.mark.parametrize("page", PAGES)
def test_every_line_names_a_test_that_exists(page):
    lines = lines_of(page)
    assert len(lines) > 10
    for line in lines:
        assert named_in(line), f"{page} names no test in: {line}"
        for name in named_in(line):
            assert name in names_of_tests(name.partition("::")[0]), f"{page}: there is no {name}"


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("jobs/FAULTS.md", "tests/test_faults.py"),
        ("jobs/SECURITY.md", "tests/test_security.py"),
    ],
)
def test_every_test_that_is_there_for_a_page_is_named_on_it(page, file):
    named = {name for line in lines_of(page) for name in named_in(line)}
    assert names_of_tests(file) <= named


def test_the_pages_can_be_found():
    guide = (ROOT / "jobs" / "README.md").read_text()
    assert all(Path(page).name in guide for page in PAGES)
