"""The benches of scheduling on a tiny model: they run, and what must be exact is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# whole benchmarks, if small ones
pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "scripts"


def bench(name: str, *words: str | Path) -> dict[str, Any]:
    """What a bench says in its last line; it fails if the bench does."""
    command = [sys.executable, str(SCRIPTS / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture
def work(tmp_path: Path, tiny_model: Path) -> list[str]:
    return [str(tmp_path), "--model", str(tiny_model), "--set", 'model.dtype="float32"']


def test_steps_and_tokens_of_another_workload_are_predicted(work: list[str]) -> None:
    # a byte of a prompt is a token of the tiny model: the longest do not fit its context
    few = ["--rows", "6", "--repeats", "1", "--set", "batching.token_budget=64"]
    found = bench("bench_prediction", *work, *few, "--set", "input.too_long=truncate_left")
    for direction in found["directions"]:
        assert direction["tokens"]["ratio"] == 1.0
        assert direction["steps"]["ratio"] == pytest.approx(1.0, abs=0.02)
        assert direction["seconds"]["predicted"] > 0


def test_urgent_rows_preempt_others_by_swapping(work: list[str]) -> None:
    few = ["--rows", "8", "--urgent", "4", "--repeats", "1", "--rate", "1000"]
    found = bench("bench_priorities", *work, *few, "--set", "batching.max_batch_size=4")
    assert found["preemptions"] > 0
    assert found["swapped_blocks"] > 0
    assert found["tokens_recomputed"] == 0
    assert set(found["urgent_p99_s"]) == {"alone", "bands", "flat"}


def test_a_job_in_a_fifth_of_its_memory_says_the_same(tmp_path: Path, tiny_model: Path) -> None:
    rows, job = tmp_path / "rows.parquet", tmp_path / "job.toml"
    subprocess.run([sys.executable, SCRIPTS / "skewed_rows", rows, "--rows", "12"], check=True)
    job.write_text(
        f'[input]\npath = "{rows}"\nprompt = "question"\nparams = "params"\n'
        f'[output]\npath = "run"\n[model]\nname = "{tiny_model}"\n'
        '[batching]\nkv_memory = "64MiB"\n'
    )
    found = bench("bench_preemption", job, tmp_path, "--repeats", "1")
    assert found["swap_recompute_s"] == 0.0 < found["swap_swap_s"]
    assert found["recompute_swap_s"] == 0.0
    assert found["swap_lost_s"] == found["swap_swap_s"]


def test_a_shared_prompt_is_computed_once(work: list[str]) -> None:
    found = bench("bench_prefix", *work, "--rows", "20", "--shared", "100", "--without")
    assert found["computed"] + found["cached"] == found["prompt_tokens"]
    assert found["computed_share_without"] == 1.0
    # all but the last block of what is shared, and what is each row's own
    assert found["least_share"] <= found["computed_share"] < found["least_share"] + 0.05


def test_workers_share_a_job_and_its_tail(tmp_path: Path, tiny_model: Path) -> None:
    few = ["--rows", "48", "--tokens", "8", "--repeats", "1", "--set", 'model.dtype="float32"']
    found = bench("bench_workers", tmp_path, "--model", tiny_model, *few)
    assert found["throughput_ratio"] > 0
    assert set(found["tail_s"]) == {"shared", "not shared"}
