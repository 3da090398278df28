"""The step's breakdown on a tiny model: parts that add up, for ours and for the plain model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_llama

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_engine"


@pytest.mark.parametrize(
    ("decodes", "chunk"),
    [
        (3, 5),
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(0, 5, marks=pytest.mark.slow),
    ],
)
def test_the_parts_add_up_to_the_step(tmp_path, decodes, chunk):
    shape = ["--decodes", str(decodes), "--context", "90", "--chunk", str(chunk)]
    done = subprocess.run(
        [sys.executable, SCRIPT, tiny_llama(tmp_path), *shape, "--steps", "1", "--plain"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["engine"] for line in lines] == ["cbjob", "plain"]
    for line in lines:
        assert (line["decodes"], line["context"], line["chunk"]) == (decodes, 90, chunk)
        milliseconds = line["ms"]
        step = milliseconds.pop("step")
        assert list(milliseconds) == [
            "attention",
            "projections",
            "elementwise",
            "logits",
            "sampling",
            "host",
        ]
        assert all(part > 0 for part in milliseconds.values())
        assert sum(milliseconds.values()) == pytest.approx(step, abs=0.1)
        assert set(line["of_limit"]) == {"attention", "projections", "logits"}
