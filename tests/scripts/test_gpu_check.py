"""The script that checks a GPU runs on a CPU too, without what a bare machine lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# as on a machine that has torch and transformers and little else
BARE = """
import runpy, sys
sys.modules.update(dict.fromkeys(("pydantic", "datasets")))
sys.argv = ["gpu_check", *sys.argv[1:]]
runpy.run_path("scripts/gpu_check", run_name="__main__")
"""


def test_every_line_runs_on_a_cpu():
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--device", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kernel_error"] == 0
    assert min(found["copy_gb_s"], found["decode_kernel_gb_s"], found["swap_gb_s"]) > 0
    assert list(found["models"]) == ["tiny qwen3", "tiny llama"]
    for figures in found["models"].values():
        assert figures["output_tokens_s"] > 0
        assert 0 < figures["roofline_fraction"] < 1
        assert figures["steps"] > 10
    assert found["host_waits"] == []
    assert done.stderr.count("recorded, launched and swapped") == 2
