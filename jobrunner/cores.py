"""Count the cores that this process was granted: by affinity, by its cgroup, by Slurm."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_CGROUPS = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def granted_cores(
    environ: Mapping[str, str] = os.environ, cgroups: Path = _CGROUPS, mounted: Path = _MOUNTED
) -> int:
    """The least of what bounds this process, at least one core."""
    bounds = [len(os.sched_getaffinity(0)), *_quotas(cgroups, mounted)]
    per_task = environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit():
        bounds.append(int(per_task))
    return max(1, min(bounds))


def _quotas(cgroups: Path, mounted: Path) -> Iterator[int]:
    """Whole cores' worth of time that each group around this process may use."""
    for line in _text(cgroups).splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = mounted / controllers if controllers else mounted
        # a container sees its own group at the top of what is mounted
        for folder in {top, *_below(top, place)}:
            if controllers:
                files = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                quota = [_text(folder / name) for name in files]
            else:
                quota = _text(folder / "cpu.max").split()
            # no quota is "max" or "-1"
            if len(quota) == 2 and all(text.isdigit() for text in quota) and int(quota[1]):
                # half a core more is a core that is waited for
                yield int(quota[0]) // int(quota[1])


def _below(top: Path, place: str) -> Iterator[Path]:
    """The folder of a group and of those around it."""
    folder = top / place.strip("/")
    while folder != top and top in folder.parents:
        yield folder
        folder = folder.parent


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        # not this kind of cgroup, or none
        return ""
