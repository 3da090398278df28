"""What can be said of the shell scripts without running minutes of set-up."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL_SCRIPTS = [
    "scripts/setup",
    "scripts/quickstart",
    "scripts/test",
    "scripts/test_oldest",
    "scripts/check",
    "scripts/slurm_cluster",
    ".ci/run",
]


@pytest.mark.parametrize("name", SHELL_SCRIPTS)
def test_script_is_executable_and_stops_at_the_first_error(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK)
    assert "\nset -euo pipefail\n" in path.read_text()
    subprocess.run(["bash", "-n", path], check=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone's scripts, beside a folder `bin` for stand-in programs."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def set_up(clone: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup where every Python is the shell script `python`."""
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        program = clone / "bin" / name
        program.write_text(f"#!/bin/sh\n{python}\n")
        program.chmod(0o755)
    return subprocess.run(
        [clone / "scripts" / "setup"],
        env=os.environ | {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_old_python_is_refused_with_its_version(clone: Path) -> None:
    result = set_up(clone, '[ "$1" = --version ] && echo Python 3.9.2; exit 1')
    assert result.returncode == 2
    assert result.stderr == (
        "error: no Python 3.11 or newer found; python3 is Python 3.9.2\n"
        "hint: install Python 3.11 or newer\n"
    )
    assert not (clone / ".venv").exists()


def test_python_without_venv_is_refused_with_the_package_to_install(clone: Path) -> None:
    result = set_up(clone, 'case "$2" in *ensurepip*) exit 1 ;; esac')
    assert result.returncode == 2
    assert result.stderr == (
        "error: python3 cannot make virtual environments (venv or ensurepip is missing)\n"
        "hint: install them, on Debian and Ubuntu: apt-get install python3-venv\n"
    )
    assert not (clone / ".venv").exists()
