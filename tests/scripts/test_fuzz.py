"""The fuzz campaign runs, counts what it did, and tells a fault from a refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fuzzing import cases
from tests.fuzzing.cases import Model, Report, run_case
from tests.fuzzing.corpus import Corpus

FUZZ = Path(__file__).parents[2] / "scripts" / "fuzz"
# it has several rows, of Parquet, and nothing refuses it
SOUND_CASE = 12


def test_small_campaign_passes_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "campaign"
    sizes = ["--rows", "200", "--tiny-rows", "10", "--most-rows", "40"]
    done = subprocess.run(
        [sys.executable, str(FUZZ), *sizes, "--folder", str(folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("rows answered or explained: ") for line in lines) == 2
    assert lines[-1] == "PASS"
    assert not folder.exists()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(0, count=50)


def run(folder: Path, model: Path, corpus: Corpus) -> Report:
    folder.mkdir()
    return run_case(SOUND_CASE, 0, folder, corpus, Model(model, 256), most_rows=40)


def test_case_is_the_same_for_the_same_seed(
    tmp_path: Path, tiny_model: Path, corpus: Corpus
) -> None:
    one, other = (run(tmp_path / name, tiny_model, corpus) for name in ("one", "other"))
    assert one == other
    assert one.rows > 1
    assert one.problems == []


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [*rows, *rows[-1:]]])
def test_lost_or_doubled_row_is_a_fault(
    tmp_path: Path,
    tiny_model: Path,
    corpus: Corpus,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
) -> None:
    read = cases.read_result
    monkeypatch.setattr(cases, "read_result", lambda *asked: change(read(*asked)))
    report = run(tmp_path / "case", tiny_model, corpus)
    assert any("became rows" in problem for problem in report.problems)
