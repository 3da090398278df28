"""Tell what a process and its children take of the machine, from Linux's /proc. Start nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

_PROC = Path("/proc")
# user, nice, system, idle, waiting for a disk, interrupts, theirs, taken by other machines
_COUNTED, _IDLE, _WAITING = 8, 3, 4
_QUIET_CORES = 0.15
_LOOK_S = 2.0


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in _PROC.glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def peak_memory_bytes(pid: int) -> int:
    """Sum of the peaks (VmHWM) of a family: what they share counts for each that has touched it."""
    return sum(_peak_bytes(_PROC / str(one) / "status") for one in family(pid))


def cpu_s(pid: int) -> float:
    """Processor time of a family since each of them began, what it waited for included."""
    ticks = 0
    for one in family(pid):
        if fields := _stat(_PROC / str(one) / "stat"):
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Processor time of everything since the machine began."""
    words = (_PROC / "stat").read_text().split("\n", 1)[0].split()
    ticks = [int(word) for word in words[1 : 1 + _COUNTED]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(limit_s: float) -> None:
    """Wait until the machine is all but idle, and no longer than so."""
    ends_s = time.monotonic() + limit_s
    while (left_s := ends_s - time.monotonic()) > 0:
        look_s = min(_LOOK_S, left_s)
        before_s = machine_cpu_s()
        time.sleep(look_s)
        if (machine_cpu_s() - before_s) / look_s < _QUIET_CORES:
            return


def _stat(path: Path) -> list[str]:
    """What stands behind the name, which may hold spaces: state, parent and so on."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        # it has ended meanwhile
        return []


def _peak_bytes(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
