"""`cbjob submit`: write a job script for Slurm and hand it over."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from jobrunner.cluster.slurm import job_script, submit
from jobrunner.config import Settings
from jobrunner.data.layout import RunDirectory
from jobrunner.errors import ConfigError, ExitCode
from jobrunner.jobfile import load_settings


def submit_command(
    job: Path, *, limit: int | None, overrides: Sequence[str], only_print: bool
) -> int:
    """Write the script into the run directory and submit it, or only print it."""
    settings = load_settings(job, overrides, limit)
    script = job_script(
        settings.slurm,
        name=settings.job.name,
        run_directory=settings.run_directory,
        grace_s=settings.checkpoint.grace,
        command=run_words(job, limit, overrides),
    )
    if only_print:
        click.echo(script, nl=False)
        return ExitCode.OK
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no `sbatch` here",
            hint="run this on a machine of the cluster; --print shows the script",
        )
    path = _write(settings, script)
    number = submit(path)
    click.echo(f"wrote {path}", err=True)
    click.echo(f"submitted; `cbjob status {job}` tells how far it is", err=True)
    click.echo(number)
    return ExitCode.OK


def run_words(job: Path, limit: int | None, overrides: Sequence[str]) -> list[str]:
    """The command that runs a job from any folder, in any environment."""
    words = [sys.executable, "-m", "jobrunner.cli", "run", str(job.absolute())]
    if limit is not None:
        words.append(f"--limit={limit}")
    return [*words, *(f"--set={override}" for override in overrides)]


def _write(settings: Settings, script: str) -> Path:
    directory = RunDirectory(settings.run_directory, f"submit-{os.getpid()}")
    directory.create()
    path = directory.root / "slurm.sh"
    with directory.writing(path) as temporary:
        temporary.write_text(script)
    return path
