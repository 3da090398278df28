"""`cbjob run`: read the settings, run the job, tell how it ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jobrunner.jobfile import load_settings
from jobrunner.stop import Stop


def run_command(
    job: Path,
    *,
    limit: int | None,
    overrides: Sequence[str],
    style: str | None,
    retry_errors: bool = False,
) -> int:
    """Run the job and return its exit code."""
    settings = load_settings(job, overrides, limit, style)
    share_the_cores()
    stop = Stop()
    with stop.on_signals(settings.checkpoint.grace):
        # imported late: a mistake in the settings is said, and a signal heard, before that
        from jobrunner.job import run

        return run(settings, retry_errors=retry_errors, stop=stop).exit_code


def share_the_cores() -> None:
    """Let idle threads sleep instead of spin, unless the user says otherwise.

    One other busy process on a machine makes spinning threads slow each other down tenfold.
    OpenMP reads this when torch is imported; tokenizers must not start threads beside it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
