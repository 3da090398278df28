"""Tell how much of a machine this process may use, not what there is. Knows nothing of torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

# how many workers share what this machine grants, said by the process that starts them
WORKERS_VARIABLE = "CBJOB_WORKERS_HERE"

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def allowed_cores(
    environ: Mapping[str, str] = os.environ, root: Path = _ROOT, membership: Path = _MEMBERSHIP
) -> int:
    """Return how many cores to compute on: what OMP_NUM_THREADS says, else those granted."""
    asked = _whole(environ.get("OMP_NUM_THREADS"))
    return granted_cores(environ, root, membership) if asked is None else asked


def granted_cores(
    environ: Mapping[str, str] = os.environ, root: Path = _ROOT, membership: Path = _MEMBERSHIP
) -> int:
    """Return the least of what the system, the cgroups above and Slurm leave to this process.

    A quota of less than one core counts as one. Workers that were started together share quotas
    and what Slurm gives; cores that a worker is bound to are its own.
    """
    shared = list(_quotas(root, membership))
    task = _whole(environ.get("SLURM_CPUS_PER_TASK"))
    if task is not None:
        shared.append(task)
    workers = workers_here(environ)
    return min([_affinity(), *(max(1, cores // workers) for cores in shared)])


def workers_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many workers of one command share this machine; one that is alone counts too."""
    return _whole(environ.get(WORKERS_VARIABLE)) or 1


def _whole(text: str | None) -> int | None:
    """A number of cores; None for anything else, such as OpenMP's lists by level."""
    return int(text) if text is not None and text.isdigit() and int(text) > 0 else None


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(root: Path, membership: Path) -> Iterator[int]:
    """The whole cores of each quota over this process, by either version of cgroups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        # another system
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers == "":
            yield from _along(root, name, _quota_of_version_2)
        elif "cpu" in controllers.split(","):
            yield from _along(root / "cpu", name, _quota_of_version_1)


def _along(root: Path, name: str, quota: Callable[[Path], float | None]) -> Iterator[int]:
    """Quotas of a group and of all around it; in a container the outer ones are not to be seen."""
    group = root / name.strip("/")
    for folder in (group, *group.parents):
        try:
            cores = quota(folder)
        except (OSError, ValueError):
            cores = None
        if cores is not None:
            yield max(1, math.floor(cores))
        if folder == root:
            break


def _quota_of_version_2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_of_version_1(folder: Path) -> float | None:
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
