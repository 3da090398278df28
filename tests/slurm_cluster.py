"""A real Slurm on loopback for tests, where one is installed. Knows nothing of jobs of ours."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "slurm_cluster"
# from the controller's port on, as many as there are nodes
STEPS = (0, 10, 11, 12)


def why_not() -> str:
    """Why no Slurm can be started here; empty where one can."""
    missing = [name for name in ("sbatch", "slurmctld", "slurmd", "munged") if not _program(name)]
    if missing:
        return f"no {missing[0]}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "only root can start a Slurm"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def _free_port() -> int:
    for port in range(24_000 + os.getpid() % 4_000, 60_000, 20):
        try:
            for step in STEPS:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port + step))
        except OSError:
            continue
        return port
    raise OSError("no free ports for a Slurm")


class Cluster:
    """A running Slurm; `environment` is what its commands and `cbjob` need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "etc" / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands; return what it says."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, by field."""
        said = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(field.partition("=")[::2] for field in said.split() if "=" in field)

    def preempt(self, seconds: float = 1.0, nodes: int = 2) -> str:
        """Submit a job that needs all nodes and goes before all others; return its number."""
        wanted = ("-p", "high", "--exclusive", f"--nodes={nodes}", "--output=/dev/null")
        return self.call("sbatch", "--parsable", *wanted, f"--wrap=sleep {seconds}")

    def node_daemon(self, node: str) -> int:
        """The process id of a node's daemon."""
        return int((self.folder / "pid" / f"slurmd.{node}.pid").read_text())

    def start_node(self, node: str) -> None:
        """Start the daemon of a node again."""
        subprocess.run(["/usr/sbin/slurmd", "-N", node], env=self.environment, check=True)


def wait_for(true: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Look again and again until something is true. Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > end_s:
            raise TimeoutError(f"in {timeout_s:g} s there was no sign of: {what}")
        time.sleep(0.1)


@contextmanager
def slurm_cluster(*, nodes: int = 2, grace_s: int = 10) -> Iterator[Cluster]:
    """Start a Slurm, and stop it with all its jobs in the end."""
    # another user than root has to get into it: pytest's folders let nobody in
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    environment = os.environ | {
        "PORT": str(_free_port()), "NODES": str(nodes), "GRACE": str(grace_s), "CPUS": "2",
    }  # fmt: skip
    try:
        subprocess.run([str(SCRIPT), "up", str(folder)], env=environment, check=True)
        yield Cluster(folder)
    finally:
        subprocess.run([str(SCRIPT), "down", str(folder)], env=environment, check=True)
        shutil.rmtree(folder)


def need_slurm() -> None:
    """Skip a test where no Slurm can be started."""
    if reason := why_not():
        pytest.skip(reason)
