"""Speak with Slurm: write a job script, submit it, ask how long it may run. Runs no rows."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jobrunner.config import SlurmTable, can_quote_for_sbatch
from jobrunner.errors import ConfigError, InfrastructureError

log = logging.getLogger("cbjob")

# scontrol answers at once, or the controller is down and it tries for a long time
ANSWER_S = 20.0
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_END_TIME = re.compile(r"\bEndTime=(\d+)\b")


def job_script(
    slurm: SlurmTable, *, name: str, run_directory: Path, grace_s: float, command: Sequence[str]
) -> str:
    """Write the sbatch script that runs `command` as each worker of a job.

    Every value is one word of one line, whatever is in it. Raises ConfigError where the run
    directory has a name that sbatch cannot be told.
    """
    lines = ["#!/bin/bash"]
    lines += [f"#SBATCH {_word(option)}" for option in _asked(slurm, name, run_directory)]
    lines += [
        "# Started again after a preemption or the loss of a node, the job goes on with its log.",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "# So many seconds before the end the workers are told to save and leave.",
        f"#SBATCH --signal=USR2@{math.ceil(grace_s)}",
        "",
        "# srun hands signals on to the workers; a plain child of this script would not get them",
        f"{shlex.join(_srun(slurm))} {shlex.join(command)}",
        "code=$?",
    ]
    if slurm.requeue:
        lines += [
            "# 75: it had to leave early; 140, 143: it was told to before it could listen",
            'case "$code" in',
            '    75 | 140 | 143) scontrol requeue "$SLURM_JOB_ID" ;;',
            "esac",
        ]
    return "\n".join([*lines, 'exit "$code"', ""])


def submit(script: Path) -> str:
    """Hand a script to sbatch; return the id of the job. Raises ConfigError without sbatch."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no `sbatch` here", hint=f"submit `{script}` on a machine of the cluster"
        ) from error
    if done.returncode:
        raise InfrastructureError(
            f"sbatch refused `{script}`: {done.stderr.strip() or f'exit code {done.returncode}'}",
            hint="change [slurm] in the job file, or wait until Slurm answers again",
        )
    # with several clusters the name of one follows
    return done.stdout.strip().partition(";")[0]


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """How long the Slurm job around this process may still run; None outside of one."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        return None
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isdigit():
        end = _asked_end(job, environ)
    return float(end) - time.time() if end else None


def _asked_end(job: str, environ: Mapping[str, str]) -> str:
    """Ask the controller when a job ends, in Unix seconds; empty where it cannot be known.

    Older Slurm does not tell the job, and a warning signal still comes before the end.
    """
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            capture_output=True, text=True, check=True, timeout=ANSWER_S,
            env={**environ, "SLURM_TIME_FORMAT": "%s"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cannot ask Slurm when job %s ends, its signal has to do: %s", job, error)
        return ""
    found = _END_TIME.search(done.stdout)
    return found[1] if found else ""


def _asked(slurm: SlurmTable, name: str, run_directory: Path) -> Iterator[str]:
    yield "--job-name=" + (re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "job")
    for option in ("partition", "account", "gres"):
        if (value := getattr(slurm, option)) is not None:
            yield f"--{option}={value}"
    if slurm.time is not None:
        minutes, seconds = divmod(math.ceil(slurm.time), 60)
        yield f"--time={minutes}:{seconds:02}"
    yield f"--ntasks={slurm.tasks}"
    if slurm.cpus is not None:
        yield f"--cpus-per-task={slurm.cpus}"
    if slurm.array > 1:
        yield f"--array=0-{slurm.array - 1}"
    yield "--output=" + _log_pattern(run_directory, array=slurm.array > 1)
    yield from slurm.lines


def _log_pattern(run_directory: Path, *, array: bool) -> str:
    folder = str(run_directory)
    if not can_quote_for_sbatch(folder):
        raise ConfigError(
            f"Slurm cannot be told to write a log into `{folder}`",
            hint="choose an output.path without backslashes, control characters and quotes",
        )
    return folder.replace("%", "%%") + ("/slurm-%A_%a.log" if array else "/slurm-%j.log")


def _srun(slurm: SlurmTable) -> list[str]:
    # a worker that fails must not take the others with it
    words = ["srun", "--kill-on-bad-exit=0"]
    if slurm.tasks > 1:
        words.append("--label")
    if slurm.cpus is not None:
        # since 22.05 srun does not take this over from sbatch
        words.append(f"--cpus-per-task={slurm.cpus}")
    return words


def _word(text: str) -> str:
    """Quote a word of an #SBATCH line as sbatch reads it, which is not how a shell does."""
    if _PLAIN.fullmatch(text):
        return text
    return f'"{text}"' if "'" in text else f"'{text}'"
