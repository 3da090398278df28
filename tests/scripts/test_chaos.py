"""A short campaign of kills and faults; the long one is run by hand."""

import subprocess
import sys
from pathlib import Path

CHAOS = Path(__file__).resolve().parent.parent.parent / "scripts/chaos"


def test_random_kills_and_faults_lose_nothing_double_nothing_and_change_nothing():
    command = [sys.executable, str(CHAOS), "--kills", "6", "--workers", "3", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills 6, " in done.stdout
    assert "rounds that differ: 0" in done.stdout
